"""Finds and loads libferrum; with `_native_attention`, `_native_programs` and `_native_rings`, the only module that
knows cffi.

Everything else calls the functions below. They take and return `Handle`s (reference-counted native objects), turn
status codes into exceptions, and never let a Python object outlive what it points to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyferrum.errors import (
    DeviceError,
    FerrumError,
    InvalidArgument,
    OutOfPages,
    StateError,
    UnsupportedError,
)

try:
    from pyferrum._cdef import ffi
except ImportError as error:
    raise ImportError(
        "pyferrum's native library is not built: run `make lib` in the source folder, or `pip install .`"
    ) from error

Handle = Any
"""A variable that owns a reference to a native object: `handle[0]` is the object's pointer.

The variable, with its release, is there before the call that fills it: an interrupt that arrives as the call returns
finds an owner already.
"""


def _load() -> Any:
    override = os.environ.get("PYFERRUM_LIBRARY")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = Path(override) if override else Path(__file__).parent / "_libs" / f"libferrum.{suffix}"
    try:
        # Never unloaded: at interpreter exit handles and threads may outlive the library object.
        library = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
    except OSError as error:
        source = "PYFERRUM_LIBRARY names it" if override else "run `make lib` or `pip install .` to build it"
        raise ImportError(f"cannot load {path}: {error} ({source})") from error
    wanted, found = ffi.integer_const("FERRUM_ABI_VERSION"), library.ferrum_abi_version()
    if wanted != found:
        raise ImportError(f"{path} has ABI version {found}, this pyferrum needs {wanted}: rebuild it with `make lib`")
    return library


lib = _load()

_ERRORS: dict[int, type[FerrumError] | type[MemoryError]] = {
    lib.FERRUM_INVALID_ARGUMENT: InvalidArgument,
    lib.FERRUM_UNSUPPORTED: UnsupportedError,
    lib.FERRUM_OUT_OF_PAGES: OutOfPages,
    lib.FERRUM_STATE_ERROR: StateError,
    lib.FERRUM_DEVICE_ERROR: DeviceError,
    lib.FERRUM_OUT_OF_MEMORY: MemoryError,
    lib.FERRUM_INTERNAL_ERROR: FerrumError,
}


def _check(status: int) -> None:
    if status:
        raise _ERRORS[status](ffi.string(lib.ferrum_last_error()).decode())


_EMPTY = {
    noun: (ffi.typeof(f"ferrum_{noun} **"), getattr(lib, f"ferrum_{noun}_release"))
    for noun in ("device", "buffer", "state", "attention", "plan", "ring", "program")
}


def _empty(noun: str) -> Handle:
    kind, release = _EMPTY[noun]
    return ffi.gc(ffi.new(kind), release)


def _empties(noun: str, count: int) -> list[Handle]:
    (kind, release), new, gc = _EMPTY[noun], ffi.new, ffi.gc
    return [gc(new(kind), release) for _ in range(count)]


def _new(noun: str, status_of: Callable[[Any], int]) -> Handle:
    handle = _empty(noun)
    _check(status_of(handle))
    return handle


def _fields(struct: Any) -> dict[str, Any]:
    """A native struct as a dict: numbers stay, C strings and arrays become Python's, padding goes."""
    result = {}
    for name, field in ffi.typeof(struct).fields:
        if name == "pad":
            continue
        value = getattr(struct, name)
        if field.type.kind == "array":
            value = list(value)
        elif field.type.kind == "pointer":
            value = ffi.string(value).decode()
        result[name] = value
    return result


# ---- Library


def build_fingerprint() -> str:
    """SHA-256, in hex, over the sources the loaded library was built from."""
    return str(ffi.string(lib.ferrum_build_fingerprint()).decode())


def debug_counts() -> dict[str, int]:
    """Live native objects of this process by kind."""
    counts = ffi.new("ferrum_counts *")
    lib.ferrum_debug_counts(counts)
    return _fields(counts[0])


def formats() -> dict[str, tuple[int, int, int]]:
    """Weight formats: name to (format number, elements per block, bytes per block)."""
    info = ffi.new("ferrum_format_info *")
    result = {}
    for index in range(64):
        if lib.ferrum_format_at(index, info):
            break
        result[ffi.string(info.name).decode()] = (info.format, info.block_elements, info.block_bytes)
    return result


