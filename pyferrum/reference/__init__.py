"""The same functions in plain float64 NumPy and einops: the definition, and the oracle of every device's tests.

They take the same arguments as the functions of `pyferrum` (NumPy arrays, Arrays and BlockArrays alike) and give NumPy
arrays. Values are rounded to float16 at the points of the numerics contract (docs/numerics.md) and nowhere else;
`rounding=False` leaves that out.
"""

from pyferrum.reference.attention import KVState, causal_attention, init_state
from pyferrum.reference.blocks import dequantize
from pyferrum.reference.dflash2 import (
    DFlash2Ring,
    dflash2_attention,
    dflash2_commit,
    dflash2_conv,
    dflash2_heads,
    dflash2_mask,
    dflash2_mask_rows,
    dflash2_pack,
    dflash2_select,
    init_dflash2_ring,
    load_dflash2_ring,
)
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
    "DFlash2Ring",
    "KVState",
    "argmax",
    "causal_attention",
    "cross_entropy",
    "dequantize",
    "dflash2_attention",
    "dflash2_commit",
    "dflash2_conv",
    "dflash2_heads",
    "dflash2_mask",
    "dflash2_mask_rows",
    "dflash2_pack",
    "dflash2_select",
    "embed",
    "init_dflash2_ring",
    "init_state",
    "linear",
    "load_dflash2_ring",
    "residual_add",
    "rms_norm",
    "swiglu",
    "top_k",
]
