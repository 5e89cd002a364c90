"""Immutable arrays on a device: what every function takes and returns."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pyferrum import _native
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument, StateError, UnsupportedError
from pyferrum.formats import DTYPES, FORMATS, NAMES, NUMBERS, Shape

_LETTERS = {name: dtype.str for name, dtype in DTYPES.items()} | {"BF16": "|V2"}


def _keep(_: Any) -> None:
    """Called when what it is bound to is no longer needed."""


class DeviceArray:
    """A shape and a format over a device's buffer. Base of Array and BlockArray; use those."""

    __slots__ = ("__weakref__", "_buffer", "_group", "_native_tensor", "_offset", "device", "format", "shape")

    def __init__(self, device: Device, buffer: Any, shape: Shape, format: str, offset: int = 0) -> None:
        self.device = device
        self.shape = shape
        self.format = format
        self._buffer = buffer
        self._offset = offset
        self._native_tensor: Any = None
        self._group: Any = None  # of AttentionWeights that begin with this; holds no memory

    @property
    def buffer(self) -> Any:
        """The native buffer."""
        if self._buffer is None:
            raise StateError(f"this {type(self).__name__} of shape {list(self.shape)} was closed")
        return self._buffer

    @property
    def tensor(self) -> Any:
        """The native tensor, for calls."""
        buffer = self.buffer
        tensor = self._native_tensor
        if tensor is None:
            tensor = self._native_tensor = _native.tensor(buffer, self._offset, self.shape, NUMBERS[self.format])
            if self._buffer is not buffer:  # another thread has closed the array meanwhile
                return self.buffer
        return tensor

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        _, elements, size = FORMATS.get(self.format, (0, 1, 4))
        return self.size // elements * size

    def _bytes(self) -> np.ndarray[Any, Any]:
        return _native.buffer_array(self.buffer, self._offset, (self.nbytes,), "|u1")

    def block_until_ready(self) -> Any:
        """Wait for the call that makes this array; gives the array. Errors of that call are raised here."""
        _native.buffer_wait(self.buffer)
        return self

    def close(self) -> None:
        """Let go of the memory now; NumPy views already taken stay valid, and so do calls under way. Idempotent."""
        buffer, tensor = self._buffer, self._native_tensor
        if buffer is not None and tensor is not None:
            weakref.finalize(tensor, _keep, buffer).atexit = False  # as long as a call of another thread has it
        self._buffer = None
        self._native_tensor = self._group = None


