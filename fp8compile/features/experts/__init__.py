"""Experts as models spell them: loops as grouped matmuls (which the core knows), permutations as lookups."""

from ...extension import Feature, Pass
from .fallbacks import spell, unspell
from .scatters import scatters as run_scatters


class Experts(Feature):
    name = "experts"
    passes = {
        "unite": (
            Pass("spell", spell),  # transformers' loops over experts as grouped matmuls
            Pass("scatters", run_scatters, optional=True),  # a permutation's backward as a lookup
        ),
        "reduce_current": (Pass("unspell", unspell),),  # those that stay in high precision as they were
    }
