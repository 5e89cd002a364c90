"""The native functions of rings; a part of `_native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyferrum._cdef import ffi
from pyferrum._native import Handle, _check, _fields, _new, lib


def ring_new(device: Handle, lanes: int, window: int, key_value_heads: int, head_dim: int) -> Handle:
    """An empty ring."""
    return _new("ring", lambda out: lib.ferrum_ring_new(device[0], lanes, window, key_value_heads, head_dim, out))


def ring_describe(ring: Handle) -> dict[str, Any]:
    """Fields of ferrum_ring_summary."""
    summary = ffi.new("ferrum_ring_summary *")
    _check(lib.ferrum_ring_describe(ring[0], summary))
    return _fields(summary[0])


def ring_load(ring: Handle, keys: Any, values: Any, lengths: Sequence[int], write_positions: Sequence[int]) -> Handle:
    """An empty ring's twin with the tensors by slot."""
    at = ffi.new("uint64_t[]", list(lengths)), ffi.new("uint32_t[]", list(write_positions))
    return _new("ring", lambda out: lib.ferrum_ring_load(ring[0], keys, values, *at, out))


def ring_commit(ring: Handle, keys: Any, values: Any, counts: Sequence[int]) -> Handle:
    """The ring with counts[b] rows of the tensors behind lane b."""
    native = ffi.new("uint32_t[]", list(counts))
    return _new("ring", lambda out: lib.ferrum_dflash2_commit(ring[0], keys, values, native, out))
