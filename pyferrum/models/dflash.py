"""DFlash and DFlash 2 draft models: a few layers that propose a whole block of tokens in one pass.

Formulas after z-lab/dflash. A draft model owns no embedding and no output matrix: it uses
its target's, and taps the target's residual stream for its context. The same functions run on `pyferrum` and on
`pyferrum.reference`: pass the module as `ops`. Letters in shapes: B lanes, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import pyferrum
from pyferrum.array import Array
from pyferrum.formats import bfloat16
from pyferrum.rope import Scaling, attention_factor, inverse_frequencies

COMMIT_ROWS = 16
"""Context tokens of a lane that one commit takes."""

_FIRST_WINDOW = 256
"""Of a layer that sees everything: its ring doubles when it is full."""


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a draft model, every setting resolved."""

    architecture: str
    """As the file names it: "DFlashDraftModel", "DFlash2DraftModel" or "dflash" (GGUF)."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Of each layer: context at a distance below it is seen; None: all of it."""
    causal: tuple[bool, ...]
    """Of each layer: whether a row sees no later row of its block."""
    block_size: int
    """Rows the model was trained for; fewer may be used."""
    target_layers: tuple[int, ...]
    """Layers of the target, counted from 0, behind which its residual stream is tapped."""
    mask_token: int
    epsilon: float
    rope_theta: float
    rope_scaling: Scaling | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0: as they are."""
    conv_taps: int = 0
    """0: DFlash 1, without convolutions and selector."""
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_vocabulary: int = 0

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.windows)

    @property
    def is_second(self) -> bool:
        """DFlash 2."""
        return self.conv_taps > 0


class Conv(NamedTuple):
    """A grouped dynamic convolution."""

    base_kernel: Any
    """float32 [2, taps, hidden]"""
    projection: Any
    """[2 * taps * groups, hidden]"""


class DraftLayer(NamedTuple):
    """Weights of one layer."""

    input_norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any
    k_norm: Any
    mlp_norm: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    attention_conv: Conv | None = None
    mlp_conv: Conv | None = None


class DraftParams(NamedTuple):
    """Weights of a draft model."""

    fc: Any
    """[hidden, taps * target hidden]"""
    hidden_norm: Any
    layers: tuple[DraftLayer, ...]
    norm: Any
    predecessor: Any = None
    """[vocabulary, rank]; this and the next two of DFlash 2 only"""
    successor: Any = None
    selector_hidden: Any = None
    """[rank, hidden]"""


@dataclass(frozen=True)
class DraftState:
    """What a draft model knows of up to four sequences: a ring for each layer. Immutable."""

    rings: tuple[Any, ...]
    lengths: tuple[int, ...]
    """Tokens of context of each lane: the position of its next anchor."""


def init_draft_state(config: DFlashConfig, lanes: int, *, ops: ModuleType = pyferrum, **device: Any) -> DraftState:
    """The state before any context."""
    heads, dim = config.key_value_heads, config.head_dim
    rings = (ops.init_dflash2_ring(lanes, w or _FIRST_WINDOW, heads, dim, **device) for w in config.windows)
    return DraftState(tuple(rings), (0,) * lanes)


def angles(config: DFlashConfig, positions: Any) -> np.ndarray[Any, Any]:
    """cos and sin by which each pair of a head turns at each position, float32 [tokens, head_dim / 2, 2]."""
    inverse = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    turn = np.asarray(positions, np.float64)[:, None] * inverse
    return (np.stack([np.cos(turn), np.sin(turn)], axis=-1) * attention_factor(config.rope_scaling)).astype(np.float32)


def extend(
    params: DraftParams,
    config: DFlashConfig,
    state: DraftState,
    features: Sequence[np.ndarray[Any, Any]],
    *,
    ops: ModuleType = pyferrum,
) -> DraftState:
    """Add context: the target's tapped hidden states of the tokens behind each lane.

    Args:
        params: the draft model's weights.
        config: its shape.
        state: the context so far.
        features: for each lane, its new tokens' taps side by side, [tokens, taps * target hidden]; may be empty.
        ops: `pyferrum` or `pyferrum.reference`.
    """
    lengths = tuple(n + len(f) for n, f in zip(state.lengths, features, strict=True))
    if lengths == state.lengths:
        return state
    # Rows that no window reaches any more are not even projected.
    reach = max(len(f) for f in features) if None in config.windows else max(w or 0 for w in config.windows)
    kept = [np.asarray(f)[-reach:] for f in features]
    positions = np.concatenate([np.arange(n - len(f), n) for n, f in zip(lengths, kept, strict=True)])
    h = ops.linear(_half(np.concatenate(kept)), params.fc, dtype=np.float32)
    h = ops.rms_norm(h, params.hidden_norm, epsilon=config.epsilon)
    turns, ends = angles(config, positions), np.cumsum([len(f) for f in kept])[:-1]
    rings = []
    for ring, layer, window in zip(state.rings, params.layers, config.windows, strict=True):
        shape = (len(positions), config.key_value_heads, config.head_dim)
        keys = _heads(h, layer.k_proj, layer.k_norm, turns, config.key_value_heads, config.epsilon, ops)
        values = np.asarray(ops.linear(h, layer.v_proj, dtype=np.float32)).reshape(shape)
        if window is None:
            ring = _grown(ring, max(lengths) + COMMIT_ROWS + 1, ops)
        by_lane = list(zip(np.split(np.asarray(keys), ends), np.split(values, ends), strict=True))
        rings.append(_committed(ring, by_lane, ops))
    return DraftState(tuple(rings), lengths)


def _committed(ring: Any, by_lane: list[tuple[Any, Any]], ops: ModuleType) -> Any:
    """The ring with each lane's keys and values [tokens, Hk, D] behind it, the last window of them at most."""
    window, step = ring.window, min(COMMIT_ROWS, ring.window - 1)
    by_lane = [(k[-window:], v[-window:]) for k, v in by_lane]
    for start in range(0, max(len(k) for k, _ in by_lane), step):
        counts = [min(max(len(k) - start, 0), step) for k, _ in by_lane]
        rows = np.zeros((2, len(by_lane), max(counts), *by_lane[0][0].shape[1:]), np.float32)
        for lane, (k, v) in enumerate(by_lane):
            rows[:, lane, : counts[lane]] = k[start : start + step], v[start : start + step]
        ring = ops.dflash2_commit(ring, rows[0], rows[1], counts)
    return ring


