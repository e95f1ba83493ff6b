"""Policies: which matmuls become FP8 and how, in rules that a file, a dict or Python can hold.

    policy_errors, validation   PolicyError, and tables that check their values
    patterns, condition         globs, and the expression language over m, n, k
    match                       the facts that a rule can test, and whether it matches
    windows                     rules in time: which are active at a step
    policy_tables               Rule, Policy and the other tables
    policy_files                reading and writing policies

>>> load("llama").choose(site).fp8
"""

from __future__ import annotations

from .match import Choice as Choice
from .match import Site as Site
from .match import nameless as nameless
from .match import unmatched as unmatched
from .policy_errors import PolicyError as PolicyError
from .policy_files import BUILTIN as BUILTIN
from .policy_files import load as load
from .policy_files import preceded as preceded
from .policy_tables import Policy as Policy
from .policy_tables import Rule as Rule
from .policy_tables import Schedule as Schedule
from .validation import schema as schema
