"""Checkpoints of draft models: `DFlashDraftModel` and `DFlash2DraftModel` in safetensors, `dflash` in GGUF.

Names and keys are those of the published files. Loading is strict: a tensor too few or too many is an error, because
a draft model with a part left out still runs, and only its acceptance tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyferrum.checkpoint import GGUFFile, SafetensorsFiles
from pyferrum.errors import CheckpointError, UnsupportedError
from pyferrum.models.dflash import Conv, DFlashConfig, DraftLayer, DraftParams
from pyferrum.models.loading import TensorLoader, check_layers
from pyferrum.models.rope_files import gguf_scaling, hf_rope

_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

_GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    _CODEBOOKS[0]: "selector_predecessor.weight",
    _CODEBOOKS[1]: "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}


def tensor_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft model by its safetensors name."""
    h, wide = config.hidden_size, config.intermediate_size
    q, kv, dim = config.query_heads * config.head_dim, config.key_value_heads * config.head_dim, config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (wide, h),
        "mlp.up_proj.weight": (wide, h),
        "mlp.down_proj.weight": (h, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config.target_layers) * config.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    if config.is_second:
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, config.conv_taps, h)
            layer[f"{conv}.kernel_projection.weight"] = (2 * config.conv_taps * (h // config.conv_group_size), h)
        book = (config.selector_vocabulary, config.selector_rank)
        shapes |= {_CODEBOOKS[0]: book, _CODEBOOKS[1]: book}
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector_rank, h)
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def load_params(config: DFlashConfig, load: TensorLoader, stored_name: Callable[[str], str]) -> DraftParams:
    """The weights, and nothing left over; `stored_name` gives a safetensors name as the file has it."""
    shapes = tensor_shapes(config)
    load.require(map(stored_name, shapes))

    def get(name: str) -> Any:
        shape, stored = shapes[name], stored_name(name)
        if len(shape) == 1:
            return load.vector(stored, shape[0])
        return load.matrix(stored, (shape[0], shape[1])) if len(shape) == 2 else load.tensor(stored, shape)

    def conv(prefix: str) -> Conv | None:
        if not config.is_second:
            return None
        return Conv(get(f"{prefix}.base_kernel"), get(f"{prefix}.kernel_projection.weight"))

    layers = []
    for index in range(config.layers):
        p = f"layers.{index}"
        layers.append(
            DraftLayer(
                input_norm=get(f"{p}.input_layernorm.weight"),
                **{f"{x}_proj": get(f"{p}.self_attn.{x}_proj.weight") for x in "qkvo"},
                q_norm=get(f"{p}.self_attn.q_norm.weight"),
                k_norm=get(f"{p}.self_attn.k_norm.weight"),
                mlp_norm=get(f"{p}.post_attention_layernorm.weight"),
                **{f"{x}_proj": get(f"{p}.mlp.{x}_proj.weight") for x in ("gate", "up", "down")},
                attention_conv=conv(f"{p}.attention_conv"),
                mlp_conv=conv(f"{p}.mlp_conv"),
            )
        )
    selector = (
        (get(_CODEBOOKS[0]), get(_CODEBOOKS[1]), get("candidate_selector.hidden_projection.weight"))
        if config.is_second
        else (None, None, None)
    )
    params = DraftParams(get("fc.weight"), get("hidden_norm.weight"), tuple(layers), get("norm.weight"), *selector)
    load.finish(strict=True)
    return params


def check_targets(source: str, layers: tuple[int, ...], count: int) -> None:
    """Raise CheckpointError unless `layers` are ascending layers of a target of `count`."""
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= count:
        raise CheckpointError(
            f"{source}: target layers: expected ascending layers 0…{count - 1} of the target, got {list(layers)}"
        )


# ---- safetensors


def hf_config(files: SafetensorsFiles, target_vocabulary: int) -> DFlashConfig:
    """The configuration in `config.json`; a key is read from `dflash_config` first, then from the top."""
    source = f"{files.path}: config.json"
    top = files.config
    if top is None:
        raise CheckpointError(f"{source}: missing; it says how the weights go together")
    nested = top.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{source}: dflash_config: expected an object, got {nested!r}")

    def get(key: str, kind: type[Any], *default: Any) -> Any:
        value = nested.get(key, top.get(key))
        if value is None and default:
            return default[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{source}: {key}: expected {kind.__name__}, got {value!r}")
        return value

    architecture = (get("architectures", list, None) or ["none in config.json"])[0]
    if architecture not in ("DFlashDraftModel", "DFlash2DraftModel"):
        raise UnsupportedError(
            f"{source}: architecture {architecture!r} is not built; known: DFlashDraftModel, DFlash2DraftModel"
        )
    neutral = {
        "attention_sink_bias": False, "attention_bias": False, "sample_from_anchor": False,
        "hidden_act": "silu", "is_neox_style": True,
    }  # fmt: skip
    for key, value in (neutral | {"draft_vocab_size": target_vocabulary, "projector_type": None}).items():
        if nested.get(key, top.get(key)) not in (None, value):
            raise UnsupportedError(f"{source}: {key}={nested.get(key, top.get(key))!r} is not built")
    layers = get("num_hidden_layers", int)
    check_layers(source, "num_hidden_layers", layers, files.tensors)
    slide = get("use_swa", bool, False)
    window_key = "swa_window_size" if slide else "sliding_window"
    window = get(window_key, int, None)
    kinds = get("layer_types", list, ["sliding_attention" if slide else "full_attention"] * layers)
    if len(kinds) != layers or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise CheckpointError(
            f"{source}: layer_types: expected {layers} of sliding_attention, full_attention, got {kinds}"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and window is None:
        raise CheckpointError(f"{source}: {window_key}: missing, and {sum(sliding)} layers slide")
    said = (("is_causal", top), ("is_causal", nested), ("causal", nested))
    key, causal = next(((key, place[key]) for key, place in said if place.get(key) is not None), ("is_causal", None))
    if not isinstance(causal, bool | None):
        raise CheckpointError(f"{source}: {key}: expected true or false, got {causal!r}")
    targets = tuple(get("target_layer_ids", list))
    if not all(type(layer) is int for layer in targets):
        raise CheckpointError(f"{source}: target_layer_ids: expected integers, got {list(targets)}")
    if count := get("num_target_layers", int, 0):
        check_targets(source, targets, count)
    theta, scaling = hf_rope(top, source)
    hidden = get("hidden_size", int)
    second = architecture == "DFlash2DraftModel"
    config = DFlashConfig(
        architecture=architecture,
        hidden_size=hidden,
        target_hidden_size=get("target_hidden_size", int, hidden),
        intermediate_size=get("intermediate_size", int),
        query_heads=get("num_attention_heads", int),
        key_value_heads=get("num_key_value_heads", int),
        head_dim=get("head_dim", int),
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(slides if causal is None else causal for slides in sliding),
        block_size=get("block_size", int),
        target_layers=targets,
        mask_token=get("mask_token_id", int),
        epsilon=get("rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
        embedding_scale=get("input_embedding_scale", float, 1.0),
        logit_scale=get("output_multiplier", float, 1.0),
        softcap=get("final_logit_softcapping", float, 0.0),
    )
    return _second(config, get, target_vocabulary) if second else config


def _second(config: DFlashConfig, get: Callable[..., Any], target_vocabulary: int) -> DFlashConfig:
    return replace(
        config,
        conv_taps=get("conv_kernel_size", int),
        conv_group_size=get("conv_group_size", int),
        selector_rank=get("selector_rank", int),
        selector_top_k=get("selector_top_k", int),
        selector_vocabulary=get("selector_vocab_size", int, target_vocabulary),
    )


def hf_name(files: SafetensorsFiles) -> Callable[[str], str]:
    """A tensor's name in the file: some files prefix `model.`, some give codebooks a `.weight`."""
    prefix = "model." if "model.fc.weight" in files.tensors else ""

    def stored(name: str) -> str:
        full = prefix + name
        return f"{full}.weight" if name in _CODEBOOKS and f"{full}.weight" in files.tensors else full

    return stored


# ---- GGUF


def gguf_config(file: GGUFFile, target_vocabulary: int, target_hidden: int) -> DFlashConfig:
    """The configuration in a GGUF file of architecture `dflash`; its `target_layers` count from 1."""

    def get(key: str, kind: type[Any], *default: Any) -> Any:
        return file.get(f"dflash.{key}", kind, *default)

    source, layers = str(file.path), get("block_count", int)
    check_layers(source, "dflash.block_count", layers, file.tensors)
    head_dim = get("attention.key_length", int)
    if get("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedError(f"{source}: values of another width than keys are not built")
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise UnsupportedError(f"{source}: dflash.rope.dimension_count: heads rotated in part are not built")
    if get("sample_from_anchor", bool, False):
        raise UnsupportedError(f"{source}: dflash.sample_from_anchor is not built")
    window = get("attention.sliding_window", int, 0)
    pattern = get("attention.sliding_window_pattern", list[bool], [bool(window)] * layers)
    if len(pattern) != layers or (any(pattern) and not window):
        raise CheckpointError(
            f"{source}: sliding_window_pattern {pattern} does not fit {layers} layers, window {window}"
        )
    causal = get("attention.causal", bool, None)
    targets = tuple(get("target_layers", list[int]))
    # Early conversions wrote layers counted from 0, and the mask token among the keys of the architecture.
    early = "dflash.mask_token_id" in file.metadata
    if 0 not in targets and not early:
        targets = tuple(layer - 1 for layer in targets)
    second = "selector_hidden.weight" in file.tensors
    config = DFlashConfig(
        architecture="dflash",
        hidden_size=get("embedding_length", int),
        target_hidden_size=target_hidden,
        intermediate_size=get("feed_forward_length", int),
        query_heads=get("attention.head_count", int),
        key_value_heads=get("attention.head_count_kv", int),
        head_dim=head_dim,
        windows=tuple(window if slides else None for slides in pattern),
        causal=tuple(slides if causal is None else causal for slides in pattern),
        block_size=get("block_size", int),
        target_layers=targets,
        mask_token=get("mask_token_id", int) if early else file.get("tokenizer.ggml.mask_token_id", int),
        epsilon=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0),
        rope_scaling=gguf_scaling(file, "dflash"),
        logit_scale=get("logit_scale", float, 1.0),
        softcap=get("final_logit_softcapping", float, 0.0),
    )
    return _second(config, get, target_vocabulary) if second else config


def gguf_name(name: str) -> str:
    """A safetensors name as GGUF spells it."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, index, part = name.split(".", 2)
    return f"blk.{index}.{_GGUF_NAMES[part]}"
