"""Optimizers that keep their states in few bytes, and whose checkpoints are torch's."""

from .adamw import AdamW

__all__ = ["AdamW"]
