"""The data that passes work on: operators, scales and their page, matmuls, and facts about graphs' inputs."""
