"""Explain and estimate: they train nothing, and compile nothing or for a GPU that is not there."""
