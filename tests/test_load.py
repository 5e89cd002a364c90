"""What checkpoint files may say of a model, and that whatever is not built of it is an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

import pyferrum as pf
from pyferrum.checkpoint import StoredTensor
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
        r"config\.json: attention_bias is true, and 7 tensors are missing: 'model\.layers\.0\.self_attn\.k_proj\.bias'",
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


def test_biases__of_both_formats_are_used(tmp_path: Path) -> None:
    """Those of q and k are permuted in a GGUF file as their rows are (FACTS F.3)."""
    rng = np.random.default_rng(3)
    widths = {"q": 64, "k": 32, "v": 32, "o": 64}
    biases = {
        f"model.layers.{i}.self_attn.{x}_proj.bias": rng.standard_normal(n).astype(np.float32)
        for i in range(tiny.LAYERS)
        for x, n in widths.items()
    }
    folder = tiny.write_tiny(tmp_path / "b", config={"attention_bias": True}, weights=changed(biases))
    models = [
        pf.load(folder, strict=True),
        pf.load(tiny.write_tiny_gguf(tmp_path / "b.gguf", weights=changed(biases)), strict=True),
        pf.load(tiny.write_tiny(tmp_path / "plain")),
    ]
    attention = models[0].params.layers[1].attention
    for x in widths:
        loaded = getattr(attention, f"{x}_bias")
        np.testing.assert_array_equal(loaded, biases[f"model.layers.1.self_attn.{x}_proj.bias"])
    ours, theirs, plain = (np.asarray(m.forward(m.init_state(), [5, 6, 7])[1]) for m in models)
    bound = 2.0**-8 * np.abs(ours).max()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=bound)
    assert np.abs(plain - ours).max() > 20 * bound


def test_context__is_no_longer_than_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """16,384 pages of 512 tokens: published contexts of a million tokens are beyond that where heads are many."""
    for longest, kept, said in ((2**23, 2**23, ""), (2**23 + 1, 2**23, "holds 8388608 tokens of the model's context")):
        caplog.clear()
        model = pf.load(tiny.write_tiny(tmp_path, config={"max_position_embeddings": longest}))
        assert model.config.attention.maximum_context_tokens == kept
        assert said in caplog.text and bool(said) == bool(caplog.text)
        model.init_state().close()
    with pytest.raises(pf.CheckpointError, match="maximum_context_tokens"):
        pf.load(tiny.write_tiny(tmp_path, config={"max_position_embeddings": 0}))


def test_file__sizes_of_heads_are_read(tmp_path: Path) -> None:
    keys = {"head_count_kv": [2, 2], "key_length": 8, "value_length": 8}
    rows = {
        f"model.layers.{i}.self_attn.{x}_proj.weight": w[:, : w.shape[1] // 2] if x == "o" else w[: len(w) // 2]
        for i in range(tiny.LAYERS)
        for x in "qkvo"
        for w in [tiny.tensors()[f"model.layers.{i}.self_attn.{x}_proj.weight"]]
    }
    given = {f"llama.attention.{key}": x for key, x in keys.items()} | {"llama.rope.dimension_count": 4}
    path = tiny.write_tiny_gguf(tmp_path / "m.gguf", keys=given, weights=changed(rows))
    attention = pf.load(path).config.attention
    assert (attention.query_heads, attention.key_value_heads, attention.head_dim) == (4, 2, 8)
    assert attention.rotary_dim == 4


# FACTS G.4: byte i of the block is 37 i + 11, then d is 0.5 and dmin 0.25 (MXFP4: byte 0 is 128).
EXPANDED: dict[str, tuple[tuple[int, ...], dict[int, float], float]] = {
    "Q2_K": ((80, 82), {0: 16.5, 1: 0.0, 16: -0.75, 33: -1.25, 127: 21.0, 255: 2.25}, 1029.5),
    "Q3_K": ((108,), {0: 40.5, 1: -54.0, 16: -48.0, 33: 22.0, 127: 36.0, 255: 21.0}, 479),
    "IQ4_NL": ((0,), {0: -17.5, 1: 12.5, 16: -17.5, 31: 0.5}, -128.5),
    "IQ4_XS": ((0,), {0: 32.5, 1: -0.5, 16: 32.5, 33: -3.5, 127: 98.0, 255: -8.0}, -5502.5),
    "MXFP4": ((), {0: 0.0, 1: 6.0, 16: 3.0, 31: 6.0}, 25),
}


@pytest.mark.parametrize("format", EXPANDED)
def test_expansion__has_the_values_of_the_blocks(format: str, caplog: pytest.LogCaptureFixture) -> None:
    scales_at, points, total = EXPANDED[format]
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    block = ((37 * np.arange(size) + 11) & 255).astype(np.uint8)
    for at, scale in zip(scales_at, (0.5, 0.25), strict=False):
        block[at : at + 2] = np.float16([scale]).view(np.uint8)
    if format == "MXFP4":
        block[0] = 128
    path = Path("m.gguf")
    stored = StoredTensor("w", format, (1, elements), block, path, 0)
    loader = loading.TensorLoader(path, {"w": stored}, {}, pf.default_device())
    weight = np.asarray(loader.matrix("w", (1, elements)))
    assert weight.dtype == np.float16
    assert {at: float(weight[0, at]) for at in points} == points
    assert float(weight.sum(dtype=np.float64)) == total
    loader.finish(strict=True)
    assert f"no kernel multiplies 1 {format} tensors as stored: expanded to float16" in caplog.text