def _grown(ring: Any, window: int, ops: ModuleType) -> Any:
    """The same context in a ring of at least `window` slots; it has never wrapped, so slots are positions."""
    if window <= ring.window:
        return ring
    wider = 1 << (window - 1).bit_length()
    pad = ((0, 0), (0, 0), (0, wider - ring.window), (0, 0))
    stored = [np.pad(np.asarray(x).astype(np.float32), pad) for x in (ring.keys(), ring.values())]
    device = {} if not hasattr(ring, "device") else {"device": ring.device}
    return ops.load_dflash2_ring(*stored, ring.lengths, ring.lengths, **device)


def forward(
    params: DraftParams,
    config: DFlashConfig,
    state: DraftState,
    x: Any,
    rows: int,
    *,
    ops: ModuleType = pyferrum,
) -> Any:
    """One pass over a block behind each lane's context. Changes no state: what a block computes is never kept.

    Args:
        params: the draft model's weights.
        config: its shape.
        state: the context.
        x: float32 [B * R, hidden]: embeddings of anchor, mask, mask, … of each lane.
        rows: R, 2…16.
        ops: `pyferrum` or `pyferrum.reference`.

    Returns:
        Normed hidden states float16 [B * R, hidden]; row r of a lane speaks of the token behind row r - 1's.
    """
    lanes, heads, kv_heads, dim = len(state.lengths), config.query_heads, config.key_value_heads, config.head_dim
    turns = angles(config, (np.array(state.lengths)[:, None] + np.arange(rows)).reshape(-1))
    for ring, layer, causal in zip(state.rings, params.layers, config.causal, strict=True):
        n = ops.rms_norm(x, layer.input_norm, epsilon=config.epsilon)
        z, finish = _prepared(n, layer.attention_conv, rows, ops)
        q = _heads(z, layer.q_proj, layer.q_norm, turns, heads, config.epsilon, ops)
        k = _heads(z, layer.k_proj, layer.k_norm, turns, kv_heads, config.epsilon, ops)
        v = ops.linear(z, layer.v_proj, dtype=np.float32)
        shaped = [_shaped(a, (lanes, rows, h, dim)) for a, h in ((q, heads), (k, kv_heads), (v, kv_heads))]
        mask = ops.dflash2_mask(ring, rows, heads)
        context = ops.dflash2_attention(*ops.dflash2_pack(ring, *shaped), _causal(mask, rows) if causal else mask)
        x = ops.residual_add(x, finish(ops.linear(context, layer.o_proj)))
        n = ops.rms_norm(x, layer.mlp_norm, epsilon=config.epsilon)
        z, finish = _prepared(n, layer.mlp_conv, rows, ops)
        gated = ops.swiglu(ops.linear(z, layer.gate_proj), ops.linear(z, layer.up_proj))
        x = ops.residual_add(x, finish(ops.linear(gated, layer.down_proj)))
    return ops.rms_norm(x, params.norm, epsilon=config.epsilon)


