"""The data that passes work on: operators, scales and their page, matmuls, and facts about a graph's
inputs."""
