"""Turns our operators into ATen operators and Triton kernels, which Inductor compiles. Knows no passes."""
