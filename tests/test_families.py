"""Models of each family against transformers, which ran the same tiny files (tests/figures/make_families.py)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.rope import YarnScaling
from tests import families, tiny

FIGURES = np.load(Path(__file__).parent / "figures" / "families.npz")
Q = "model.layers.1.self_attn"


def logits(model: pf.Model) -> np.ndarray:
    return np.asarray(model.forward(model.init_state(), families.TOKENS)[1], np.float64)


def bound(expected: np.ndarray) -> float:
    """Activations are float16 at a dozen points of a layer: errors of this share of the largest logit."""
    return float(2.0**-9 * np.abs(expected).max())


@pytest.mark.parametrize("name", families.FAMILIES)
def test_logits__are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = families.write_folder(tmp_path / name, name)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == str(FIGURES[f"{name}_weights"])
    model = pf.load(folder, strict=True)
    assert model.config.architecture == families.FAMILIES[name]["architectures"][0]
    np.testing.assert_allclose(logits(model), FIGURES[name], rtol=0, atol=bound(FIGURES[name]))


@pytest.mark.parametrize("name", families.GGUF)
def test_gguf__is_the_model_of_the_folder(name: str, tmp_path: Path) -> None:
    model = pf.load(families.write_gguf(tmp_path / "m.gguf", name), strict=True)
    assert model.config.architecture == name
    np.testing.assert_allclose(logits(model), FIGURES[name], rtol=0, atol=bound(FIGURES[name]))
    if name != "llama":  # whose rows are permuted
        folder = pf.load(families.write_folder(tmp_path / name, name))
        np.testing.assert_array_equal(logits(model), logits(folder))


WINDOWS: tuple[tuple[str, dict[str, Any], int | None], ...] = (
    ("llama", {"sliding_window": 5}, None),
    ("mistral", {}, 9),
    ("mistral", {"sliding_window": None}, None),
    ("qwen2", {"sliding_window": 5, "max_window_layers": 0}, None),
    ("qwen2", {"use_sliding_window": True}, None),
    ("qwen2_window", {}, 9),
    ("qwen2_window", {"sliding_window": None}, None),
    ("qwen2_window", {"layer_types": ["full_attention"] * 2}, None),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5}, 5),
)


@pytest.mark.parametrize(("name", "config", "window"), WINDOWS)
def test_window__is_what_config_json_says(
    name: str, config: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert pf.load(families.write_folder(tmp_path, name, **config)).config.attention.sliding_window == window


def test_window__of_a_mistral_that_gives_none_is_that_of_transformers(tmp_path: Path) -> None:
    config = {key: x for key, x in families.FAMILIES["mistral"].items() if key != "sliding_window"}
    assert pf.load(tiny.write_tiny(tmp_path, config=config)).config.attention.sliding_window == 4096


def test_head_dim__of_a_qwen3_that_gives_none_is_that_of_transformers(tmp_path: Path) -> None:
    config = {key: x for key, x in families.FAMILIES["qwen3"].items() if key != "head_dim"}
    with pytest.raises(pf.CheckpointError, match=r"q_proj\.weight': expected shape \[512, 64\], got \[128, 64\]"):
        pf.load(tiny.write_tiny(tmp_path, config=config, weights=families.weights("qwen3")))


def norm(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


# Family, config.json, tensors (None takes one away), the error and what it says.
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a bias too few": ("qwen2", {}, {f"{Q}.k_proj.bias": None}, pf.CheckpointError, rf"'{Q}\.k_proj\.bias' is missing"),
    "a bias too many": (
        "qwen2",
        {},
        {f"{Q}.o_proj.bias": norm(64)},
        pf.UnsupportedError,
        rf"'{Q}\.o_proj\.bias': Qwen2ForCausalLM has no such part",
    ),
    "a norm too few": ("qwen3", {}, {f"{Q}.q_norm.weight": None}, pf.CheckpointError, r"q_norm\.weight' is missing"),
    "norms of heads in a Llama": (
        "llama",
        {},
        {f"{Q}.q_norm.weight": norm(16)},
        pf.UnsupportedError,
        rf"'{Q}\.q_norm\.weight': LlamaForCausalLM has no such part",
    ),
    "biases that config.json denies": (
        "llama",
        {"attention_bias": False},
        {},
        pf.UnsupportedError,
        r"q_proj\.bias', .* config\.json: attention_bias is not true",
    ),
    "a bias of tied logits": (
        "qwen2",
        {},
        {"lm_head.bias": norm(tiny.VOCABULARY)},
        pf.UnsupportedError,
        r"'lm_head\.bias': a bias of the logits is not built",
    ),
    "a number beyond floats": (
        "llama",
        {"rms_norm_eps": 10**400},
        {},
        pf.CheckpointError,
        "rms_norm_eps: expected float",
    ),
    "windows in some layers": (
        "qwen2_window",
        {"max_window_layers": 1},
        {},
        pf.UnsupportedError,
        r"layers of different windows are not built, got \['full_attention', 'sliding_attention'\]",
    ),
    "kinds of other layers": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
        {},
        pf.CheckpointError,
        r"layer_types: expected one for each of 2 layers, got 1",
    ),
    "a window of nothing": (
        "mistral",
        {"sliding_window": 0},
        {},
        pf.CheckpointError,
        "sliding_window: expected at least 1 or null, got 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_load__refuses_what_the_family_has_not(case: str, tmp_path: Path) -> None:
    name, config, change, error, message = REFUSED[case]
    given = families.weights(name) | change
    weights = {key: x for key, x in given.items() if x is not None}
    with pytest.raises(error, match=message):
        pf.load(tiny.write_tiny(tmp_path / "bad", weights=weights, config=families.FAMILIES[name] | config))


def test_context__goes_as_far_as_yarn(tmp_path: Path) -> None:
    """Qwen's advice is to add the scaling alone; transformers does not bound the context."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for scaling, longest in ((None, 32), (yarn, 128), (yarn | {"factor": 0.5}, 32)):
        config = {"max_position_embeddings": 32, "rope_scaling": scaling}
        model = pf.load(families.write_folder(tmp_path, "qwen3", **config))
        assert model.config.attention.maximum_context_tokens == longest
    for huge in ({"factor": 1e300}, {"original_max_position_embeddings": 10**400}):
        model = pf.load(families.write_folder(tmp_path, "qwen3", rope_scaling=yarn | huge))
        assert model.config.attention.maximum_context_tokens == 2**22, "what a state has pages for"
    with pytest.raises(pf.CheckpointError, match="maximum_context_tokens"):
        pf.load(families.write_folder(tmp_path, "qwen3", max_position_embeddings=-5, rope_scaling=yarn))
    keys = {"llama.context_length": 32, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    file = pf.load(tiny.write_tiny_gguf(tmp_path / "y.gguf", keys=keys))
    assert file.config.attention.rope_scaling == YarnScaling(4.0, 32), "the original context is that of the file"
    assert file.config.attention.maximum_context_tokens == 128


def test_load__names_the_families(tmp_path: Path) -> None:
    known = r"\['FalconForCausalLM'\] is not built; known: LlamaForCausalLM, MistralForCausalLM, Qwen2.*, Qwen3"
    with pytest.raises(pf.UnsupportedError, match=known):
        pf.load(tiny.write_tiny(tmp_path / "f", config={"architectures": ["FalconForCausalLM"]}))
    with pytest.raises(pf.UnsupportedError, match=r"architecture 'falcon' is not built; known: llama, qwen2, qwen3"):
        pf.load(tiny.write_tiny_gguf(tmp_path / "f.gguf", architecture="falcon"))
