"""Causal paged attention as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from numpy.typing import ArrayLike

from pyferrum import _native
from pyferrum.array import Array, as_array, output
from pyferrum.errors import InvalidArgument
from pyferrum.state import KVState
from pyferrum.weights import AttentionWeights


class Ragged(NamedTuple):
    """Rows of several sequences, one after another: `x` [sum of lengths, hidden]."""

    x: Any
    lengths: Sequence[int]


@overload
def causal_attention(states: KVState, x: ArrayLike | Array, weights: AttentionWeights) -> tuple[KVState, Array]: ...
@overload
def causal_attention(
    states: Sequence[KVState], x: Ragged, weights: AttentionWeights
) -> tuple[tuple[KVState, ...], Array]: ...
@overload
def causal_attention(
    states: Sequence[KVState], x: Sequence[Any], weights: AttentionWeights
) -> tuple[tuple[KVState, ...], tuple[Array, ...]]: ...
def causal_attention(states: Any, x: Any, weights: AttentionWeights) -> Any:
    """One attention sub-layer with its residual, over keys and values kept in pages.

    RMS norm → q, k, v → per-head q and k norm (where the weights have them) → rotary embedding → keys and values
    appended → softmax attention over the whole state (causal: a query at position p sees keys 0…p, or the last
    `sliding_window` of them) → output gate → output projection → residual. Sums are float32; what lies between the
    steps is float16; docs/numerics.md has each bound. A sequence's output does not depend, in any bit, on how it was
    cut into calls or on what it was batched with.

    Args:
        states: a KVState, or a sequence of n of them (of one configuration; the same one may appear twice).
        x: hidden states, float16 or float32 (the float32-master op), of the new tokens:
            [tokens, hidden] for one state; a sequence of n such arrays, run one after another;
            or `Ragged(x, lengths)`, all rows in one array, whose projections run together.
        weights: the layer's weights.

    Returns:
        (state, y), or a tuple of n states and the y's in the form x came in; y has x's dtype and shape.

    Raises:
        InvalidArgument: a shape, dtype or length that does not fit; the message names the argument.
        OutOfPages: the arena is full.
        StateError: a closed state or array.
        Whatever is raised, no state has changed and no page is held.
    """
    one = isinstance(states, KVState)
    group: tuple[KVState, ...] = (states,) if one else tuple(states)
    if not group or not all(isinstance(state, KVState) for state in group):
        raise InvalidArgument("states: expected a KVState or a non-empty sequence of them")
    config, device = group[0].config, group[0].device
    if any(state.config != config for state in group):
        raise InvalidArgument("states: expected one AttentionConfig for all of them")

    if not isinstance(weights, AttentionWeights):
        raise InvalidArgument(f"weights: expected AttentionWeights, got {type(weights).__name__}")

    packed = isinstance(x, Ragged)
    if one and packed:
        raise InvalidArgument("x: a Ragged goes with a sequence of states, got one state")
    if packed:
        lengths = [int(length) for length in x.lengths]
        if len(lengths) != len(group) or any(length < 1 for length in lengths):
            raise InvalidArgument(f"lengths: expected {len(group)} positive numbers, one per state, got {lengths}")
        xs = [as_array(x.x, "x", device=device)]
        if xs[0].ndim == 2 and sum(lengths) != xs[0].shape[0]:
            raise InvalidArgument(f"lengths: expected a sum of {xs[0].shape[0]}, the rows of x, got {lengths}")
    else:
        rows = [x] if one else list(x)
        if len(rows) != len(group):
            raise InvalidArgument(f"xs: expected {len(group)} arrays, one per state, got {len(rows)}")
        xs = [as_array(row, "x", device=device) for row in rows]
        lengths = [row.shape[0] if row.ndim else 0 for row in xs]
    for row in xs:
        if row.ndim != 2 or row.shape[1] != config.hidden_size:
            raise InvalidArgument(f"x: expected [tokens, {config.hidden_size}] for hidden_size, got {list(row.shape)}")
    kept = weights.tensors(device)  # arrays made here from NumPy weights live until the call is over
    handles, buffers = _native.causal_attention(
        config.native(device),
        {name: value.tensor for name, value in kept.items()},
        packed,
        [state.handle for state in group],
        lengths,
        [row.tensor for row in xs],
    )
    new = tuple(
        KVState(device, config, handle, None if state._length is None else state._length + length)
        for handle, state, length in zip(handles, group, lengths, strict=True)
    )
    ys = tuple(output(device, y, row.shape, row.dtype) for y, row in zip(buffers, xs, strict=True))
    if one:
        return new[0], ys[0]
    return new, ys[0] if packed else ys
