"""DFlash 2 as pure functions: a ring of context, blocks packed over it, and what a draft layer does with them.

A draft model proposes a whole block of tokens in one pass. Its queries see the block itself, both ways, and the last
tokens of the context, whose keys and values come from the target's hidden states and live in a ring. Letters
in shapes: B lanes (sequences drafted together), H and Hk query and key heads, D head_dim, R rows of a block, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pyferrum import _native, _native_rings
from pyferrum.array import Array, as_array, output
from pyferrum.errors import InvalidArgument
from pyferrum.formats import bfloat16
from pyferrum.ops import _device, embed, top_k
from pyferrum.ring import DFlash2Ring, per_lane, whole
from pyferrum.weights import as_weight

MAX_LANES = _native.constant("FERRUM_DFLASH2_MAX_LANES")
MAX_ROWS = _native.constant("FERRUM_DFLASH2_MAX_ROWS")
MAX_TAPS = _native.constant("FERRUM_DFLASH2_MAX_TAPS")
MAX_CANDIDATES = _native.constant("FERRUM_DFLASH2_MAX_CANDIDATES")
"""Of a block."""


def dflash2_pack(
    ring: DFlash2Ring, q: ArrayLike | Array, k: ArrayLike | Array, v: ArrayLike | Array
) -> tuple[Array, Array, Array]:
    """A block and the context behind it as the arrays that attention reads: [block | ring, newest first].

    Columns that hold no token yet are zero.

    Args:
        ring: the context.
        q: float32 [B, R, H, D], normed and rotated; R is 2…16 and less than the window.
        k: float32 [B, R, Hk, D], the same.
        v: float32 [B, R, Hk, D].

    Returns:
        bfloat16 (q [B, H, R, D], keys [B, Hk, W - 1 + R, D], values of the same shape), rounded to nearest even; what
        comes from the ring keeps its bits.

    Raises:
        InvalidArgument: a geometry that breaks a rule; the message names it.
    """
    arrays = [as_array(x, name, device=ring.device) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    buffers = _native.operation("dflash2_pack", ring.handle, *(x.tensor for x in arrays), outputs=3)
    lanes, rows, heads, dim = arrays[0].shape
    wide = (lanes, ring.key_value_heads, ring.window - 1 + rows, dim)
    shapes = ((lanes, heads, rows, dim), wide, wide)
    return tuple(output(ring.device, b, s, bfloat16) for b, s in zip(buffers, shapes, strict=True))  # type: ignore[return-value]


def dflash2_mask(ring: DFlash2Ring, rows: int, heads: int) -> Array:
    """What each row of a block sees of the packed columns: 0, or -infinity.

    The whole block is seen; context j tokens before the block's first row is seen from row r where r + 1 + j < W.

    Args:
        ring: the context.
        rows: of a block, 2…16 and less than the window.
        heads: query heads.

    Returns:
        bfloat16 [B, heads, rows, W - 1 + rows].
    """
    sizes = whole("rows", rows), whole("heads", heads)
    (mask,) = _native.operation("dflash2_mask", ring.handle, *sizes)
    return output(ring.device, mask, (ring.lanes, heads, rows, ring.window - 1 + rows), bfloat16)


def dflash2_commit(ring: DFlash2Ring, k: ArrayLike | Array, v: ArrayLike | Array, counts: Sequence[int]) -> DFlash2Ring:
    """A ring with more context: the first counts[b] tokens of k and v behind lane b. `ring` shows what it showed.

    Args:
        ring: the context so far.
        k: float32 [B, C, Hk, D], normed and rotated at absolute positions; C is 1…16 and less than the window.
        v: float32 [B, C, Hk, D].
        counts: tokens of each lane, 0…C.

    Raises:
        InvalidArgument: a geometry that breaks a rule; the message names it.
        OutOfPages: the arena is full; nothing changed.
    """
    arrays = [as_array(x, name, device=ring.device) for x, name in ((k, "k"), (v, "v"))]
    numbers = per_lane("dflash2_commit", "counts", counts, ring.lanes, 1 << 32)
    return DFlash2Ring(ring.device, _native_rings.ring_commit(ring.handle, arrays[0].tensor, arrays[1].tensor, numbers))


def dflash2_mask_rows(hidden: ArrayLike | Array, mask_embedding: ArrayLike | Array, lanes: int, rows: int) -> Array:
    """A block's input: every row of a lane but its first, the anchor's, is the mask token's embedding.

    Args:
        hidden: float32 [lanes * rows, hidden]; only the anchors' rows are read.
        mask_embedding: bfloat16 [hidden], widened exactly.
        lanes: 1…4.
        rows: 2…16.

    Returns:
        float32 [lanes * rows, hidden].
    """
    device = _device(hidden, mask_embedding)
    x = as_array(hidden, "hidden", device=device)
    embedding = as_array(mask_embedding, "mask_embedding", device=device)
    sizes = whole("lanes", lanes), whole("rows", rows)
    (y,) = _native.operation("dflash2_mask_rows", device.handle, x.tensor, embedding.tensor, *sizes)
    return output(device, y, x.shape, np.float32)


def dflash2_attention(
    q: ArrayLike | Array, keys: ArrayLike | Array, values: ArrayLike | Array, mask: ArrayLike | Array
) -> Array:
    """softmax(q keys^T / sqrt(D) + mask) values of packed arrays; sums are float32.

    Args:
        q: bfloat16 [B, H, R, D].
        keys: bfloat16 [B, Hk, K, D].
        values: bfloat16 [B, Hk, K, D].
        mask: bfloat16 [B, H, R, K]; columns at -infinity are not read.

    Returns:
        float16 [B * R, H * D], what the output projection takes.
    """
    device = _device(q, keys, values, mask)
    given = ((q, "q"), (keys, "keys"), (values, "values"), (mask, "mask"))
    arrays = [as_array(x, name, device=device) for x, name in given]
    (y,) = _native.operation("dflash2_attention", device.handle, *(x.tensor for x in arrays))
    lanes, heads, rows, dim = arrays[0].shape
    return output(device, y, (lanes * rows, heads * dim), np.float16)


def dflash2_conv(
    x: ArrayLike | Array, base_kernel: ArrayLike | Array, dynamic: ArrayLike | Array, *, side: int, rows: int
) -> Array:
    """Grouped dynamic causal convolution inside each block.

    y[t, c] = sum over taps of (base_kernel[side, tap, c] + dynamic[t, side, tap, group of c]) * x[t - tap, c], where
    rows before a block's first count as zero.

    Args:
        x: float16 [T, width], whole blocks one after another.
        base_kernel: float32 [2, taps, width].
        dynamic: float32 [T, 2 * taps * groups], the same for both sides.
        side: 0 before a sublayer (prepare), 1 behind it (finish).
        rows: of a block.

    Returns:
        float16 [T, width]; sums are float32.
    """
    device = _device(x, base_kernel, dynamic)
    given = ((x, "x"), (base_kernel, "base_kernel"), (dynamic, "dynamic"))
    arrays = [as_array(value, name, device=device) for value, name in given]
    sizes = whole("side", side), whole("rows", rows)
    (y,) = _native.operation("dflash2_conv", device.handle, *(a.tensor for a in arrays), *sizes)
    return output(device, y, arrays[0].shape, np.float16)


def dflash2_heads(
    x: ArrayLike | Array, norm: ArrayLike | Array | None, angles: ArrayLike | Array, *, heads: int, epsilon: float
) -> Array:
    """Projected rows as heads, normed and rotated: what pack and commit take.

    Args:
        x: float32 [T, heads * D].
        norm: float16 or float32 [D], of an RMS norm per head; None for none.
        angles: float32 [T, D / 2, 2]: cos and sin by which pair (i, i + D / 2) of a token turns.
        heads: how many.
        epsilon: of the norm.

    Returns:
        float32 [T, heads, D].
    """
    device = _device(x, norm, angles)
    y, a = as_array(x, "x", device=device), as_array(angles, "angles", device=device)
    n = None if norm is None else as_array(norm, "norm", device=device)
    if y.ndim == 2 and a.ndim == 3 and y.shape[1] != heads * 2 * a.shape[1]:
        raise InvalidArgument(
            f"[dflash2_heads] x: expected {heads} heads of {2 * a.shape[1]}, got rows of {y.shape[1]}"
        )
    weight = _native.NO_TENSOR if n is None else n.tensor
    (out,) = _native.operation("dflash2_heads", device.handle, y.tensor, weight, a.tensor, epsilon)
    return output(device, out, (y.shape[0], heads, 2 * a.shape[1]), np.float32)


def dflash2_select(
    logits: ArrayLike | Array,
    projected: ArrayLike | Array,
    anchors: Sequence[int],
    predecessor: Any,
    successor: Any,
    *,
    k: int,
    temperature: float = 0.0,
    uniforms: ArrayLike | Array | None = None,
) -> tuple[Array, Array, Array]:
    """The candidate selector: a walk over each step's k best tokens.

    score(b) = logits[t, b] + sum over r of predecessor[chosen, r] * projected[t, r] * successor[b, r].

    Args:
        logits: float32 [B * S, vocabulary] of the S steps of each lane.
        projected: float32 [B * S, rank], hidden states times the selector's projection.
        anchors: the token before each lane's first step.
        predecessor: codebook [vocabulary, rank], dense or a BlockArray.
        successor: the same.
        k: candidates of a step, 1…64.
        temperature: 0 takes the best score, the first of equals; else candidates are drawn from softmax(score / T).
        uniforms: float32 [B, S] in [0, 1), the draws; only where temperature is not 0.

    Returns:
        (tokens int32 [B, S], candidates int32 [B, S, k] best logits first, probabilities float32 [B, S, k] from which
        each token was taken).
    """
    device = _device(logits, projected, predecessor, successor)
    x, h = as_array(logits, "logits", device=device), as_array(projected, "projected", device=device)
    before, after = as_weight(predecessor, "predecessor", device), as_weight(successor, "successor", device)
    lanes = len(anchors)
    if x.ndim != 2 or not 1 <= lanes <= MAX_LANES or x.shape[0] == 0 or x.shape[0] % lanes:
        raise InvalidArgument(
            f"[dflash2_select] logits: expected whole rows for each of 1…{MAX_LANES} anchors, got {list(x.shape)} for "
            f"{lanes}"
        )
    steps = x.shape[0] // lanes
    if h.ndim != 2 or h.shape[0] != x.shape[0]:
        raise InvalidArgument(f"[dflash2_select] projected: expected [{x.shape[0]}, rank], got {list(h.shape)}")
    values, ids = top_k(x, k)
    host = np.asarray(ids).reshape(lanes, steps, k)
    walk = np.concatenate([np.reshape(anchors, (lanes, 1)), host[:, :-1].reshape(lanes, -1)], axis=1)
    rank = h.shape[1]
    tensors = (
        (ids, (lanes, steps, k)),
        (values, (lanes, steps, k)),
        (h, (lanes, steps, rank)),
        (embed(walk.reshape(-1), before), (lanes, walk.shape[1], rank)),
        (embed(host.reshape(-1), after), (lanes, steps * k, rank)),
    )
    for name, book in (("predecessor", before), ("successor", after)):
        if book.shape[1] != rank:
            raise InvalidArgument(f"[dflash2_select] {name}: expected {rank} columns, got {list(book.shape)}")
    shaped = [_reshaped(array, shape) for array, shape in tensors]
    if temperature and uniforms is None:
        raise InvalidArgument("[dflash2_select] uniforms: needed where temperature is not 0")
    draws = None if uniforms is None else as_array(uniforms, "uniforms", device=device)
    tokens, q = _native.operation(
        "dflash2_select",
        device.handle,
        *(a.tensor for a in shaped),
        _native.NO_TENSOR if draws is None else draws.tensor,
        temperature,
        outputs=2,
    )
    return (
        output(device, tokens, (lanes, steps), np.int32),
        _reshaped(ids, (lanes, steps, k)),
        output(device, q, (lanes, steps, k), np.float32),
    )


def _reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    return Array(x.device, x.buffer, shape, x.format, x._offset)
