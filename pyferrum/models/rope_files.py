"""What checkpoint files say of rotary embedding, of models and draft models alike: applied, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyferrum import rope
from pyferrum.checkpoint import GGUFFile
from pyferrum.errors import CheckpointError, InvalidArgument, UnsupportedError

_GGUF_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}


def gguf_scaling(file: GGUFFile, architecture: str) -> rope.Scaling | None:
    """The scaling in a GGUF file: `<architecture>.rope.…` and the tensor `rope_freqs.weight`, as llama.cpp reads them;
    YaRN's betas too, which it leaves out for some architectures.

    Raises:
        CheckpointError: numbers that no scaling can have.
        UnsupportedError: a kind, a setting or a combination that is not built.
    """
    try:
        return _gguf_scaling(file, f"{architecture}.rope.")
    except InvalidArgument as error:
        raise CheckpointError(f"{file.path}: {architecture}.rope.scaling: {error}") from error


def _gguf_scaling(file: GGUFFile, prefix: str) -> rope.Scaling | None:
    def number(key: str, *default: Any) -> float:
        return file.get(prefix + key, float, *default)

    for key, neutral in _GGUF_NEUTRAL.items():
        if number(f"scaling.{key}", neutral) != neutral:
            raise UnsupportedError(f"{file.path}: {prefix}scaling.{key} is not built")
    given = [key for key in ("scaling.factor", "scale_linear") if number(key, 0.0) != 0]  # 0 is written for "none"
    kind = file.get(f"{prefix}scaling.type", str, "linear" if given else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"{file.path}: {prefix}scaling.type {kind!r}; known: none, linear, yarn")
    attention = number("scaling.attn_factor", 1.0)
    if attention != 1 and kind != "yarn":
        raise UnsupportedError(f"{file.path}: {prefix}scaling.attn_factor is not built for scaling.type {kind!r}")
    factor = 1.0 if kind == "none" else number(given[0] if given else "scaling.factor")
    if "rope_freqs.weight" in file.tensors:
        if kind == "yarn":
            raise UnsupportedError(f"{file.path}: {prefix}scaling.type 'yarn' beside rope_freqs.weight is not built")
        return rope.FrequencyFactors(tuple(divisor * factor for divisor in _divisors(file)))
    if kind == "none":
        return None
    if kind == "linear":
        return rope.LinearScaling(factor)
    original = file.get(f"{prefix}scaling.original_context_length", int, None)
    if original is None:
        original = file.get(f"{prefix.removesuffix('rope.')}context_length", int)
    yarn = rope.YarnScaling(
        factor,
        original,
        number("scaling.yarn_beta_fast", 32.0),
        number("scaling.yarn_beta_slow", 1.0),
    )
    # llama.cpp multiplies YaRN's own factor by this one.
    return yarn if attention == 1 else replace(yarn, attention_factor=rope.attention_factor(yarn) * attention)


def _divisors(file: GGUFFile) -> list[float]:
    stored = file.tensors["rope_freqs.weight"]
    if stored.format not in ("F32", "F16", "BF16") or len(stored.shape) != 1:
        raise CheckpointError(
            f"{file.path}: tensor 'rope_freqs.weight': expected a list of numbers, frequency factors, got "
            f"{stored.format} {list(stored.shape)}"
        )
    return stored.dequantize().tolist()


def hf_rope(values: Mapping[str, Any], source: str) -> tuple[float, rope.Scaling | None]:
    """theta and scaling in a config.json: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: numbers that are missing, none, or such as no scaling can have; two different scalings.
        UnsupportedError: a kind or a setting that is not built.
    """
    fields = _hf_fields(values, source)
    theta = next((x for x in (fields.get("rope_theta"), values.get("rope_theta")) if x is not None), 10000.0)
    if not isinstance(theta, (int, float)) or isinstance(theta, bool):
        raise CheckpointError(f"{source}: rope_theta: expected a number, got {theta!r}")
    for name, neutral in (("partial_rotary_factor", 1.0), ("mscale", None), ("mscale_all_dim", None)):
        value = fields.get(name, values.get(name))
        if value not in (None, neutral):
            raise UnsupportedError(f"{source}: {name}={value!r} is not built")
    try:
        return float(theta), _hf_scaling(fields, values, source)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{source}: rope scaling {fields}: {reason}") from error


def _hf_fields(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The one object that says how to scale."""
    given = [values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key)]
    for fields in given:
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"{source}: rope scaling: expected an object, got {fields!r}")
        if nested := [key for key, value in fields.items() if isinstance(value, Mapping)]:
            raise UnsupportedError(f"{source}: rope scaling of kinds of layers, {', '.join(nested)}, is not built")
    thetas = [{"rope_theta": fields["rope_theta"]} for fields in given if fields.get("rope_theta") is not None]
    scalings = [{k: v for k, v in fields.items() if k != "rope_theta"} for fields in given]
    scaled = [fields for fields in scalings if _hf_kind(fields) != "default"] or scalings
    if any(fields != scaled[0] for fields in scaled) or any(theta != thetas[0] for theta in thetas):
        raise CheckpointError(f"{source}: rope_parameters and rope_scaling differ: {given[0]} and {given[1]}")
    return {**(scaled[0] if scaled else {}), **(thetas[0] if thetas else {})}


def _hf_kind(fields: Mapping[str, Any]) -> Any:
    return fields.get("rope_type") or fields.get("type") or "default"


def _hf_scaling(fields: Mapping[str, Any], values: Mapping[str, Any], source: str) -> rope.Scaling | None:
    kind = _hf_kind(fields)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedError(f"{source}: rope_type {kind!r}; known: default, linear, llama3, yarn")
    if kind == "default":
        if "factor" in fields:
            raise InvalidArgument("has a factor but no rope_type")
        return None
    factor = float(fields["factor"])
    if kind == "linear":
        return rope.LinearScaling(factor)
    original = int(fields.get("original_max_position_embeddings") or values["max_position_embeddings"])
    if kind == "llama3":
        return rope.Llama3Scaling(factor, float(fields["low_freq_factor"]), float(fields["high_freq_factor"]), original)
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool):
        raise InvalidArgument(f"truncate: expected true or false, got {truncate!r}")
    attention = fields.get("attention_factor")
    return rope.YarnScaling(
        factor,
        original,
        32.0 if fields.get("beta_fast") is None else float(fields["beta_fast"]),
        1.0 if fields.get("beta_slow") is None else float(fields["beta_slow"]),
        None if attention is None else float(attention),
        truncate,
    )
