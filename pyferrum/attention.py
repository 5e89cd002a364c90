"""Causal paged attention as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from numpy.typing import ArrayLike

from pyferrum import _native_attention
from pyferrum.array import Array, as_array
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
    if not isinstance(weights, AttentionWeights):
        raise InvalidArgument(f"weights: expected AttentionWeights, got {type(weights).__name__}")
    if isinstance(states, KVState):
        if isinstance(x, Ragged):
            raise InvalidArgument("x: a Ragged goes with a sequence of states, got one state")
        row = _rows(x, states)
        shape, device, config, length = row.shape, states.device, states.config, states._length
        native, kept = weights.native(device)  # `kept` holds arrays made from NumPy weights until the call is over
        handle, y = _native_attention.causal_attention_alone(
            config.native(device), native, states.handle, shape[0], row.tensor
        )
        del kept
        extended = KVState(device, config, handle, None if length is None else length + shape[0])
        return extended, Array(device, y, shape, row.format)

    group = tuple(states) if isinstance(states, (list, tuple)) else ()
    if not group or not all(isinstance(state, KVState) for state in group):
        hint = "; a model's state has one for each layer, `state.layers`" if hasattr(states, "layers") else ""
        raise InvalidArgument(
            f"states: expected a KVState or a non-empty list of them, got {type(states).__name__}{hint}"
        )
    if any(state.config != group[0].config for state in group):
        raise InvalidArgument("states: expected one AttentionConfig for all of them")
    if isinstance(x, Ragged):
        lengths = [int(length) for length in x.lengths]
        if len(lengths) != len(group) or any(length < 1 for length in lengths):
            raise InvalidArgument(f"lengths: expected {len(group)} positive numbers, one per state, got {lengths}")
        row = _rows(x.x, group[0])
        if sum(lengths) != row.shape[0]:
            raise InvalidArgument(f"lengths: expected a sum of {row.shape[0]}, the rows of x, got {lengths}")
        new, ys = _call(group, weights, True, lengths, [row])
        return tuple(new), ys[0]
    xs = list(x)
    if len(xs) != len(group):
        raise InvalidArgument(f"xs: expected {len(group)} arrays, one per state, got {len(xs)}")
    xs = [_rows(row, group[0]) for row in xs]
    new, ys = _call(group, weights, False, [row.shape[0] for row in xs], xs)
    return tuple(new), tuple(ys)


def _rows(x: Any, state: KVState) -> Array:
    """Hidden states, with their shape checked, on the state's device."""
    x = as_array(x, "x", device=state.device)
    shape, hidden = x.shape, state.config.hidden_size
    if len(shape) != 2 or shape[1] != hidden:
        raise InvalidArgument(f"x: expected [tokens, {hidden}] for hidden_size, got {list(shape)}")
    return x


def _call(
    states: Sequence[KVState], weights: AttentionWeights, packed: bool, lengths: list[int], xs: list[Array]
) -> tuple[list[KVState], list[Array]]:
    config, device = states[0].config, states[0].device
    native, kept = weights.native(device)  # `kept` holds arrays made from NumPy weights until the call is over
    handles, buffers = _native_attention.causal_attention(
        config.native(device), native, packed, [s.handle for s in states], lengths, [x.tensor for x in xs]
    )
    del kept
    new = [
        KVState(device, config, handle, None if state._length is None else state._length + length)
        for handle, state, length in zip(handles, states, lengths, strict=True)
    ]
    return new, [Array(device, y, x.shape, x.format) for y, x in zip(buffers, xs, strict=True)]
