"""`backend="fp8"` against bf16 and torchao: `python -m benchmarks.train --case NAME`; docs/benchmarks.md."""
