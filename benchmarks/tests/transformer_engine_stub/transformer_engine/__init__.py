"""TransformerEngine's names and arguments, as far as the benchmark uses them, for tests on a CPU."""
