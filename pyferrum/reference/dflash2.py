"""The block functions of DFlash 2, as definitions.

Whatever moves bits (pack, mask, commit, mask rows) is exact to the bit; attention, convolution and selection are
float64, rounded where the numerics contract rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from einops import einsum, rearrange, repeat

from pyferrum.formats import bfloat16
from pyferrum.reference.ops import Numbers, half, top_k, wide


def to_bfloat16(x: Any) -> Numbers:
    """float32 to bfloat16, to nearest even on the bits; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> 16) & 1)) >> np.uint64(16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16).view(bfloat16)


@dataclass(frozen=True)
class DFlash2Ring:
    """Keys and values, bfloat16 [lanes, key_value_heads, window, head_dim]; the newest token of a lane is one slot
    before its write position."""

    stored_keys: Numbers
    stored_values: Numbers
    lengths: tuple[int, ...]
    """Tokens committed to each lane so far."""
    write_positions: tuple[int, ...]

    @property
    def window(self) -> int:
        """Slots of a lane."""
        return self.stored_keys.shape[2]

    def _written(self, x: Numbers) -> Numbers:
        """Slots that were never written are zero."""
        newest_first = (np.array(self.write_positions)[:, None] - 1 - np.arange(self.window)) % self.window
        seen = newest_first < np.minimum(self.lengths, self.window)[:, None]
        return np.where(seen[:, None, :, None], x, np.zeros((), x.dtype))

    def keys(self) -> Numbers:
        """Keys by slot, bfloat16 [lanes, key_value_heads, window, head_dim]."""
        return self._written(self.stored_keys)

    def values(self) -> Numbers:
        """Values by slot, in the shape of the keys."""
        return self._written(self.stored_values)


def init_dflash2_ring(lanes: int, window: int, key_value_heads: int, head_dim: int) -> DFlash2Ring:
    """A ring before its first token; what was never written is NaN, so that reading it shows."""
    junk = np.full((lanes, key_value_heads, window, head_dim), np.nan, bfloat16)
    return DFlash2Ring(junk, junk, (0,) * lanes, (0,) * lanes)


def load_dflash2_ring(keys: Any, values: Any, lengths: Any, write_positions: Any) -> DFlash2Ring:
    """A ring from another one's keys and values by slot."""
    return DFlash2Ring(to_bfloat16(keys), to_bfloat16(values), tuple(lengths), tuple(write_positions))


def dflash2_pack(ring: DFlash2Ring, q: Any, k: Any, v: Any) -> tuple[Numbers, Numbers, Numbers]:
    """(q [B, H, R, D], keys [B, Hk, W-1+R, D], values): the block, then the ring from its newest token on."""
    rows, window = np.shape(q)[1], ring.window

    def packed(block: Any, stored: Numbers) -> Numbers:
        context = np.zeros_like(stored[:, :, : window - 1])
        for lane, (length, position) in enumerate(zip(ring.lengths, ring.write_positions, strict=True)):
            for j in range(min(length, window - 1)):
                context[lane, :, j] = stored[lane, :, (position + window - 1 - j) % window]
        return np.concatenate([rearrange(to_bfloat16(block), "b r h d -> b h r d"), context], axis=2)

    keys, values = packed(k, ring.stored_keys), packed(v, ring.stored_values)
    assert keys.shape[2] == window - 1 + rows
    return rearrange(to_bfloat16(q), "b r h d -> b h r d"), keys, values


def dflash2_mask(ring: DFlash2Ring, rows: int, heads: int) -> Numbers:
    """bfloat16 [B, heads, rows, W-1+rows]: 0 where a row sees a column, -inf elsewhere."""
    window = ring.window
    r, j = np.arange(rows)[:, None], np.arange(window - 1)[None, :]
    lengths = np.minimum(ring.lengths, window - 1)[:, None, None]
    context = (j < lengths) & (r + 1 + j < window)
    seen = np.concatenate([np.ones((len(ring.lengths), rows, rows), bool), context], axis=2)
    return repeat(np.where(seen, 0, -np.inf).astype(bfloat16), "b r c -> b h r c", h=heads)


def dflash2_commit(ring: DFlash2Ring, k: Any, v: Any, counts: Any) -> DFlash2Ring:
    """The ring with the first counts[b] tokens of k and v, float32 [B, C, Hk, D], written to lane b."""
    keys, values, window = ring.stored_keys.copy(), ring.stored_values.copy(), ring.window
    for lane, count in enumerate(counts):
        for i in range(count):
            slot = (ring.write_positions[lane] + i) % window
            keys[lane, :, slot] = to_bfloat16(np.asarray(k)[lane, i])
            values[lane, :, slot] = to_bfloat16(np.asarray(v)[lane, i])
    positions = tuple((p + int(n)) % window for p, n in zip(ring.write_positions, counts, strict=True))
    lengths = tuple(length + int(n) for length, n in zip(ring.lengths, counts, strict=True))
    return replace(ring, stored_keys=keys, stored_values=values, lengths=lengths, write_positions=positions)


