"""Phases of high precision and of FP8: `[schedule]` of a policy, `set_precision` and `on_step`."""

from .phases import Phases as Phases
