"""Random weights of every format, and the linear table."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import pyferrum as pf
from pyferrum.formats import BLOCK_FORMATS, FORMATS

DENSE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

# Where the float16 scales of a block are: bytes that random bits may not fill, since they could be NaN.
SCALE_BYTES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(rng: np.random.Generator, format: str, shape: tuple[int, int], scale: float) -> np.ndarray:
    """Blocks of random bytes with float16 scales of about `scale`: uint8, row after row."""
    _, elements, size = FORMATS[format]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    for at in SCALE_BYTES[format]:
        values = scale * rng.uniform(0.5, 1.5, len(blocks)) * rng.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


def random_weight(rng: np.random.Generator, format: str, shape: tuple[int, int]) -> pf.Array | pf.BlockArray:
    """A matrix whose products with unit-variance rows have about unit variance."""
    if format in DENSE:
        return pf.array((rng.standard_normal(shape) / np.sqrt(shape[1])).astype(DENSE[format]))
    weight = pf.block_array(random_blocks(rng, format, shape, 1.0), format, shape)
    scale = 1 / (np.sqrt(shape[1]) * float(weight.dequantize().std()))
    return pf.block_array(random_blocks(rng, format, shape, scale), format, shape)


ALL_FORMATS = (*DENSE, *BLOCK_FORMATS)