def constant(name: str) -> int:
    """An enumeration constant of the headers, such as "FERRUM_PAGE_BYTES"."""
    return int(ffi.integer_const(name))


def kernel_names() -> list[str]:
    """Every kernel a plan can name."""
    names: list[str] = []
    while (name := lib.ferrum_kernel_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


# ---- Devices, buffers

_POINTER, _ADDRESS = ffi.typeof("void **"), ffi.typeof("uintptr_t")


def device_new(name: str, *, threads: int, arena_bytes: int, exact: bool, instruction_set: str, poison: bool) -> Handle:
    """Open a device; zeros and "" stand for its defaults."""
    text = ffi.new("char[]", instruction_set.encode())
    options = ffi.new("ferrum_device_options *", [arena_bytes, threads, int(exact), int(poison), text])
    return _new(
        "device",
        lambda out: lib.ferrum_device_new(name.encode(), options, out),
    )


def device_describe(device: Handle) -> dict[str, Any]:
    """Fields of ferrum_device_summary."""
    summary = ffi.new("ferrum_device_summary *")
    _check(lib.ferrum_device_describe(device[0], summary))
    return _fields(summary[0])


def arena_stats(device: Handle) -> dict[str, int]:
    """Fields of ferrum_arena_stats."""
    stats = ffi.new("ferrum_arena_stats *")
    _check(lib.ferrum_device_arena_stats(device[0], stats))
    return _fields(stats[0])


def buffer_from(device: Handle, data: np.ndarray[Any, Any]) -> Handle:
    """A new buffer with a copy of the C-contiguous array's bytes."""
    handle = _new(
        "buffer",
        lambda out: lib.ferrum_buffer_new(device[0], data.nbytes, out),
    )
    if data.nbytes:
        ffi.memmove(_contents(handle), ffi.from_buffer(data.reshape(-1).view(np.uint8)), data.nbytes)
    return handle


def buffer_wrap(device: Handle, data: np.ndarray[Any, Any]) -> Handle:
    """A buffer over the array's own memory, which it keeps alive. Nobody may write to it afterwards."""
    view = ffi.from_buffer(data)

    # At the very end of the interpreter this module's names are gone before the last buffer is: it has its own.
    def release(handle: Any, keep: Any = view, lib: Any = lib, new: Any = ffi.new, null: Any = ffi.NULL) -> None:
        if handle[0]:
            lib.ferrum_buffer_contents(handle[0], new("void **"), null)  # waits for its readers
            lib.ferrum_buffer_release(handle)

    handle = ffi.gc(ffi.new("ferrum_buffer **"), release)
    _check(lib.ferrum_buffer_wrap(device[0], view, data.nbytes, handle))
    return handle


def _contents(buffer: Handle) -> Any:
    data = ffi.new(_POINTER)
    _check(lib.ferrum_buffer_contents(buffer[0], data, ffi.NULL))
    return data[0]


class _Memory:
    """A buffer's memory for NumPy: whoever looks at it holds this, and this holds the buffer.

    No destructor in Python: an interrupt that arrives in one would be lost.
    """

    __slots__ = ("__array_interface__", "_buffer")
    __array_interface__: dict[str, Any]
    _buffer: Handle


def buffer_array(buffer: Handle, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Part of a buffer as a read-only array, once every call that writes it is done; keeps the buffer alive.

    `dtype` in the array interface's letters; nobody checks that the buffer has so many bytes.
    """
    memory, data = _Memory(), ffi.new(_POINTER)
    status = lib.ferrum_buffer_contents(buffer[0], data, ffi.NULL)
    if status:
        _check(status)
    memory._buffer = buffer
    address = int(ffi.cast(_ADDRESS, data[0])) + offset
    memory.__array_interface__ = {"version": 3, "typestr": dtype, "shape": shape, "data": (address, True)}
    return np.asarray(memory)


def buffer_view(buffer: Handle) -> np.ndarray[Any, Any]:
    """All of a buffer as `buffer_array` gives it, uint8."""
    size = ffi.new("uint64_t *")
    _check(lib.ferrum_buffer_contents(buffer[0], ffi.new(_POINTER), size))
    return buffer_array(buffer, 0, (size[0],), "|u1")


def buffer_wait(buffer: Handle) -> None:
    """Return when every call that writes the buffer is done; raises what failed."""
    _contents(buffer)


def tensor(buffer: Handle, offset: int, shape: Sequence[int], number: int) -> Any:
    """A ferrum_tensor; keep `buffer` alive beside it."""
    padded = [*shape, *([0] * (4 - len(shape)))]
    return ffi.new("ferrum_tensor *", [buffer[0], offset, padded, len(shape), number])


NO_TENSOR = ffi.NULL


# ---- States


def _state(status_of: Callable[[Any], int]) -> Handle:
    return _new("state", status_of)


def state_new(device: Handle, key_value_heads: int, head_dim: int) -> Handle:
    """An empty state."""
    return _state(lambda out: lib.ferrum_state_new(device[0], key_value_heads, head_dim, out))


def state_describe(state: Handle) -> dict[str, int]:
    """Fields of ferrum_state_summary."""
    summary = ffi.new("ferrum_state_summary *")
    _check(lib.ferrum_state_describe(state[0], summary))
    return _fields(summary[0])


def state_pages(state: Handle) -> list[int]:
    """Numbers of the pages that the state shows."""
    count = ffi.new("uint64_t *")
    _check(lib.ferrum_state_pages(state[0], 0, ffi.NULL, count))
    pages = ffi.new(_U64S, count[0])
    _check(lib.ferrum_state_pages(state[0], count[0], pages, count))
    return ffi.unpack(pages, count[0]) if count[0] else []


def state_truncate(state: Handle, length: int) -> Handle:
    """The state's first `length` tokens."""
    return _state(lambda out: lib.ferrum_state_truncate(state[0], length, out))


def state_append(state: Handle, keys: Any, values: Any) -> Handle:
    """The state with `keys` and `values` (tensors) behind it."""
    return _state(lambda out: lib.ferrum_state_append(state[0], keys, values, out))


def state_read(state: Handle, start: int, tokens: int) -> tuple[Handle, Handle]:
    """Buffers of the keys and the values of a range of tokens."""
    keys, values = _empty("buffer"), _empty("buffer")
    _check(lib.ferrum_state_read(state[0], start, tokens, keys, values))
    return keys, values


# ---- Lists of handles


class GroupMember:
    """The handle of one state of a group, which it keeps."""

    __slots__ = ("_group", "_index")

    def __init__(self, group: Any, index: int) -> None:
        self._group, self._index = group, index

    def __getitem__(self, _: int) -> Any:
        return self._group[self._index]


_U64S, _TENSORS = ffi.typeof("uint64_t[]"), ffi.typeof("ferrum_tensor[]")
_STATES, _STATE_OUTS = ffi.typeof("ferrum_state *[]"), ffi.typeof("ferrum_state **[]")


def _tensors(tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]  # a pointer to one is an array of one
    return ffi.new(_TENSORS, [tensor[0] for tensor in tensors])


def _states(handles: Sequence[Handle]) -> Any:
    if len(handles) == 1 and not isinstance(handles[0], GroupMember):
        return handles[0]  # a pointer to one is an array of one
    return ffi.new(_STATES, [handle[0] for handle in handles])


# ---- Other operations


def weight_prepare(device: Handle, weight: Any) -> int:
    """Let the device make what it needs to multiply a matrix often; gives the bytes it holds for that."""
    held = ffi.new("uint64_t *")
    _check(lib.ferrum_weight_prepare(device[0], weight, held))
    return int(held[0])


def operation(name: str, owner: Handle, *arguments: Any, outputs: int = 1) -> list[Handle]:
    """Call `ferrum_<name>(owner, *arguments, out…)` of a device or a ring; gives the output buffers."""
    outs = [_empty("buffer") for _ in range(outputs)]
    _check(getattr(lib, f"ferrum_{name}")(owner[0], *arguments, *outs))
    return outs
