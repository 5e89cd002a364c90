"""The ring: an immutable context of a DFlash 2 draft model.

Letters in shapes: B lanes (sequences drafted together), Hk key heads, D head_dim, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pyferrum import _native, _native_rings
from pyferrum.array import Array, as_array, output
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument, StateError
from pyferrum.formats import bfloat16


class DFlash2Ring:
    """Keys and values, bfloat16, of the last `window` context tokens of each lane. Made by `init_dflash2_ring`.

    Immutable: `dflash2_commit` gives a new ring, and this one shows what it showed. Rings share pages of the arena; a
    commit copies the pages that its tokens lie on and no other.
    """

    __slots__ = (
        "__weakref__", "_handle", "device", "head_dim", "key_value_heads", "lanes", "lengths", "window",
        "write_positions",
    )  # fmt: skip

    def __init__(self, device: Device, handle: Any) -> None:
        summary = _native_rings.ring_describe(handle)
        self.device = device
        self._handle = handle
        self.lanes: int = summary["lanes"]
        self.window: int = summary["window"]
        self.key_value_heads: int = summary["key_value_heads"]
        self.head_dim: int = summary["head_dim"]
        self.lengths: tuple[int, ...] = tuple(summary["lengths"][: self.lanes])
        """Tokens committed to each lane so far; those before the last `window` are gone."""
        self.write_positions: tuple[int, ...] = tuple(summary["write_positions"][: self.lanes])
        """The slot that a lane's next token takes."""

    @property
    def handle(self) -> Any:
        """The native ring."""
        if self._handle is None:
            raise StateError("this ring was closed")
        return self._handle

    @property
    def pages(self) -> int:
        """Pages of 64 KiB that this ring shows; relatives may show them too."""
        return int(_native_rings.ring_describe(self.handle)["pages"])

    @property
    def slots_per_page(self) -> int:
        """Slots whose keys and values fit a page; slot s of lane b is number b * window + s."""
        return int(_native_rings.ring_describe(self.handle)["slots_per_page"])

    def keys(self) -> Array:
        """Keys by slot, bfloat16 [B, Hk, W, D]; zero where no token was committed."""
        return self._read()[0]

    def values(self) -> Array:
        """Values by slot, in the shape of the keys."""
        return self._read()[1]

    def _read(self) -> tuple[Array, Array]:
        keys, values = _native.operation("ring_read", self.handle, outputs=2)
        shape = (self.lanes, self.key_value_heads, self.window, self.head_dim)
        return output(self.device, keys, shape, bfloat16), output(self.device, values, shape, bfloat16)

    def close(self) -> None:
        """Let go of the pages now. Idempotent."""
        self._handle = None

    def __enter__(self) -> DFlash2Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = "closed, " if self._handle is None else ""
        return (
            f"DFlash2Ring({closed}window={self.window}, lengths={list(self.lengths)}, heads={self.key_value_heads}, "
            f"head_dim={self.head_dim})"
        )


def init_dflash2_ring(
    lanes: int, window: int, key_value_heads: int, head_dim: int, *, device: Device | None = None
) -> DFlash2Ring:
    """A ring before its first token. Holds no page.

    Args:
        lanes: sequences drafted together, 1…4.
        window: tokens of context kept a lane; a row of a block sees the last W - 1 of them at most.
        key_value_heads: heads of keys and values.
        head_dim: 64, 128 or 256.
        device: None for the default device.
    """
    device = device or default_device()
    sizes = (
        whole("lanes", lanes), whole("window", window), whole("key_value_heads", key_value_heads),
        whole("head_dim", head_dim),
    )  # fmt: skip
    return DFlash2Ring(device, _native_rings.ring_new(device.handle, *sizes))


def load_dflash2_ring(
    keys: ArrayLike | Array,
    values: ArrayLike | Array,
    lengths: Sequence[int],
    write_positions: Sequence[int],
    *,
    device: Device | None = None,
) -> DFlash2Ring:
    """A ring from what `keys()`, `values()`, `lengths` and `write_positions` of another one gave.

    Args:
        keys: bfloat16 or float32 [B, Hk, W, D], by slot.
        values: the same.
        lengths: tokens committed to each lane.
        write_positions: the slot of each lane's next token, 0…W-1.
        device: None for the default device.
    """
    host = [np.asarray(x) for x in (keys, values)]
    for name, x in zip(("keys", "values"), host, strict=True):
        if x.ndim != 4 or x.dtype not in (np.dtype(np.float32), bfloat16):
            raise InvalidArgument(
                f"[dflash2_ring] {name}: expected bfloat16 or float32 [lanes, key_value_heads, window, head_dim], got "
                f"{x.dtype} {list(x.shape)}"
            )
    lanes, heads, window, dim = host[0].shape
    ring = init_dflash2_ring(lanes, window, heads, dim, device=device)
    by_token = [
        as_array(np.ascontiguousarray(x.swapaxes(1, 2)).astype(np.float32), "keys", device=ring.device) for x in host
    ]
    totals = per_lane("dflash2_ring", "lengths", lengths, lanes, 1 << 63)
    positions = per_lane("dflash2_ring", "write_positions", write_positions, lanes, window)
    handle = _native_rings.ring_load(ring.handle, by_token[0].tensor, by_token[1].tensor, totals, positions)
    return DFlash2Ring(ring.device, handle)


def whole(name: str, value: Any) -> int:
    """A whole number that fits 32 bits."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{name}: expected a whole number, got {value!r}")
    return int(value)


def per_lane(op: str, name: str, values: Any, lanes: int, limit: int) -> list[int]:
    """Whole numbers below `limit`, one per lane."""
    host = np.asarray(values)
    if host.shape != (lanes,) or host.dtype.kind not in "iu" or any(not 0 <= int(v) < limit for v in host):
        raise InvalidArgument(f"[{op}] {name}: expected {lanes} whole numbers, one per lane, got {values!r}")
    return [int(value) for value in host]
