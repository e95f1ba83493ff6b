"""For models on several processes. docs/distributed.md is the guide."""

from __future__ import annotations

from .runtime.all_gather import fp8_all_gather as fp8_all_gather

__all__ = ["fp8_all_gather"]
