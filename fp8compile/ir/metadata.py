"""The keys under which passes note facts on nodes, in `node.meta`, and the name of a quantized tensor."""

from dataclasses import dataclass, field

OPERAND = "fp8_operand"  # a cast: the `TensorKey` of what it copies
RESULT = "fp8_result"  # what has a matmul's result, in either precision: its `Product`
PRODUCT = "fp8_product"  # an FP8 matmul: its `Product`
FALLBACK = "fp8_fallback"  # a grouped matmul that `spell` wrote instead of an operator of transformers
FORM = "fp8_form"  # an FP8 matmul: its form, where the first choice was refused (`passes.try_matmuls`)
AMAX_BITS = "fp8_amax_bits"  # amaxes that are a float32 view of int32
READ_AGAIN = "fp8_read_again"  # the launch of a generated kernel: bytes that it reads from memory once more


@dataclass(frozen=True)
class TensorKey:
    """A quantized tensor as a graph knows it: the input (by position) whose matmul it serves, its role, and
    which use. Plain data. `recipe`: how it is scaled; no part of its identity."""

    input: int
    role: str  # "input" | "weight" | "gradient"
    use: int
    recipe: str = field(compare=False)
