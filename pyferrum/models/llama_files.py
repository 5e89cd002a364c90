"""Llama checkpoints: GGUF files of architecture `llama` and safetensors folders of `LlamaForCausalLM`.

Names and keys after llama.cpp's and transformers' converters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyferrum.checkpoint import GGUFFile, SafetensorsFiles
from pyferrum.config import AttentionConfig
from pyferrum.errors import CheckpointError, UnsupportedError
from pyferrum.models.llama import LayerParams, LlamaConfig, LlamaParams
from pyferrum.models.loading import TensorLoader, check_layers, some
from pyferrum.models.rope_files import gguf_scaling, hf_rope
from pyferrum.weights import AttentionWeights

_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}

_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def _params(
    config: LlamaConfig,
    load: TensorLoader,
    *,
    embedding: str,
    norm: str,
    output: str,
    layer_name: Callable[[int, str], str],
) -> LlamaParams:
    attention, hidden, wide = config.attention, config.hidden_size, config.intermediate_size
    query, kv = attention.query_projection_features, attention.kv_features
    parts = [part for part in _HF_LAYER if not part.endswith("_bias")]
    head_name = embedding if config.tied_embeddings else output
    load.require(dict.fromkeys([embedding, *(layer_name(i, part) for i in range(config.layers) for part in parts),
                                norm, head_name]))  # fmt: skip
    layers = []
    for index in range(config.layers):

        def matrix(part: str, out: int, into: int, index: int = index) -> Any:
            return load.matrix(layer_name(index, part), (out, into))

        def vector(part: str, length: int, optional: bool = False, index: int = index) -> Any:
            return load.vector(layer_name(index, part), length, optional=optional)

        weights = AttentionWeights(
            input_norm=vector("attn_norm", hidden),
            q_proj=matrix("q", query, hidden),
            k_proj=matrix("k", kv, hidden),
            v_proj=matrix("v", kv, hidden),
            o_proj=matrix("o", hidden, query),
            q_bias=vector("q_bias", query, optional=True),
            k_bias=vector("k_bias", kv, optional=True),
            v_bias=vector("v_bias", kv, optional=True),
            o_bias=vector("o_bias", hidden, optional=True),
        )
        layers.append(
            LayerParams(
                weights,
                vector("mlp_norm", hidden),
                matrix("gate", wide, hidden),
                matrix("up", wide, hidden),
                matrix("down", hidden, wide),
            )
        )
    table = load.matrix(embedding, (config.vocabulary, hidden), multiplied=config.tied_embeddings)
    head = table if config.tied_embeddings else load.matrix(output, (config.vocabulary, hidden))
    return LlamaParams(table, tuple(layers), load.vector(norm, hidden), head)


# ---- GGUF


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The configuration in a GGUF file of architecture `llama`."""

    def number(key: str, kind: type[Any], *default: Any) -> Any:
        return file.get(f"llama.{key}", kind, *default)

    hidden, heads = number("embedding_length", int), number("attention.head_count", int)
    if isinstance(file.metadata.get("llama.attention.head_count_kv"), np.ndarray):
        by_layer = number("attention.head_count_kv", list[int])
        if len(set(by_layer)) != 1:
            raise UnsupportedError(f"{file.path}: layers with different head_count_kv {by_layer} are not built")
        kv_heads = by_layer[0]
    else:
        kv_heads = number("attention.head_count_kv", int, heads)
    if number("expert_count", int, 0):
        raise UnsupportedError(f"{file.path}: a mixture of experts (llama.expert_count) is not built")
    if heads < 1 or hidden < 1:
        raise CheckpointError(f"{file.path}: expected positive sizes, got {hidden=}, {heads=}")
    head_dim = number("attention.key_length", int, hidden // heads)
    if number("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedError(f"{file.path}: values of another width than keys are not built")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    layers = number("block_count", int)
    check_layers(str(file.path), "llama.block_count", layers, file.tensors)
    attention = AttentionConfig(
        hidden_size=hidden,
        query_heads=heads,
        key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=number("rope.dimension_count", int, head_dim),
        maximum_context_tokens=number("context_length", int),
        epsilon=number("attention.layer_norm_rms_epsilon", float),
        rope_theta=number("rope.freq_base", float, 10000.0),
        rope_scaling=gguf_scaling(file, "llama"),
        rope_interleaved=True,  # the converter permutes q and k rows for it
    )
    return LlamaConfig(
        architecture="llama",
        layers=layers,
        intermediate_size=number("feed_forward_length", int),
        vocabulary=embedding.shape[0],
        attention=attention,
        tied_embeddings="output.weight" not in file.tensors,
    )


def gguf_params(file: GGUFFile, config: LlamaConfig, load: TensorLoader) -> LlamaParams:
    """The weights of a GGUF file, as they are stored."""
    load.use("rope_freqs.weight")
    return _params(
        config,
        load,
        embedding="token_embd.weight",
        norm="output_norm.weight",
        output="output.weight",
        layer_name=lambda index, part: f"blk.{index}.{_GGUF_LAYER[part]}",
    )


# ---- safetensors


def hf_config(files: SafetensorsFiles) -> LlamaConfig:
    """The configuration in the `config.json` of a `LlamaForCausalLM` folder."""
    source = f"{files.path}: config.json"
    values = files.config
    if values is None:
        raise CheckpointError(f"{source}: missing; it says how the weights go together")

    def number(key: str, kind: type[Any], *default: Any) -> Any:
        value = values.get(key)
        if value is None and default:
            return default[0]
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{source}: {key}: expected {kind.__name__}, got {value!r}")
        return value

    for key, wanted in (("mlp_bias", False), ("hidden_act", "silu")):
        if values.get(key, wanted) != wanted:
            raise UnsupportedError(f"{source}: {key}={values[key]!r} is not built")
    hidden, heads = number("hidden_size", int), number("num_attention_heads", int)
    if heads < 1:
        raise CheckpointError(f"{source}: num_attention_heads: expected at least 1, got {heads}")
    layers = number("num_hidden_layers", int)
    check_layers(source, "num_hidden_layers", layers, files.tensors)
    if number("attention_bias", bool, False):
        biases = [f"model.layers.{i}.{_HF_LAYER[f'{x}_bias']}" for i in range(layers) for x in "qkvo"]
        lacking = [name for name in biases if name not in files.tensors]
        if lacking:
            raise CheckpointError(f"{source}: attention_bias is true, and tensors are missing: {some(lacking)}")
    theta, scaling = hf_rope(values, source)
    attention = AttentionConfig(
        hidden_size=hidden,
        query_heads=heads,
        key_value_heads=number("num_key_value_heads", int, heads),
        head_dim=number("head_dim", int, hidden // heads),
        maximum_context_tokens=number("max_position_embeddings", int),
        epsilon=number("rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
    )
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        layers=layers,
        intermediate_size=number("intermediate_size", int),
        vocabulary=number("vocab_size", int),
        attention=attention,
        tied_embeddings=number("tie_word_embeddings", bool, False) or "lm_head.weight" not in files.tensors,
    )


def hf_params(config: LlamaConfig, load: TensorLoader) -> LlamaParams:
    """The weights of a safetensors folder, as they are stored."""
    if config.tied_embeddings:
        load.check_tied("model.embed_tokens.weight", "lm_head.weight")
    for owner in ("model", *(f"model.layers.{index}.self_attn" for index in range(config.layers))):
        load.use(f"{owner}.rotary_emb.inv_freq")
    return _params(
        config,
        load,
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        output="lm_head.weight",
        layer_name=lambda index, part: f"model.layers.{index}.{_HF_LAYER[part]}",
    )