class Array(DeviceArray):
    """An immutable array: float32, float16, bfloat16 or int32, row-major. Made by `pyferrum.array` and by calls.

    It is a future: reading it (`numpy.asarray`, `repr`, `item`) waits for the call that makes it.
    """

    __slots__ = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype; bfloat16 is `ml_dtypes.bfloat16`."""
        return DTYPES[self.format]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read-only and without a copy where possible; `copy=False` raises where a dtype needs one."""
        buffer = self.buffer if self._buffer is None else self._buffer  # the property raises
        view = _native.buffer_array(buffer, self._offset, self.shape, _LETTERS[self.format])
        if self.format == "BF16":
            view = view.view(self.dtype)
        if dtype is not None and np.dtype(dtype) != self.dtype:
            if copy is False:
                raise InvalidArgument(f"dtype: {self.dtype} to {np.dtype(dtype)} needs a copy, and copy=False")
            return view.astype(dtype)
        return view.copy() if copy else view

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """DLPack capsule; a copy for consumers older than DLPack 1.0, which cannot be told it is read-only."""
        view = self._exportable()
        if max_version is None or max_version[0] < 1:
            return view.copy().__dlpack__()
        return view.__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): the CPU."""
        return (1, 0)

    def _exportable(self) -> np.ndarray[Any, Any]:
        if self.format == "BF16":
            raise BufferError("NumPy cannot export bfloat16 through DLPack: use x.astype(numpy.float32)")
        return np.asarray(self)

    def astype(self, dtype: DTypeLike) -> Array:
        """A copy in another dtype, on the same device."""
        return array(np.asarray(self).astype(dtype), device=self.device)

    def tolist(self) -> Any:
        """Nested Python lists."""
        return np.asarray(self).tolist()

    def item(self) -> Any:
        """The only element, as a Python number."""
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar array")
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> Array:
        """Rows of the first axis, without a copy: `x[-1:]`, `x[3]`. Anything else: `numpy.asarray(x)[...]`."""
        if not isinstance(index, (int, np.integer, slice)) or not self.shape:
            raise InvalidArgument("an Array takes one integer or slice of its first axis; use numpy.asarray(x)[...]")
        rest = self.shape[1:]
        row = self.dtype.itemsize * math.prod(rest)
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            if step != 1:
                raise InvalidArgument("an Array's slice has step 1; use numpy.asarray(x)[...]")
            return Array(
                self.device,
                self.buffer,
                (max(stop - start, 0), *rest),
                self.format,
                self._offset + min(start, self.shape[0]) * row,
            )
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(f"index {index} is out of range for {self.shape[0]} rows")
        return Array(self.device, self.buffer, rest, self.format, self._offset + int(index) % self.shape[0] * row)

    def __repr__(self) -> str:
        head = f"shape={list(self.shape)}, dtype={self.dtype}"
        if self._buffer is None:
            return f"Array(closed, {head})"
        try:
            host = np.asarray(self)
        except UnsupportedError:  # while `jit` records; tracebacks and debuggers print what they find
            return f"Array(recorded, {head})"
        text = np.array2string(host, prefix="Array(", separator=", ", threshold=64, precision=5)
        return f"Array({text}, {head})"


def array(x: ArrayLike | Array, dtype: DTypeLike | None = None, *, device: Device | None = None) -> Array:
    """An immutable copy of `x` on a device.

    Args:
        x: anything NumPy or DLPack understands, of any strides. Python numbers become float32 or int32.
        dtype: float32, float16, bfloat16 or int32; None keeps x's.
        device: None for the default device.

    Raises:
        InvalidArgument: float64, int64, big-endian, object or complex input without a `dtype` to convert to.
    """
    if isinstance(x, Array) and device is not None and x.device is not device:
        x = np.asarray(x)
    return as_array(x, "x", dtype, device)


def as_array(x: Any, name: str, dtype: DTypeLike | None = None, device: Device | None = None) -> Array:
    """`array` for an argument called `name`: an Array of the wanted dtype passes through as it is."""
    if isinstance(x, Array) and (dtype is None or x.dtype == np.dtype(dtype)):
        return x
    host = _on_host(x, name, dtype)
    if dtype is not None:
        host = host.astype(dtype, copy=False)
    if host.dtype not in NAMES:
        raise InvalidArgument(f"{name}: {_refusal(host.dtype)}")
    host = np.asarray(host, order="C")
    device = device or (x.device if isinstance(x, Array) else default_device())
    return Array(device, _native.buffer_from(device.handle, host), host.shape, NAMES[host.dtype])


def _on_host(x: Any, name: str, dtype: DTypeLike | None) -> np.ndarray[Any, Any]:
    if isinstance(x, DeviceArray) and not isinstance(x, Array):
        raise InvalidArgument(f"{name}: expected an Array, got a {type(x).__name__} in {x.format} blocks")
    if not isinstance(x, (np.ndarray, np.generic, Array)) and hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InvalidArgument(f"{name}: NumPy cannot read this DLPack object: {error}") from error
    try:
        host = np.asarray(x)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{name}: expected an array of numbers: {error}") from None
    if host.dtype.hasobject or (host.dtype.kind in "cSUVMm" and host.dtype not in NAMES):
        raise InvalidArgument(f"{name}: {_refusal(host.dtype)}")
    plain = not hasattr(x, "dtype")  # Python's own numbers have no width to respect
    if plain and dtype is None:
        if host.dtype == np.float64:
            return host.astype(np.float32)
        if host.dtype == np.int64 and (host.size == 0 or -(1 << 31) <= host.min() <= host.max() < 1 << 31):
            return host.astype(np.int32)
    return host


def _refusal(dtype: np.dtype[Any]) -> str:
    if not dtype.isnative:
        return f"big-endian {dtype.name}; use x.astype(x.dtype.newbyteorder('='))"
    if dtype.hasobject:
        return "an array of Python objects; give it a numeric dtype, such as x.astype(numpy.float32)"
    if dtype == np.float64:
        return "float64 is not narrowed silently; use x.astype(numpy.float32)"
    if dtype.kind in "iu":
        return f"{dtype} is not narrowed silently; use x.astype(numpy.int32), or a float dtype where numbers are meant"
    return f"expected {', '.join(str(d) for d in NAMES)}, got {dtype}"


def output(device: Device, buffer: Any, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """The Array over a call's output buffer."""
    return Array(device, buffer, tuple(shape), NAMES[np.dtype(dtype)])


def block_until_ready(tree: Any) -> Any:
    """Wait for every array in nested tuples, lists and dicts; gives `tree`."""
    if isinstance(tree, DeviceArray):
        tree.block_until_ready()
    elif isinstance(tree, dict):
        for value in tree.values():
            block_until_ready(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            block_until_ready(value)
    return tree
