"""Random weights of every format, and the linear table."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import pyferrum as pf
from pyferrum import reference
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


def largest_error(x: np.ndarray, weight: pf.Array | pf.BlockArray) -> np.ndarray:
    """What each output of a float32 `linear` of float16 inputs may be off by: the bounds of docs/numerics.md."""
    size, dense = np.abs(x.astype(np.float64)), np.abs(reference.ops.wide(weight))
    inputs, products = x.shape[1], size @ dense.T
    if not isinstance(weight, pf.BlockArray):
        return inputs * 2.0**-24 * products  # whatever the order
    groups = range(0, inputs, 128)
    largest = np.repeat(np.maximum.reduceat(size, groups, axis=1), 128, axis=1)[:, :inputs]
    fixed_point = 2.0**-15 * np.where(size < largest / 16, largest, 0) @ dense.T
    with_minimum = len(SCALE_BYTES[weight.format]) == 2
    if with_minimum:
        blocks = weight._bytes().reshape(-1, FORMATS[weight.format][2]).copy()
        blocks[:, :2] = 0  # the scale: what is left are the minima
        minimum = pf.block_array(blocks.reshape(-1), weight.format, weight.shape).dequantize().astype(np.float64)
        products = size @ (np.abs(reference.ops.wide(weight) - minimum) + np.abs(minimum)).T
    chain = 4 * (1 + (weight.format == "Q6_K") + with_minimum) + len(groups) + 1
    # Metal's tiles, which take more than 16 rows, round block weights to float16 and no inputs.
    tiles = 2.0**-11 * size @ dense.T if pf.device_info()["name"] == "metal" and len(x) > 16 else 0.0
    return fixed_point + chain * 2.0**-24 * products + tiles


ALL_FORMATS = (*DENSE, *BLOCK_FORMATS)
