"""Trained models as FP8 checkpoints that servers load. No graph is made here: what graphs decided is read from records."""
