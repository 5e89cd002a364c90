"""What checkpoint files may say of a model, and that whatever is not built of it is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pyferrum as pf
from pyferrum.models import loading
from tests import tiny

Q_PROJ, Q_PROJ_GGUF = "model.layers.0.self_attn.q_proj", "blk.0.attn_q"


def changed(change: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tiny model's tensors with others in their place; None takes one away."""
    return {name: x for name, x in (tiny.tensors() | dict(change)).items() if x is not None}


def cast(dtype: Any) -> dict[str, np.ndarray]:
    return {f"{Q_PROJ}.weight": (tiny.tensors()[f"{Q_PROJ}.weight"] * 4).astype(dtype)}


ONE = np.ones(1, np.float32)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

# config.json, tensors, the error and what it says.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "fp8": (
        {"quantization_config": FP8},
        cast(ml_dtypes.float8_e4m3fn) | {f"{Q_PROJ}.weight_scale": ONE},
        pf.UnsupportedError,
        r"config\.json: quantization_config: quant_method 'fp8' is not built",
    ),
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {f"{Q_PROJ}.weight": None, f"{Q_PROJ}.qweight": np.zeros((8, 64), np.int32)},
        pf.UnsupportedError,
        r"config\.json: quantization_config: quant_method 'gptq' is not built",
    ),
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4}},
        {f"{Q_PROJ}.scales": ONE},
        pf.UnsupportedError,
        r"config\.json: quantization: quant_method .*'bits': 4.* is not built",
    ),
    **{
        f"{name} without a key": ({}, cast(dtype), pf.UnsupportedError, rf"'{Q_PROJ}\.weight': weights of dtype {name}")
        for name, dtype in {
            "F8_E4M3": ml_dtypes.float8_e4m3fn,
            "F8_E5M2": ml_dtypes.float8_e5m2,
            "I8": np.int8,
            "U32": np.uint32,
            "BOOL": np.bool_,
        }.items()
    },
    "a norm of integers": (
        {},
        {"model.norm.weight": np.ones(tiny.HIDDEN, np.int8)},
        pf.UnsupportedError,
        r"'model\.norm\.weight': weights of dtype I8 are not built",
    ),
    **{
        f"{part} beside a weight": ({}, {name: ONE}, pf.UnsupportedError, rf"parts of weights .* '{name}'")
        for part, name in {
            "SCB": f"{Q_PROJ}.SCB",
            "absmax": f"{Q_PROJ}.weight.absmax",
            "a bias of the MLP": "model.layers.0.mlp.gate_proj.bias",
        }.items()
    },
    "tied to another matrix": (
        {"tie_word_embeddings": True},
        {},
        pf.CheckpointError,
        r"tie_word_embeddings is true, and tensors 'model\.embed_tokens\.weight' and 'lm_head\.weight' differ",
    ),
    "biases said but not there": (
        {"attention_bias": True},
        {f"{Q_PROJ}.bias": np.ones(64, np.float32)},
        pf.CheckpointError,
        r"config\.json: attention_bias is true, and tensors are missing: 'model\.layers\.0\.self_attn\.k_proj\.bias'",
    ),
    "beyond float16": (
        {},
        {f"{Q_PROJ}.weight": np.full((64, 64), 70000.0)},
        pf.CheckpointError,
        rf"tensor '{Q_PROJ}\.weight' \(F64\): has values beyond those of float16",
    ),
    "too many layers": (
        {"num_hidden_layers": 10**9},
        {},
        pf.CheckpointError,
        r"config\.json: num_hidden_layers: expected 1…1024 layers, got 1,000,000,000",
    ),
    **{
        f"{count} layers": (
            {"num_hidden_layers": count},
            {},
            pf.CheckpointError,
            rf"config\.json: num_hidden_layers: expected 1…1024 layers, got {count}",
        )
        for count in (0, -1)
    },
    "fewer layers than the file has": (
        {"num_hidden_layers": 1},
        {},
        pf.CheckpointError,
        r"config\.json: num_hidden_layers is 1, and the file holds tensors of 2 layers",
    ),
    "more layers than the file has": (
        {"num_hidden_layers": 3},
        {},
        pf.CheckpointError,
        r"bad: 9 tensors are missing: 'model\.layers\.2\.input_layernorm\.weight', .* and 1 more",
    ),
    "a huge head": (
        {"head_dim": 2**31},
        {},
        pf.CheckpointError,
        r"bad: \[attention_config\] head_dim: expected 1…256, got 2147483648",
    ),
    "a tensor too few": (
        {},
        {"model.norm.weight": None},
        pf.CheckpointError,
        r"bad: tensor 'model\.norm\.weight' is missing",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder__what_is_not_built_is_named(name: str, tmp_path: Path) -> None:
    config, change, error, message = FOLDERS[name]
    with pytest.raises(error, match=message):
        pf.load(tiny.write_tiny(tmp_path / "bad", config=config, weights=changed(change)))


# Metadata, tensors, the error and what it says.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a scale beside a weight": (
        {},
        {f"{Q_PROJ_GGUF}.scale": ONE},
        pf.UnsupportedError,
        r"bad\.gguf: parts of weights that are not built: 'blk\.0\.attn_q\.scale'",
    ),
    "a bias of the MLP": (
        {},
        {"blk.0.ffn_gate.bias": np.ones(tiny.INTERMEDIATE, np.float32)},
        pf.UnsupportedError,
        r"bad\.gguf: parts of weights that are not built: 'blk\.0\.ffn_gate\.bias'",
    ),
    "integers": ({}, cast(np.int8), pf.UnsupportedError, r"'blk\.0\.attn_q\.weight': weights of dtype I8"),
    **{
        f"head_count_kv {x!r}": (
            {"llama.attention.head_count_kv": x},
            {},
            pf.CheckpointError,
            r"bad\.gguf: metadata key 'llama\.attention\.head_count_kv': expected .*int",
        )
        for x in ("x", float("nan"), float("inf"), [2.0, 2.0])
    },
    "layers with different head_count_kv": (
        {"llama.attention.head_count_kv": [2, 1]},
        {},
        pf.UnsupportedError,
        r"bad\.gguf: layers with different head_count_kv \[2, 1\] are not built",
    ),
    "a mixture of experts": (
        {"llama.expert_count": 8},
        {},
        pf.UnsupportedError,
        r"bad\.gguf: a mixture of experts \(llama\.expert_count\) is not built",
    ),
    "a huge head": (
        {"llama.attention.key_length": 2**31},
        {},
        pf.CheckpointError,
        r"bad\.gguf: \[attention_config\] head_dim: expected 1…256, got 2147483648",
    ),
    "more rotated than there is": (
        {"llama.rope.dimension_count": 18},
        {},
        pf.CheckpointError,
        r"bad\.gguf: \[attention_config\] rope_dim: expected an even number",
    ),
    "no layers": ({"llama.block_count": 0}, {}, pf.CheckpointError, r"block_count: expected 1…1024 layers, got 0"),
    "fewer layers than the file has": (
        {"llama.block_count": 1},
        {},
        pf.CheckpointError,
        r"bad\.gguf: llama\.block_count is 1, and the file holds tensors of 2 layers",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_file__what_is_not_built_is_named(name: str, tmp_path: Path) -> None:
    keys, change, error, message = FILES[name]
    with pytest.raises(error, match=message):
        pf.load(tiny.write_tiny_gguf(tmp_path / "bad.gguf", keys=keys, weights=changed(change)))


@pytest.mark.parametrize(("write", "name"), [(tiny.write_tiny, "m"), (tiny.write_tiny_gguf, "m.gguf")])
def test_strict__a_tensor_nobody_uses(
    write: Callable[..., Path], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ggml-org/llama.cpp#27349, #5518 (F10): one line in the log, or an error."""
    path = write(tmp_path / name, weights=changed({"extra.weight": ONE}))
    with caplog.at_level("INFO", logger="pyferrum"):
        pf.load(path)
    assert f"{path}: 1 tensors of the file are not used: 'extra.weight'" in caplog.text
    with pytest.raises(pf.CheckpointError, match=rf"{name}: 1 tensors of the file are not used: 'extra\.weight'"):
        pf.load(path, strict=True)


def test_strict__buffers_of_old_checkpoints_are_no_strangers(tmp_path: Path) -> None:
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    pf.load(tiny.write_tiny(tmp_path, weights=changed(dict.fromkeys(names, ONE))), strict=True)


def test_tied__an_output_matrix_that_is_the_embedding_is_no_second_one(tmp_path: Path) -> None:
    """FACTS F.1: config.json says tied, and the file has both; whatever they are stored in, their values are equal."""
    embedding = tiny.tensors()["model.embed_tokens.weight"]
    tied = pf.load(tiny.write_tiny(tmp_path / "one", weights=changed({"lm_head.weight": None})))
    for dtype in (np.float16, np.float32):
        weights = changed({"lm_head.weight": embedding.astype(dtype)})
        folder = tiny.write_tiny(tmp_path / "both", config={"tie_word_embeddings": True}, weights=weights)
        model = pf.load(folder, strict=True)
        assert model.config.tied_embeddings
        assert model.params.output is model.params.embedding
        logits = [np.asarray(m.forward(m.init_state(), [3, 4])[1]) for m in (tied, model)]
        np.testing.assert_array_equal(*logits)


def test_quantised__is_refused_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_tiny(tmp_path, config={"quantization_config": FP8})
    monkeypatch.setattr(loading.TensorLoader, "_stored", None)
    with pytest.raises(pf.UnsupportedError, match="fp8"):
        pf.load(folder)
