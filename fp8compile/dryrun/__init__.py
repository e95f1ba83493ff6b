"""Explain and estimate. Neither trains a model; explain compiles nothing, estimate for a described GPU."""
