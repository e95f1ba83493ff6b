"""GPUs: their descriptions, their FP8 formats, what a matmul costs on them, and how to measure it."""
