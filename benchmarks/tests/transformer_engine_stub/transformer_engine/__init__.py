"""TransformerEngine's names and arguments, as far as the benchmark uses them, in high precision on a CPU. For
tests."""
