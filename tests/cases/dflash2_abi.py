"""For every native function of DFlash 2, arguments that make it succeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyferrum import _native
from pyferrum._cdef import ffi


def dflash2_arguments(
    device: Any, new: Callable[..., Any], tensor: Callable[..., Any], wide: Any, x: Any, row: Any
) -> dict[str, Callable[[], list[Any]]]:
    """Part of test_abi's table: its device and makers, wide f32 [2, 8], x f16 [2, 8], row f16 [8]."""
    lib, o = _native.lib, ffi.new
    ring = new("ferrum_ring", lambda out: lib.ferrum_ring_new(device, 1, 3, 1, 64, out))
    slots, block = tensor((1, 3, 1, 64), "F32"), tensor((1, 2, 1, 64), "F32")
    packed, columns, mask = (tensor((1, 1, rows, 64), "BF16") for rows in (2, 4, 2))
    mask.shape[3] = 4
    bf16, base, angles = tensor((8,), "BF16"), tensor((2, 1, 8), "F32"), tensor((2, 4, 2), "F32")
    ids, picks = tensor((1, 2, 2), "I32"), tensor((1, 2, 2), "F32")
    rows_before, rows_after = tensor((1, 3, 2), "F32"), tensor((1, 4, 2), "F32")
    draws = tensor((1, 2), "F32")
    lane, at = ffi.new("uint32_t[]", [1]), ffi.new("uint64_t[]", [1])
    return {
        "ring_new": lambda: [device, 1, 3, 1, 64, o("ferrum_ring **")],
        "ring_release": lambda: [o("ferrum_ring **")],
        "ring_describe": lambda: [ring, o("ferrum_ring_summary *")],
        "ring_load": lambda: [ring, slots, slots, at, lane, o("ferrum_ring **")],
        "ring_read": lambda: [ring, o("ferrum_buffer **"), o("ferrum_buffer **")],
        "dflash2_commit": lambda: [ring, block, block, lane, o("ferrum_ring **")],
        "dflash2_pack": lambda: [ring, block, block, block, *(o("ferrum_buffer **") for _ in range(3))],
        "dflash2_mask": lambda: [ring, 2, 1, o("ferrum_buffer **")],
        "dflash2_mask_rows": lambda: [device, wide, bf16, 1, 2, o("ferrum_buffer **")],
        "dflash2_attention": lambda: [device, packed, columns, columns, mask, o("ferrum_buffer **")],
        "dflash2_conv": lambda: [device, x, base, wide, 0, 2, o("ferrum_buffer **")],
        "dflash2_heads": lambda: [device, wide, row, angles, 1e-5, o("ferrum_buffer **")],
        "dflash2_select": lambda: [
            *(device, ids, picks, picks, rows_before, rows_after, draws, 1.0),
            *(o("ferrum_buffer **"), o("ferrum_buffer **")),
        ],
    }
