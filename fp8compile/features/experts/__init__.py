"""Experts as models spell them: loops over experts as grouped matmuls, and the permutation of tokens as a
lookup. (The core knows grouped matmuls.)"""

from ...extension import Feature, Pass
from .fallbacks import spell, unspell
from .scatters import scatters as run_scatters


class Experts(Feature):
    name = "experts"
    passes = {
        "unite": (
            Pass("spell", spell),  # transformers' loops over experts as grouped matmuls
            # the backward of the experts' permutation as a lookup, which fuses
            Pass("scatters", run_scatters, optional=True),
        ),
        "reduce_current": (Pass("unspell", unspell),),  # those that stay in high precision as they were
    }
