"""Checkpoints of Llama and of the families that differ from it in details: GGUF files and safetensors folders.

Names and keys after llama.cpp's and transformers' converters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from pyferrum.checkpoint import GGUFFile, SafetensorsFiles
from pyferrum.config import AttentionConfig
from pyferrum.errors import CheckpointError, UnsupportedError
from pyferrum.models.llama import LayerParams, LlamaConfig, LlamaParams
from pyferrum.models.loading import TensorLoader, check_layers
from pyferrum.models.rope_files import gguf_scaling, hf_rope
from pyferrum.weights import AttentionWeights


@dataclass(frozen=True)
class Family:
    """What tells the checkpoints of one family from those of another."""

    hf: str
    """In `architectures` of config.json."""
    gguf: str | None
    """`general.architecture`; None: its GGUF files are those of Llama, and know no windows."""
    interleaved: bool = False
    """GGUF files hold the rows of q and k permuted, for rotation of pairs (2i, 2i+1)."""
    required: tuple[str, ...] = ()
    """Parts of a layer that Llama has not."""
    optional: tuple[str, ...] = ()
    """Parts that a layer may have, all of them or none: config.json says so in `attention_bias`."""
    head_dim: int | None = None
    """Where config.json gives none; None: hidden size / heads."""
    window: Literal["none", "everywhere", "switched"] = "none"
    """Where `sliding_window` holds: "switched" is as `use_sliding_window` and `layer_types` say."""


_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
FAMILIES = (
    Family("LlamaForCausalLM", "llama", interleaved=True, optional=_BIASES),
    Family("MistralForCausalLM", None, window="everywhere"),
    Family("Qwen2ForCausalLM", "qwen2", required=("q_bias", "k_bias", "v_bias"), window="switched"),
    Family(
        "Qwen3ForCausalLM", "qwen3", required=("q_norm", "k_norm"), optional=_BIASES, head_dim=128, window="switched"
    ),
)

_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
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
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


_PARTS = tuple(part for part in _HF_LAYER if part not in (*_BIASES, "q_norm", "k_norm"))


def _params(
    config: LlamaConfig,
    load: TensorLoader,
    *,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    embedding: str,
    norm: str,
    output: str,
    layer_name: Callable[[int, str], str],
) -> LlamaParams:
    """The weights, where every layer has the `required` parts, may have `optional` ones, and has no others."""
    attention, hidden, wide = config.attention, config.hidden_size, config.intermediate_size
    query, kv, dim = attention.query_projection_features, attention.kv_features, attention.head_dim
    names = {part: [layer_name(i, part) for i in range(config.layers)] for part in _HF_LAYER}
    head_name = embedding if config.tied_embeddings else output
    each = [names[part][i] for i in range(config.layers) for part in (*_PARTS, *required)]
    load.require(dict.fromkeys([embedding, *each, norm, head_name]))
    others = [part for part in _HF_LAYER if part not in (*_PARTS, *required, *optional)]
    if config.tied_embeddings:  # its weight is not looked at, so nothing else finds it
        load.refuse([f"{output.removesuffix('weight')}bias"], "a bias of the logits is not built")
    load.refuse((name for part in others for name in names[part]), f"{config.architecture} has no such part")
    layers = []
    for index in range(config.layers):

        def matrix(part: str, out: int, into: int, index: int = index) -> Any:
            return load.matrix(names[part][index], (out, into))

        def vector(part: str, length: int, index: int = index) -> Any:
            return load.vector(names[part][index], length, optional=part not in (*_PARTS, *required))

        weights = AttentionWeights(
            input_norm=vector("attn_norm", hidden),
            q_proj=matrix("q", query, hidden),
            k_proj=matrix("k", kv, hidden),
            v_proj=matrix("v", kv, hidden),
            o_proj=matrix("o", hidden, query),
            q_norm=vector("q_norm", dim),
            k_norm=vector("k_norm", dim),
            q_bias=vector("q_bias", query),
            k_bias=vector("k_bias", kv),
            v_bias=vector("v_bias", kv),
            o_bias=vector("o_bias", hidden),
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


def gguf_config(file: GGUFFile, family: Family) -> LlamaConfig:
    """The configuration in a GGUF file of this family."""
    name = str(family.gguf)

    def number(key: str, kind: type[Any], *default: Any) -> Any:
        return file.get(f"{name}.{key}", kind, *default)

    hidden, heads = number("embedding_length", int), number("attention.head_count", int)
    if isinstance(file.metadata.get(f"{name}.attention.head_count_kv"), np.ndarray):
        by_layer = number("attention.head_count_kv", list[int])
        if len(set(by_layer)) != 1:
            raise UnsupportedError(f"{file.path}: layers with different head_count_kv {by_layer} are not built")
        kv_heads = by_layer[0]
    else:
        kv_heads = number("attention.head_count_kv", int, heads)
    if number("expert_count", int, 0):
        raise UnsupportedError(f"{file.path}: a mixture of experts ({name}.expert_count) is not built")
    if heads < 1 or hidden < 1:
        raise CheckpointError(f"{file.path}: expected positive sizes, got {hidden=}, {heads=}")
    head_dim = number("attention.key_length", int, hidden // heads)
    if number("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedError(f"{file.path}: values of another width than keys are not built")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    layers = number("block_count", int)
    check_layers(str(file.path), f"{name}.block_count", layers, file.tensors)
    attention = AttentionConfig(
        hidden_size=hidden,
        query_heads=heads,
        key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=number("rope.dimension_count", int, head_dim),
        maximum_context_tokens=number("context_length", int),
        epsilon=number("attention.layer_norm_rms_epsilon", float),
        rope_theta=number("rope.freq_base", float, 10000.0),
        rope_scaling=gguf_scaling(file, name),
        rope_interleaved=family.interleaved,
    )
    return LlamaConfig(
        architecture=name,
        layers=layers,
        intermediate_size=number("feed_forward_length", int),
        vocabulary=embedding.shape[0],
        attention=attention,
        tied_embeddings="output.weight" not in file.tensors,
    )


def gguf_params(family: Family, config: LlamaConfig, load: TensorLoader) -> LlamaParams:
    """The weights of a GGUF file, as they are stored."""
    load.use("rope_freqs.weight")
    return _params(
        config,
        load,
        required=family.required,
        optional=family.optional,
        embedding="token_embd.weight",
        norm="output_norm.weight",
        output="output.weight",
        layer_name=lambda index, part: f"blk.{index}.{_GGUF_LAYER[part]}",
    )


# ---- safetensors


def _hf_number(files: SafetensorsFiles, key: str, kind: type[Any], *default: Any) -> Any:
    """The value of this kind that config.json has, or the default where it has none."""
    value = (files.config or {}).get(key)
    if value is None and default:
        return default[0]
    if kind is float and isinstance(value, int) and abs(value) < 2**53:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{files.path}: config.json: {key}: expected {kind.__name__}, got {value!r}")
    return value


def hf_config(files: SafetensorsFiles, family: Family) -> LlamaConfig:
    """The configuration in the `config.json` of a folder of this family."""
    source = f"{files.path}: config.json"
    values = files.config
    if values is None:
        raise CheckpointError(f"{source}: missing; it says how the weights go together")

    number = partial(_hf_number, files)
    for key, wanted in (("mlp_bias", False), ("hidden_act", "silu")):
        if values.get(key, wanted) != wanted:
            raise UnsupportedError(f"{source}: {key}={values[key]!r} is not built")
    hidden, heads = number("hidden_size", int), number("num_attention_heads", int)
    if heads < 1:
        raise CheckpointError(f"{source}: num_attention_heads: expected at least 1, got {heads}")
    layers = number("num_hidden_layers", int)
    check_layers(source, "num_hidden_layers", layers, files.tensors)
    theta, scaling = hf_rope(values, source)
    attention = AttentionConfig(
        hidden_size=hidden,
        query_heads=heads,
        key_value_heads=number("num_key_value_heads", int, heads),
        head_dim=number("head_dim", int, family.head_dim or hidden // heads),
        maximum_context_tokens=number("max_position_embeddings", int),
        epsilon=number("rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_hf_window(files, family, layers),
    )
    return LlamaConfig(
        architecture=family.hf,
        layers=layers,
        intermediate_size=number("intermediate_size", int),
        vocabulary=number("vocab_size", int),
        attention=attention,
        tied_embeddings=number("tie_word_embeddings", bool, False) or "lm_head.weight" not in files.tensors,
    )


def _hf_window(files: SafetensorsFiles, family: Family, layers: int) -> int | None:
    """Tokens that every layer sees, or None: all. Defaults are transformers'."""
    source, values = f"{files.path}: config.json", files.config or {}
    switched = family.window == "switched"
    if family.window == "none" or (switched and not _hf_number(files, "use_sliding_window", bool, False)):
        return None
    if "sliding_window" in values and values["sliding_window"] is None:
        return None
    window: int = _hf_number(files, "sliding_window", int, 4096)
    if window < 1:
        raise CheckpointError(f"{source}: sliding_window: expected at least 1 or null, got {window}")
    if not switched:
        return window
    full = _hf_number(files, "max_window_layers", int, 28)
    kinds = _hf_number(
        files, "layer_types", list, ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    )
    if len(kinds) != layers:
        raise CheckpointError(f"{source}: layer_types: expected one for each of {layers} layers, got {len(kinds)}")
    if kinds == ["full_attention"] * layers:
        return None
    if kinds != ["sliding_attention"] * layers:
        raise UnsupportedError(f"{source}: layers of different windows are not built, got {kinds}")
    return window


def hf_params(files: SafetensorsFiles, family: Family, config: LlamaConfig, load: TensorLoader) -> LlamaParams:
    """The weights of a safetensors folder, as they are stored."""
    if config.tied_embeddings:
        load.check_tied("model.embed_tokens.weight", "lm_head.weight")
    for owner in ("model", *(f"model.layers.{index}.self_attn" for index in range(config.layers))):
        load.use(f"{owner}.rotary_emb.inv_freq")
    biased = bool(family.optional) and _hf_number(files, "attention_bias", bool, False)

    def layer_name(index: int, part: str) -> str:
        return f"model.layers.{index}.{_HF_LAYER[part]}"

    biases = [layer_name(i, part) for i in range(config.layers) for part in family.optional]
    if biased:
        load.require(biases, "config.json: attention_bias is true, and ")
    else:
        load.refuse(biases, "config.json: attention_bias is not true")
    return _params(
        config,
        load,
        required=family.required,
        optional=family.optional if biased else (),
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        output="lm_head.weight",
        layer_name=layer_name,
    )
