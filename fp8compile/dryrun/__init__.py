"""Explain and estimate. Neither trains a model; explain compiles nothing, estimate compiles for a described
GPU."""
