"""Policies: which matmuls become FP8 and how, in rules that a file, a dict or Python can hold.

    policy_errors, validation   PolicyError, and tables that check their values
    patterns, condition         globs, and the expression language over m, n, k
    match                       the facts that a rule can test, and whether it matches
    policy_tables               Rule, Policy and the other tables
    policy_files                reading policies

>>> load("llama").choose(site).fp8
"""

from __future__ import annotations

from .match import Choice, Site, nameless, unmatched
from .policy_errors import PolicyError
from .policy_files import BUILTIN, VARIABLE, load
from .policy_tables import Defaults, NamedRecipe, Policy, Rule, Schedule
from .validation import schema

__all__ = [
    "BUILTIN",
    "VARIABLE",
    "Choice",
    "Defaults",
    "NamedRecipe",
    "Policy",
    "PolicyError",
    "Rule",
    "Schedule",
    "Site",
    "load",
    "nameless",
    "schema",
    "unmatched",
]
