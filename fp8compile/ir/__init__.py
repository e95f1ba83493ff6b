"""The data that passes work on: operators, scales and their page, and matmuls."""
