"""The operations beside attention: pure functions of arrays, each one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pyferrum import _native
from pyferrum.array import Array, as_array, output
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument
from pyferrum.formats import hidden_format
from pyferrum.weights import BlockArray, as_weight


def _device(*arguments: Any) -> Device:
    for argument in arguments:
        if isinstance(argument, (Array, BlockArray)):
            return argument.device
    return default_device()


def rms_norm(x: ArrayLike | Array, weight: ArrayLike | Array, *, epsilon: float = 1e-5) -> Array:
    """x * rsqrt(mean(x^2) + epsilon) * weight, row by row (Zhang and Sennrich 2019).

    Args:
        x: float16 or float32 [T, width].
        weight: float16 or float32 [width].
        epsilon: added to the mean square.

    Returns:
        float16 [T, width]; the sum is float32.
    """
    device = _device(x, weight)
    x, weight = as_array(x, "x", device=device), as_array(weight, "weight", device=device)
    (y,) = _native.operation("rms_norm", device.handle, x.tensor, weight.tensor, epsilon)
    return output(device, y, x.shape, np.float16)


def linear(
    x: ArrayLike | Array,
    weight: ArrayLike | Array | BlockArray,
    bias: ArrayLike | Array | None = None,
    *,
    dtype: DTypeLike = np.float16,
) -> Array:
    """x weight^T + bias, the weight multiplied as it is stored.

    Args:
        x: float16 [T, in].
        weight: [out, in], dense or a BlockArray.
        bias: float16 or float32 [out], optional.
        dtype: of the result, float16 or float32.

    Returns:
        [T, out]; sums are exact or float32 (docs/numerics.md).
    """
    device = _device(x, weight)
    x, w = as_array(x, "x", device=device), as_weight(weight, "weight", device)
    b = None if bias is None else as_array(bias, "bias", device=device)
    number = hidden_format(dtype, "dtype")
    tensors = (x.tensor, w.tensor, _native.NO_TENSOR if b is None else b.tensor)
    (y,) = _native.operation("linear", device.handle, *tensors, number)
    return output(device, y, (x.shape[0], w.shape[0]), dtype)


def embed(tokens: ArrayLike | Array, weight: ArrayLike | Array | BlockArray, *, dtype: DTypeLike = np.float32) -> Array:
    """Rows of the embedding: weight[tokens].

    Args:
        tokens: integers [T], each in 0…vocabulary-1.
        weight: [vocabulary, width], dense or a BlockArray.
        dtype: of the result, float32 or float16.

    Returns:
        [T, width].
    """
    device = _device(tokens, weight)
    t, w = _indices(tokens, "tokens", device), as_weight(weight, "weight", device)
    (y,) = _native.operation("embed", device.handle, t.tensor, w.tensor, hidden_format(dtype, "dtype"))
    return output(device, y, (t.shape[0], w.shape[1]), dtype)


def swiglu(gate: ArrayLike | Array, up: ArrayLike | Array) -> Array:
    """gate * sigmoid(gate) * up (Shazeer 2020).

    Args:
        gate: float16 [T, width].
        up: the same.

    Returns:
        float16 [T, width]; computed in float32.
    """
    device = _device(gate, up)
    gate, up = as_array(gate, "gate", device=device), as_array(up, "up", device=device)
    (y,) = _native.operation("swiglu", device.handle, gate.tensor, up.tensor)
    return output(device, y, gate.shape, np.float16)


def residual_add(x: ArrayLike | Array, branch: ArrayLike | Array) -> Array:
    """x + branch, in x's dtype.

    Args:
        x: float16 or float32 [T, width].
        branch: float16 [T, width].
    """
    device = _device(x, branch)
    x, branch = as_array(x, "x", device=device), as_array(branch, "branch", device=device)
    (y,) = _native.operation("residual_add", device.handle, x.tensor, branch.tensor)
    return output(device, y, x.shape, x.dtype)


def cross_entropy(logits: ArrayLike | Array, targets: ArrayLike | Array) -> Array:
    """Negative log-likelihood of each row's target, in nats: logsumexp(logits) - logits[target].

    Args:
        logits: float32 [T, vocabulary].
        targets: integers [T], each in 0…vocabulary-1.

    Returns:
        float32 [T].
    """
    device = _device(logits, targets)
    x, t = as_array(logits, "logits", device=device), _indices(targets, "targets", device)
    (loss,) = _native.operation("cross_entropy", device.handle, x.tensor, t.tensor)
    return output(device, loss, t.shape, np.float32)


def argmax(x: ArrayLike | Array) -> Array:
    """Index of each row's largest value, the lowest of equals; NaN counts as largest, as in NumPy.

    Args:
        x: float32 [T, width].

    Returns:
        int32 [T].
    """
    device = _device(x)
    x = as_array(x, "x", device=device)
    (indices,) = _native.operation("argmax", device.handle, x.tensor)
    return output(device, indices, x.shape[:1], np.int32)


def top_k(x: ArrayLike | Array, k: int) -> tuple[Array, Array]:
    """The k largest values of each row, largest first, the lower index first among equals.

    Args:
        x: float32 [T, width].
        k: 1…width, at most 1024.

    Returns:
        (values float32 [T, k], indices int32 [T, k]).
    """
    device = _device(x)
    x = as_array(x, "x", device=device)
    if not isinstance(k, (int, np.integer)) or not 0 < k < 1 << 32:
        raise InvalidArgument(f"[top_k] k: expected a positive number, got {k}")
    indices, values = _native.operation("top_k", device.handle, x.tensor, k, outputs=2)
    shape = (x.shape[0], k)
    return output(device, values, shape, np.float32), output(device, indices, shape, np.int32)


def _indices(x: ArrayLike | Array, name: str, device: Device) -> Array:
    """Indices of any integer dtype as int32."""
    if isinstance(x, Array):
        return as_array(x, name, device=device)
    host = np.asarray(x)
    if host.size == 0:
        host = host.astype(np.int32)
    if host.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: expected integers, got {host.dtype}")
    if host.size and (host.min() < -(1 << 31) or host.max() >= 1 << 31):
        raise InvalidArgument(f"{name}: expected numbers below 2^31, got {host.max()}")
    return as_array(host.astype(np.int32), name, device=device)
