"""The same functions in plain float64 NumPy and einops: the definition, and the oracle of every device's tests.

They take the same arguments as the functions of `pyferrum` (NumPy arrays, Arrays and BlockArrays alike) and give NumPy
arrays. Values are rounded to float16 at the points of the numerics contract (docs/numerics.md) and nowhere else;
`rounding=False` leaves that out.
"""

from pyferrum.reference.attention import KVState, causal_attention, init_state
from pyferrum.reference.blocks import dequantize
from pyferrum.reference.ops import (
    argmax,
    cross_entropy,
    embed,
    linear,
    residual_add,
    rms_norm,
    swiglu,
    top_k,
)

__all__ = [
    "KVState",
    "argmax",
    "causal_attention",
    "cross_entropy",
    "dequantize",
    "embed",
    "init_state",
    "linear",
    "residual_add",
    "rms_norm",
    "swiglu",
    "top_k",
]
