"""The passes over FX graphs, one a file. `pipeline` has their order."""
