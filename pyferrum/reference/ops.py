"""The operations beside attention, as definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
from einops import einsum
from numpy.typing import DTypeLike

from pyferrum.weights import BlockArray

Numbers = np.ndarray[Any, Any]


def wide(x: Any) -> Numbers:
    """Any array argument as float64; blocks are dequantised."""
    return np.asarray(x.dequantize() if isinstance(x, BlockArray) else x).astype(np.float64)


def half(x: Numbers, rounding: bool = True) -> Numbers:
    """A rounding point: to the nearest float16, ties to even, kept as float64."""
    with np.errstate(over="ignore"):  # beyond float16's range is infinity, as on every device
        return x.astype(np.float16).astype(np.float64) if rounding else x


def like(value: Numbers, x: Any, rounding: bool = True) -> Numbers:
    """The value in the hidden stream's dtype: float16 where x is, else float64."""
    if np.asarray(x).dtype == np.float16 and rounding:
        with np.errstate(over="ignore"):
            return value.astype(np.float16)
    return value


def normalize(x: Numbers, weight: Numbers | None, epsilon: float) -> Numbers:
    """RMS norm over the last axis; no weight, no norm."""
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def rms_norm(x: Any, weight: Any, *, epsilon: float = 1e-5, rounding: bool = True) -> Numbers:
    """x * rsqrt(mean(x^2) + epsilon) * weight."""
    return half(normalize(wide(x), wide(weight), epsilon), rounding)


def linear(x: Any, weight: Any, bias: Any = None, *, dtype: DTypeLike = np.float16, rounding: bool = True) -> Numbers:
    """x weight^T + bias."""
    y = einsum(wide(x), wide(weight), "t i, o i -> t o")
    y = y if bias is None else y + wide(bias)
    return half(y, rounding and np.dtype(dtype) == np.float16)


def embed(tokens: Any, weight: Any, *, dtype: DTypeLike = np.float32, rounding: bool = True) -> Numbers:
    """weight[tokens]."""
    rows = wide(weight)[np.asarray(tokens)]
    return rows.astype(np.float16) if rounding and np.dtype(dtype) == np.float16 else rows


def sigmoid(x: Numbers) -> Numbers:
    """1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def swiglu(gate: Any, up: Any, *, rounding: bool = True) -> Numbers:
    """gate * sigmoid(gate) * up."""
    g = wide(gate)
    return half(g * sigmoid(g) * wide(up), rounding)


def residual_add(x: Any, branch: Any, *, rounding: bool = True) -> Numbers:
    """x + branch, in x's dtype."""
    return like(wide(x) + wide(branch), x, rounding)


def cross_entropy(logits: Any, targets: Any) -> Numbers:
    """logsumexp(logits) - logits[target], row by row."""
    x, t = wide(logits), np.asarray(targets)
    most = x.max(axis=1)
    return np.log(np.exp(x - most[:, None]).sum(axis=1)) + most - x[np.arange(len(t)), t]


def argmax(x: Any) -> Numbers:
    """Index of each row's largest value, the lowest of equals; NaN comes before every number."""
    return np.argmax(np.asarray(x), axis=1)


def top_k(x: Any, k: int) -> tuple[Numbers, Numbers]:
    """(values, indices) of each row's k largest, the lower index first among equals; NaN comes before every number."""
    x = np.asarray(x)
    nan = np.isnan(x)
    indices = np.lexsort((np.where(nan, 0, -x), ~nan), axis=1)[:, :k]
    return np.take_along_axis(x, indices, axis=1), indices
