"""Causal attention over a state, as a definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from einops import einsum, rearrange, repeat

from pyferrum.attention import Ragged
from pyferrum.config import AttentionConfig
from pyferrum.reference.ops import Numbers, half, like, linear, normalize, rms_norm, sigmoid, wide
from pyferrum.weights import AttentionWeights


@dataclass(frozen=True)
class KVState:
    """Keys and values [length, key_value_heads, head_dim], keys normed and rotated."""

    config: AttentionConfig
    keys: Numbers
    values: Numbers

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.keys)

    def truncate(self, length: int) -> KVState:
        """The first `length` tokens."""
        return replace(self, keys=self.keys[:length], values=self.values[:length])

    def append(self, keys: Numbers, values: Numbers) -> KVState:
        """With more tokens behind."""
        return replace(self, keys=np.concatenate([self.keys, keys]), values=np.concatenate([self.values, values]))


def init_state(config: AttentionConfig) -> KVState:
    """An empty state."""
    empty = np.zeros((0, config.key_value_heads, config.head_dim))
    return KVState(config, empty, empty)


def rotate(x: Numbers, positions: Numbers, config: AttentionConfig) -> Numbers:
    """Rotary embedding of the first `rope_dim` dims of x [tokens, heads, head_dim]."""
    angle = (positions[:, None] * config.inverse_frequencies())[:, None, :]
    cosine = np.cos(angle) * config.rope_attention_factor
    sine = np.sin(angle) * config.rope_attention_factor
    pattern = "t h (i two) -> two t h i" if config.rope_interleaved else "t h (two i) -> two t h i"
    x0, x1 = rearrange(x[..., : config.rotary_dim], pattern, two=2)
    turned = np.stack([x0 * cosine - x1 * sine, x1 * cosine + x0 * sine])
    back = " -> ".join(reversed(pattern.split(" -> ")))
    return np.concatenate([rearrange(turned, back), x[..., config.rotary_dim :]], axis=-1)


def attend(q: Numbers, keys: Numbers, values: Numbers, positions: Numbers, config: AttentionConfig) -> Numbers:
    """softmax(scale * q k^T) v for q [tokens, query_heads, head_dim] at absolute positions; causal, windowed."""
    group = config.query_heads // config.key_value_heads
    k = repeat(keys, "s h d -> s (h g) d", g=group)
    v = repeat(values, "s h d -> s (h g) d", g=group)
    scores = einsum(q, k, "t h d, s h d -> h t s") * (config.scale or config.head_dim**-0.5)
    if config.softcap is not None:
        scores = config.softcap * np.tanh(scores / config.softcap)
    distance = positions[:, None] - np.arange(len(keys))[None, :]
    seen = (distance >= 0) & (distance < (config.sliding_window or np.inf))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return einsum(weights / weights.sum(axis=-1, keepdims=True), v, "h t s, s h d -> t h d")


def causal_attention(states: Any, x: Any, weights: AttentionWeights, *, rounding: bool = True) -> Any:
    """One attention sub-layer with its residual; arguments and results as `pyferrum.causal_attention`."""
    if isinstance(states, KVState):
        return _one(states, x, weights, rounding)
    if isinstance(x, Ragged):
        rows = np.split(np.asarray(x.x), np.cumsum(x.lengths)[:-1])
        new, ys = causal_attention(states, rows, weights, rounding=rounding)
        return new, np.concatenate(ys)
    results = [_one(state, row, weights, rounding) for state, row in zip(states, x, strict=True)]
    return tuple(state for state, _ in results), tuple(y for _, y in results)


def _one(state: KVState, x: Any, w: AttentionWeights, rounding: bool) -> tuple[KVState, Numbers]:
    config = state.config
    n = rms_norm(x, w.input_norm, epsilon=config.epsilon, rounding=rounding)
    raw = linear(n, w.q_proj, w.q_bias, rounding=rounding)
    if config.output_gate:
        q, gate = rearrange(raw, "t (h two d) -> two t h d", two=2, d=config.head_dim)
    else:
        q, gate = rearrange(raw, "t (h d) -> t h d", d=config.head_dim), None
    k = rearrange(linear(n, w.k_proj, w.k_bias, rounding=rounding), "t (h d) -> t h d", d=config.head_dim)
    v = rearrange(linear(n, w.v_proj, w.v_bias, rounding=rounding), "t (h d) -> t h d", d=config.head_dim)
    q_norm, k_norm = (None if norm is None else wide(norm) for norm in (w.q_norm, w.k_norm))
    positions = state.length + np.arange(len(n))
    q = half(rotate(normalize(q, q_norm, config.epsilon), positions, config), rounding)
    k = half(rotate(normalize(k, k_norm, config.epsilon), positions, config), rounding)
    state = state.append(k, v)
    context = attend(q, state.keys, state.values, positions, config)
    if gate is not None:
        context = context * sigmoid(gate)
    context = half(rearrange(context, "t h d -> t (h d)"), rounding)
    projected = linear(context, w.o_proj, w.o_bias, rounding=rounding)
    return state, like(wide(x) + projected, x, rounding)