def _prepared(n: Any, conv: Conv | None, rows: int, ops: ModuleType) -> tuple[Any, Any]:
    """What a sublayer takes, and the function that finishes what it gives."""
    if conv is None:
        return n, lambda y: y
    dynamic = ops.linear(n, conv.projection, dtype=np.float32)
    mixed = ops.dflash2_conv(n, conv.base_kernel, dynamic, side=0, rows=rows)
    return mixed, lambda y: ops.dflash2_conv(y, conv.base_kernel, dynamic, side=1, rows=rows)


def _heads(x: Any, weight: Any, norm: Any, turns: Any, heads: int, epsilon: float, ops: ModuleType) -> Any:
    return ops.dflash2_heads(ops.linear(x, weight, dtype=np.float32), norm, turns, heads=heads, epsilon=epsilon)


def _causal(mask: Any, rows: int) -> Any:
    """The mask without what lies behind a row in its own block."""
    host = np.array(mask)
    host[..., :rows][..., ~np.tri(rows, dtype=bool)] = -np.inf
    return host


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    return Array(x.device, x.buffer, shape, x.format, x._offset) if isinstance(x, Array) else x.reshape(shape)


def _half(features: Any) -> np.ndarray[Any, Any]:
    """float16, rows beyond its range scaled by a power of two first: the norm behind the projection takes that out."""
    x = np.asarray(features, np.float32)
    most = np.abs(x).max(axis=1, keepdims=True, initial=1.0)
    return (x * np.exp2(-np.maximum(np.ceil(np.log2(most)) - 15, 0))).astype(np.float16)


def logits(
    config: DFlashConfig, hidden: Any, head: Any, lanes: int, *, ops: ModuleType = pyferrum
) -> tuple[np.ndarray[Any, Any], Any]:
    """Every row but the anchors': (hidden states [B * (R - 1), hidden], logits float32 [B * (R - 1), vocabulary])."""
    rows = np.asarray(hidden)
    rows = rows.reshape(lanes, -1, rows.shape[1])[:, 1:].reshape(-1, rows.shape[1])
    scores = ops.linear(rows, head, dtype=np.float32)
    if config.logit_scale != 1 or config.softcap:
        host = np.asarray(scores) * np.float32(config.logit_scale)
        scores = np.float32(config.softcap) * np.tanh(host / np.float32(config.softcap)) if config.softcap else host
    return rows, scores


def without_second(config: DFlashConfig) -> DFlashConfig:
    """The same model as DFlash 1."""
    return replace(config, conv_taps=0, conv_group_size=0, selector_rank=0, selector_top_k=0)


def mask_embedding(config: DFlashConfig, embedding: Any) -> np.ndarray[Any, Any]:
    """The mask row of a block, bfloat16 [hidden]."""
    row = np.asarray(pyferrum.embed([config.mask_token], embedding))[0]
    return (row * np.float32(config.embedding_scale)).astype(bfloat16)