def dflash2_mask_rows(hidden: Any, mask_embedding: Any, lanes: int, rows: int) -> Numbers:
    """hidden [lanes * rows, width] with every row but a lane's first replaced by the mask's embedding."""
    x = np.array(hidden, np.float32).reshape(lanes, rows, -1)
    x[:, 1:] = np.asarray(mask_embedding).astype(np.float32)
    return x.reshape(lanes * rows, -1)


def dflash2_attention(q: Any, keys: Any, values: Any, mask: Any, *, rounding: bool = True) -> Numbers:
    """softmax(q k^T / sqrt(D) + mask) v of packed arrays: float16 values [B * R, H * D].

    A column at -infinity is no part of its row, whatever it holds; a row without columns is zero.
    """
    q, keys, values, mask = wide(q), wide(keys), wide(values), wide(mask)
    group = q.shape[1] // keys.shape[1]
    k, v = (repeat(x, "b h c d -> b (h g) c d", g=group) for x in (keys, values))
    seen = mask != -np.inf
    with np.errstate(invalid="ignore"):  # infinity may lie in any column, and is NaN in a row that sees it
        scores = np.where(seen, einsum(q, k, "b h r d, b h c d -> b h r c") * q.shape[3] ** -0.5 + mask, -np.inf)
        most = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(most == -np.inf, 0, most))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    by_row = (np.where(seen[:, :, r, :, None], v, 0) for r in range(q.shape[2]))
    context = np.stack([einsum(weights[:, :, r], x, "b h c, b h c d -> b h d") for r, x in enumerate(by_row)], axis=1)
    return half(rearrange(context, "b r h d -> (b r) (h d)"), rounding)


def dflash2_conv(x: Any, base_kernel: Any, dynamic: Any, *, side: int, rows: int, rounding: bool = True) -> Numbers:
    """Each channel's taps over the rows of its own block: base + dynamic coefficients."""
    z, base = wide(x), wide(base_kernel)[side]
    taps, width = base.shape
    z = z.reshape(-1, rows, width)
    coefficients = wide(dynamic).reshape(z.shape[0], rows, 2, taps, -1)[:, :, side]
    coefficients = base + repeat(coefficients, "b r t g -> b r t (g s)", s=width // coefficients.shape[-1])
    y = np.zeros_like(z)
    for tap in range(min(taps, rows)):
        y[:, tap:] += coefficients[:, tap:, tap] * z[:, : rows - tap]
    return half(y.reshape(-1, width), rounding)


def dflash2_select(
    logits: Any,
    projected: Any,
    anchors: Any,
    predecessor: Any,
    successor: Any,
    *,
    k: int,
    temperature: float = 0.0,
    uniforms: Any = None,
) -> tuple[Numbers, Numbers, Numbers]:
    """(tokens [B, T], candidates [B, T, k], probabilities [B, T, k]) of the selector's walk."""
    lanes = len(anchors)
    values, ids = top_k(np.asarray(logits), k)
    ids, values = ids.reshape(lanes, -1, k), values.astype(np.float64).reshape(lanes, -1, k)
    projected = wide(projected).reshape(lanes, ids.shape[1], -1)
    before, after = wide(predecessor), wide(successor)
    tokens, q = np.zeros(ids.shape[:2], np.int32), np.zeros(ids.shape)
    for lane in range(lanes):
        previous = int(np.asarray(anchors)[lane])
        for t in range(ids.shape[1]):
            pair = einsum(before[previous] * projected[lane, t], after[ids[lane, t]], "r, k r -> k")
            scores = values[lane, t] + pair
            if temperature == 0:
                q[lane, t, np.argmax(scores)] = 1
                choice = int(np.argmax(scores))
            else:
                weights = np.exp((scores - scores.max()) / temperature)
                q[lane, t] = weights / weights.sum()
                choice = int(np.searchsorted(np.cumsum(q[lane, t]), np.asarray(uniforms)[lane, t], side="right"))
                choice = min(choice, k - 1)
            tokens[lane, t] = previous = int(ids[lane, t, choice])
    return tokens, ids, q


def dflash2_heads(x: Any, norm: Any, angles: Any, *, heads: int, epsilon: float) -> Numbers:
    """Per-head RMS norm (where there is a weight), then halves turned by cos and sin [T, D/2, 2]: [T, heads, D]."""
    y = rearrange(wide(x), "t (h d) -> t h d", h=heads)
    if norm is not None:
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + epsilon) * wide(norm)
    cosine, sine = np.moveaxis(wide(angles)[:, None], -1, 0)
    low, high = np.split(y, 2, axis=-1)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
