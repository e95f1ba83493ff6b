"""What passes work on: operators, scales and their page, matmuls, and what a graph knows of its inputs."""
