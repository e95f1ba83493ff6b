"""The passes over FX graphs, one a file, and their helpers. `pipeline` has the order of the passes."""
