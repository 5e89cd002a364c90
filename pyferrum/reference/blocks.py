"""GGUF block formats in NumPy: what each block's bytes mean (after ggml's quants).

Arithmetic is float32, the format's own: scales are widened first, products and differences rounded once each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from einops import rearrange

from pyferrum.formats import FORMATS
from pyferrum.weights import check_blocks

Bytes = np.ndarray[Any, np.dtype[Any]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]


def dequantize(data: Bytes, format: str, shape: tuple[int, ...]) -> Float32:
    """The matrix in `data`, uint8 blocks row after row: float32 of `shape`."""
    check_blocks("data", format, shape, data.size)
    _, _, size = FORMATS[format]
    return _DECODERS[format](data.reshape(-1, size)).reshape(shape)


def _half(blocks: Bytes, at: int) -> Float32:
    """The float16 at byte `at` of every block, as a column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high nibbles: elements 0…15 and 16…31 of a block of 32."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit e of the little-endian u32 at byte `at`, as the fifth bit of element e."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(b: Bytes) -> Float32:
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Float32:
    return _half(b, 0) * _nibbles(b[:, 4:]) + _half(b, 2)


def _q5_0(b: Bytes) -> Float32:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Float32:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)) + _half(b, 2)


def _q8_0(b: Bytes) -> Float32:
    return _half(b, 0) * b[:, 2:].view(np.int8)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from the 12 bytes of a Q4_K or Q5_K block."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    mins = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=1)
    return scales, mins


def _k_matrix(b: Bytes, q: Bytes) -> Float32:
    """d * scale * q - dmin * min for quants [block, 8, 32]."""
    scales, mins = _k_scales(b[:, 4:16])
    return (_half(b, 0) * scales)[:, :, None] * q - (_half(b, 2) * mins)[:, :, None]


def _k_nibbles(packed: Bytes) -> Bytes:
    """[block, 8, 32] from 128 bytes: each run of 32 bytes holds sub-block 2j low and 2j + 1 high."""
    runs = rearrange(packed, "b (j l) -> b j l", l=32)
    return rearrange(np.stack([runs & 15, runs >> 4], axis=2), "b j half l -> b (j half) l")


def _q4_k(b: Bytes) -> Float32:
    return _k_matrix(b, _k_nibbles(b[:, 16:144]))


def _q5_k(b: Bytes) -> Float32:
    sub = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (b[:, None, 16:48] >> sub & 1) << 4
    return _k_matrix(b, _k_nibbles(b[:, 48:176]) | fifth)


def _q6_k(b: Bytes) -> Float32:
    ql = rearrange(b[:, 0:128], "b (half r) -> b half r", half=2)
    qh = rearrange(b[:, 128:192], "b (half l) -> b half l", half=2)
    low = np.concatenate([ql & 15, ql >> 4], axis=2)
    high = np.concatenate([qh >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    q = rearrange((low | high << 4).astype(np.float32) - 32, "b half (g l) -> b (half g) l", l=16)
    return (_half(b, 208) * b[:, 192:208].view(np.int8))[:, :, None] * q


_DECODERS: dict[str, Callable[[Bytes], Float32]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
