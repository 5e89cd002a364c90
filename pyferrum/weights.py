"""Weights: matrices in GGUF blocks, and the named weights of an attention layer."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pyferrum import _native, _native_attention
from pyferrum.array import Array, DeviceArray, as_array
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument
from pyferrum.formats import BLOCK_FORMATS, FORMATS


class BlockArray(DeviceArray):
    """An immutable matrix [out, in] in GGUF blocks, multiplied as it is stored. Made by `block_array` and loaders."""

    __slots__ = ()

    def dequantize(self) -> np.ndarray[Any, Any]:
        """The weights as float32 [out, in], exactly what the blocks' formula says."""
        from pyferrum.reference.blocks import dequantize

        return dequantize(self._bytes(), self.format, self.shape).astype(np.float32)

    def __repr__(self) -> str:
        closed = "closed, " if self._buffer is None else ""
        return f"BlockArray({closed}shape={list(self.shape)}, format={self.format})"


Weight = Array | BlockArray
"""A matrix as `linear` and `embed` take it."""


def block_array(data: ArrayLike, format: str, shape: tuple[int, int], *, device: Device | None = None) -> BlockArray:
    """A matrix from the bytes of its GGUF blocks.

    Args:
        data: uint8, the blocks of row 0, then of row 1, …
        format: a block format, such as "Q4_1" or "Q6_K".
        shape: (out, in); `in` a multiple of the format's block.
        device: None for the default device.

    Raises:
        InvalidArgument: unknown format, a row that is not whole blocks, or the wrong number of bytes.
    """
    blocks = np.ascontiguousarray(data).reshape(-1)
    if blocks.dtype != np.uint8:
        raise InvalidArgument(f"data: expected uint8, the blocks' bytes, got {blocks.dtype}")
    device = device or default_device()
    check_blocks("data", format, shape, blocks.size)
    weight = BlockArray(device, _native.buffer_from(device.handle, blocks), shape, format)
    prepare(weight)
    return weight


def prepare(weight: Weight) -> int:
    """Let the weight's device make what it needs to multiply it often; no result depends on it.

    Loaders and `block_array` do this; a dense matrix of one's own is worth it where it is multiplied often, for
    without it the CPU device lays the matrix out anew for each call.

    Args:
        weight: a matrix [out, in] that `linear` takes.

    Returns:
        Bytes that the device holds beside the weight, as long as that lives: the CPU device keeps a copy in the order
        its kernels read, Metal multiplies the stored form.

    Raises:
        InvalidArgument: not a matrix.
    """
    return _native.weight_prepare(weight.device.handle, weight.tensor)


def check_blocks(name: str, format: str, shape: tuple[int, ...], nbytes: int) -> None:
    """Raise InvalidArgument unless `nbytes` bytes are a matrix `shape` in `format`."""
    if format not in BLOCK_FORMATS:
        raise InvalidArgument(f"format: expected one of {', '.join(BLOCK_FORMATS)}, got {format!r}")
    _, elements, size = FORMATS[format]
    if len(shape) != 2 or min(shape) < 0 or shape[1] % elements:
        raise InvalidArgument(f"shape: expected (out, in) with in a multiple of {elements} for {format}, got {shape}")
    expected = shape[0] * shape[1] // elements * size
    if nbytes != expected:
        raise InvalidArgument(f"{name}: expected {expected} bytes for {shape} in {format}, got {nbytes}")


def as_weight(weight: Any, name: str, device: Device | None = None) -> Weight:
    """A weight argument: a BlockArray passes through, anything else becomes an Array."""
    return weight if isinstance(weight, BlockArray) else as_array(weight, name, device=device)


class AttentionWeights(NamedTuple):
    """Weights of one attention layer. A NamedTuple, so a pytree wherever pytrees are known.

    Matrices are [out, in], dense or in blocks; norms and biases float16 or float32. With an output gate, the rows
    of `q_proj` are [query | gate] head by head. Keys are rotated after `k_norm`, both per head.
    """

    input_norm: Any
    """[hidden]"""
    q_proj: Any
    """[query_heads * head_dim, hidden]; twice the rows with an output gate"""
    k_proj: Any
    """[key_value_heads * head_dim, hidden]"""
    v_proj: Any
    """[key_value_heads * head_dim, hidden]"""
    o_proj: Any
    """[hidden, query_heads * head_dim]"""
    q_norm: Any = None
    """[head_dim], optional"""
    k_norm: Any = None
    """[head_dim], optional"""
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None

    def native(self, device: Device) -> tuple[Any, Any]:
        """(The native weights, what has to live until the call is over.)

        They are made once and kept at `q_proj`, good as long as each weight has the native tensor they were made from,
        which a closed one has not.
        """
        first = self.q_proj
        if isinstance(first, DeviceArray) and first._group is not None:
            struct, references = first._group
            tensors = []
            for value, reference in zip(self, references, strict=True):
                if value is None and reference is None:
                    continue
                tensor = getattr(value, "_native_tensor", None)
                if tensor is None or reference is None or reference() is not tensor:
                    break
                tensors.append(tensor)
            else:
                return struct, tensors
        arrays = self.tensors(device)
        native = {name: array.tensor for name, array in arrays.items()}
        struct = _native_attention.attention_weights(native)
        if first is not None and all(value is None or isinstance(value, DeviceArray) for value in self):
            first._group = struct, tuple(None if value is None else weakref.ref(value.tensor) for value in self)
        return struct, (arrays, native)

    def tensors(self, device: Device) -> dict[str, DeviceArray]:
        """The weights that are there, on the device, by field."""
        return {
            name: as_weight(value, f"weights.{name}", device)
            for name, value in zip(self._fields, self, strict=True)
            if value is not None
        }
