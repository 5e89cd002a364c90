"""Llama and its kin: pre-normed attention and SwiGLU layers, as pure functions of parameters, states and tokens.

Mistral (windows), Qwen2 (biases) and Qwen3 (norms of heads) differ in the weights and the configuration of attention
alone. Formulas after transformers' modeling_llama. The same functions run on `pyferrum` and on
`pyferrum.reference`: pass the module as `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

import pyferrum
from pyferrum.attention import Ragged
from pyferrum.config import AttentionConfig
from pyferrum.weights import AttentionWeights


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model."""

    architecture: str
    """As the file names it: "llama" (GGUF) or "LlamaForCausalLM", for instance."""
    layers: int
    intermediate_size: int
    vocabulary: int
    attention: AttentionConfig
    """Of every layer."""
    tied_embeddings: bool
    """The embedding is also the output matrix."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.attention.hidden_size


class LayerParams(NamedTuple):
    """Weights of one layer."""

    attention: AttentionWeights
    mlp_norm: Any
    """[hidden]"""
    gate_proj: Any
    """[intermediate, hidden]"""
    up_proj: Any
    """[intermediate, hidden]"""
    down_proj: Any
    """[hidden, intermediate]"""


class LlamaParams(NamedTuple):
    """Weights of a model."""

    embedding: Any
    """[vocabulary, hidden]"""
    layers: tuple[LayerParams, ...]
    norm: Any
    """[hidden]"""
    output: Any
    """[vocabulary, hidden]; the embedding itself where they are tied"""


def mlp(x: Any, layer: LayerParams, *, epsilon: float, ops: ModuleType = pyferrum) -> Any:
    """x + down(silu(gate(n)) * up(n)), n = norm(x). [tokens, hidden], in x's dtype."""
    n = ops.rms_norm(x, layer.mlp_norm, epsilon=epsilon)
    gated = ops.swiglu(ops.linear(n, layer.gate_proj), ops.linear(n, layer.up_proj))
    return ops.residual_add(x, ops.linear(gated, layer.down_proj))


def last_rows(
    x: Any, lengths: Sequence[int], wanted: Sequence[int] | None, *, dtype: DTypeLike, ops: ModuleType = pyferrum
) -> Any:
    """The last wanted[i] of lengths[i] rows, sequence by sequence; None if there are none."""
    if wanted is None or list(wanted) == list(lengths):
        return x
    if not any(wanted):
        return None
    if len(lengths) == 1:
        return x[lengths[0] - wanted[0] :]
    ends = np.cumsum(lengths)
    rows = [np.arange(end - count, end) for end, count in zip(ends, wanted, strict=True)]
    return ops.embed(np.concatenate(rows), x, dtype=dtype)


def forward(
    params: LlamaParams,
    config: LlamaConfig,
    states: Sequence[Sequence[Any]],
    tokens: Any,
    lengths: Sequence[int],
    *,
    dtype: DTypeLike = np.float32,
    ops: ModuleType = pyferrum,
    taps: dict[int, Any] | None = None,
    wanted: Sequence[int] | None = None,
) -> tuple[list[tuple[Any, ...]], Any]:
    """Run new tokens of n sequences through every layer.

    Args:
        params: the model's weights.
        config: its shape.
        states: for each sequence, a state for each layer.
        tokens: int32 [sum of lengths], the sequences' new tokens one after another.
        lengths: new tokens of each sequence.
        dtype: of the residual stream: float32 or float16.
        ops: `pyferrum` or `pyferrum.reference`.
        taps: its keys are layers, counted from 0; the residual stream behind each of them, [sum of lengths, hidden] in
            `dtype`, becomes its value.
        wanted: for each sequence, how many of its last tokens the result is for; None for all. Others end with the
            last layer's keys and values, unless that layer is tapped.

    Returns:
        (states in the form they came in, the residual stream behind the last layer, [sum of wanted, hidden], or None
        where no token is wanted).
    """
    x = ops.embed(tokens, params.embedding, dtype=dtype)
    new: list[tuple[Any, ...]] = []
    for index, layer in enumerate(params.layers):
        if len(lengths) == 1:
            state, x = ops.causal_attention(states[0][index], x, layer.attention)
            new.append((state,))
        else:
            group, x = ops.causal_attention([state[index] for state in states], Ragged(x, lengths), layer.attention)
            new.append(group)
        if index == config.layers - 1 and index not in (taps or ()):
            x = last_rows(x, lengths, wanted, dtype=dtype, ops=ops)
            if x is None:
                break
        x = mlp(x, layer, epsilon=config.attention.epsilon, ops=ops)
        if taps is not None and index in taps:
            taps[index] = x
    if config.layers - 1 in (taps or ()):
        x = last_rows(x, lengths, wanted, dtype=dtype, ops=ops)
    return [tuple(layer[i] for layer in new) for i in range(len(lengths))], x


def logits(params: LlamaParams, config: LlamaConfig, x: Any, *, ops: ModuleType = pyferrum) -> Any:
    """Scores of every token of the vocabulary: float32 [rows, vocabulary] from rows of the residual stream."""
    return ops.linear(ops.rms_norm(x, params.norm, epsilon=config.attention.epsilon), params.output, dtype=np.float32)
