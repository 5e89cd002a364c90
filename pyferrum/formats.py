"""Names, numbers and NumPy dtypes of the formats that arrays and weights come in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pyferrum import _native
from pyferrum.errors import InvalidArgument

Shape = tuple[int, ...]

bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

FORMATS = _native.formats()
"""Every weight format the library multiplies: name to (number, elements per block, bytes per block)."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": bfloat16,
    "I32": np.dtype(np.int32),
}
"""The dtypes an Array can have, by format name."""

NUMBERS: dict[str, int] = {name: number for name, (number, _, _) in FORMATS.items()} | {
    "I32": _native.constant("FERRUM_FORMAT_I32")
}

BLOCK_FORMATS: tuple[str, ...] = tuple(name for name, (_, elements, _) in FORMATS.items() if elements > 1)
"""The block-quantised weight formats."""

NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def hidden_format(dtype: Any, name: str) -> int:
    """Format number of a hidden-state dtype: float16 or float32 (the float32-master op)."""
    dtype = np.dtype(dtype)
    if dtype not in (DTYPES["F16"], DTYPES["F32"]):
        raise InvalidArgument(f"{name}: expected float16 or float32, got {dtype}")
    return NUMBERS[NAMES[dtype]]
