"""Rotary embedding: single tokens in batches, scaled frequencies, permuted rows (CASES.md D), as tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import rope
from tests import tiny


def identity_layer(config: pf.AttentionConfig) -> pf.AttentionWeights:
    """A layer whose keys, before rotation, and values are the normed row itself: kv_features = hidden_size."""
    eye = np.eye(config.hidden_size, dtype=np.float16)
    return pf.AttentionWeights(np.ones(config.hidden_size, np.float32), eye[: config.query_heads * config.head_dim],
                               eye, eye, eye[:, : config.query_heads * config.head_dim])  # fmt: skip


def rotated(key: np.ndarray, position: int, inverse: np.ndarray, *, interleaved: bool = False) -> np.ndarray:
    """`key` [dim] rotated as FACTS A.6 says, in float64; dims behind the pairs stay."""
    pairs = len(inverse)
    first = np.arange(pairs) * 2 if interleaved else np.arange(pairs)
    second = first + (1 if interleaved else pairs)
    out = key.astype(np.float64)
    a, b, cosine, sine = key[first], key[second], np.cos(position * inverse), np.sin(position * inverse)
    out[first], out[second] = a * cosine - b * sine, b * cosine + a * sine
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("form", ["loop", "packed"])
def test_single_tokens__of_a_batch_are_all_rotated(form: str, interleaved: bool) -> None:
    """ml-explore/mlx#3494, #3795, #3949, #3496; oxiglade/mlx-rs#359 (D1): ones [B, 4, 1, 16] at offset 5.

    Every row and head of every sequence is rotated, none left as it was or zero, and equal rows are equal bits.
    """
    config = pf.AttentionConfig(64, 4, 4, 16, rope_interleaved=interleaved)
    weights = identity_layer(config)
    before = np.zeros((5, 4, 16), np.float16)
    expected = rotated(np.ones(16), 5, 10000.0 ** (-np.arange(8) / 8), interleaved=interleaved)
    for batch in (1, 2, 8):
        states = [pf.init_state(config).append(before, before) for _ in range(batch)]
        x = np.ones((batch, 64), np.float32)
        rows = pf.Ragged(x, [1] * batch) if form == "packed" else [row[None] for row in x]
        new, ys = pf.causal_attention(states, rows, weights)
        assert len({np.asarray(y).tobytes() for y in ys}) == 1
        for state in new:
            keys = np.asarray(state.keys(5))
            assert keys.shape == (1, 4, 16)
            assert len({head.tobytes() for head in keys[0]}) == 1
            np.testing.assert_allclose(keys[0, 0], expected, rtol=2.0**-10, atol=1e-6)
            np.testing.assert_allclose(state.values(5), 1, rtol=2.0**-10)


# FACTS I.3…I.5: (theta, dims, scaling), and inverse frequencies by index, to the digits given there.
TABLES: dict[str, tuple[float, int, rope.Scaling | None, dict[int, float]]] = {
    "llama3": (
        5e5,
        128,
        rope.Llama3Scaling(8.0, 1.0, 4.0, 8192),
        dict(
            zip(
                range(28, 36),
                (3.21145e-3, 2.16657e-3, 1.37189e-3, 8.56751e-4, 5.24846e-4, 3.12694e-4, 1.78508e-4, 9.55621e-5),
                strict=True,
            )
        ),
    ),
    "yarn": (
        1e6,
        128,
        rope.YarnScaling(4.0, 32768),
        {22: 8.65964e-3, 23: 6.97831e-3, 30: 1.06436e-3, 40: 4.4457e-5, 63: 3.10234e-7},
    ),
    "partial": (1e7, 64, None, {0: 1.0, 1: 0.604296, 2: 0.365174, 31: 1.65482e-7}),
    "drafter": (1e7, 128, None, {1: 0.777365, 63: 1.2864e-7}),
}


@pytest.mark.parametrize("name", TABLES)
def test_frequencies__are_the_fact_sheets(name: str) -> None:
    """ggml-org/llama.cpp#8676, #8650; lablup/mlxcel#1355; sbryngelson/ANEForge#58 (D3): FACTS I.3, I.4, I.5."""
    theta, dims, scaling, points = TABLES[name]
    inverse = rope.inverse_frequencies(theta, dims, scaling)
    assert inverse.shape == (dims // 2,)
    for index, value in points.items():
        assert inverse[index] == pytest.approx(value, rel=6e-6)
    plain = theta ** (-np.arange(0, dims, 2) / dims)
    if name == "llama3":
        np.testing.assert_allclose(inverse[:29], plain[:29], rtol=1e-14)
        np.testing.assert_allclose(inverse[35:], plain[35:] / 8, rtol=1e-14)
        divisors = [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573]
        np.testing.assert_allclose(plain[29:35] / inverse[29:35], divisors, rtol=5e-5)
        divided = rope.FrequencyFactors(tuple(plain / inverse))  # how a GGUF file says the same
        np.testing.assert_allclose(rope.inverse_frequencies(theta, dims, divided), inverse, rtol=1e-14)
    factor = {"yarn": 1.138629}.get(name, 1.0)
    assert rope.attention_factor(scaling) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies__reach_the_stored_keys(name: str, interleaved: bool) -> None:
    """lablup/mlxcel#1355 (D3): scaling that is parsed but not applied. Keys at position 5,000 turn as in the table."""
    theta, dims, scaling, points = TABLES[name]
    config = pf.AttentionConfig(128, 1, 1, 128, rope_dim=dims, maximum_context_tokens=8192, rope_theta=theta,
                                rope_scaling=scaling, rope_interleaved=interleaved)  # fmt: skip
    before = np.zeros((5000, 1, 128), np.float16)
    state, _ = pf.causal_attention(
        pf.init_state(config).append(before, before), np.ones((1, 128), np.float32), identity_layer(config)
    )
    key = np.asarray(state.keys(5000))[0, 0].astype(np.float64)
    factor = {"yarn": 1.138629}.get(name, 1.0)
    for index, frequency in points.items():
        first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + dims // 2)
        angle = 5000 * frequency
        expected = factor * np.array([np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)])
        # The table's six digits leave the angle uncertain by this much.
        np.testing.assert_allclose(key[[first, second]], expected, rtol=0, atol=2e-3 + 1.5 * 6e-6 * angle)
    np.testing.assert_allclose(key[dims:], 1, rtol=2.0**-10)


def hf(rope_settings: dict[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": 4096, **rope_settings}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SPELLINGS: dict[str, tuple[dict[str, Any], float, rope.Scaling | None]] = {
    "none": ({"rope_scaling": None}, 1e4, None),
    "rope_type": ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, rope.Llama3Scaling(8.0, 1.0, 4.0, 512)),
    "type": ({"rope_scaling": {"type": "llama3", **LLAMA3}}, 1e4, rope.Llama3Scaling(8.0, 1.0, 4.0, 512)),
    "parameters": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        5e5,
        rope.Llama3Scaling(8.0, 1.0, 4.0, 512),
    ),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, rope.LinearScaling(2.0)),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        1e4,
        rope.YarnScaling(4.0, 1024),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scaling__is_read_in_every_spelling_and_used(spelling: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8676; sbryngelson/ANEForge#58 (D3): `rope_type`, `type` or transformers 5's `rope_parameters`.

    The keys of a loaded model are those of the scaling asked for, not those of the plain table.
    """
    settings, theta, scaling = SPELLINGS[spelling]
    model = pf.load(tiny.write_tiny(tmp_path / "scaled", config=hf(settings)))
    attention = model.config.attention
    assert (attention.rope_theta, attention.rope_scaling) == (theta, scaling)
    plain = pf.load(tiny.write_tiny(tmp_path / "plain", config={"max_position_embeddings": 4096}))
    tokens = np.arange(300) % tiny.VOCABULARY
    states = [m.forward(m.init_state(), tokens)[0].layers[0] for m in (model, plain)]
    same = np.array_equal(*(np.asarray(state.keys()) for state in states))
    assert same == (spelling == "none")


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "mrope", "su"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_scaling__of_an_unknown_kind_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8650 (D3): a rope_type that nobody here applies is an error that names it, not a default."""
    folder = tiny.write_tiny(tmp_path, config={"rope_scaling": {name: kind, "factor": 2.0}})
    with pytest.raises((pf.UnsupportedError, pf.CheckpointError), match=rf"config\.json: rope_type '{kind}'"):
        pf.load(folder)


YARN = {"type": "yarn", "factor": 4.0}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"llama3 without {key}": ({"rope_scaling": {"type": "llama3", **LLAMA3, key: None}}, {}) for key in LLAMA3},
    "a factor without a type": ({"rope_scaling": {"factor": 8.0}}, {}),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {}),
    "partial rotation, new place": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}),
    "mscale": ({"rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}}, {"rope_scaling": YARN}),
    "yarn without truncation": ({"rope_scaling": YARN | {"truncate": False}}, {"rope_scaling": YARN}),
    "truncation that is no bool": ({"rope_scaling": YARN | {"truncate": "no"}}, {"rope_scaling": YARN}),
    "both places": ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, {}),
    "both places, another": (
        {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": YARN},
    ),
    "kinds of layers": ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, {}),
    "text": ({"rope_scaling": {"type": "linear", "factor": "two"}}, {}),
    "a list": ({"rope_scaling": [1, 2]}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_scaling__is_applied_or_refused_but_never_ignored(name: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8650; lablup/mlxcel#1355 (D3, the kind): what a file says of rotation changes it, or stops."""
    given, without = SETTINGS[name]
    plain = pf.load(tiny.write_tiny(tmp_path / "without", config=without)).config.attention
    try:
        attention = pf.load(tiny.write_tiny(tmp_path / "with", config=given)).config.attention
    except (pf.CheckpointError, pf.UnsupportedError) as error:
        assert "config.json" in str(error)
        return
    assert attention != plain, "the setting is quietly ignored"


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{f"theta {x!r}": ({"rope_theta": x}, "rope_theta: expected a") for x in ("x", [1], [], {}, True, 0, -1.0, NAN)},
    **{
        f"{kind} factor {x}": ({"rope_scaling": {**LLAMA3, "type": kind, "factor": x}}, "factor: expected a positive")
        for kind in ("linear", "llama3", "yarn")
        for x in (0, -2.0, NAN, INF)
    },
    **{
        f"yarn {key} {x!r}": ({"rope_scaling": YARN | {key: x}}, f"rope scaling .*{message}")
        for key, x, message in (
            ("beta_fast", -1.0, "beta_fast: expected a positive number, got -1.0"),
            ("beta_slow", 0, "beta_slow: expected a positive number, got 0.0"),
            ("beta_slow", 33, "beta_slow: expected at most beta_fast=32.0, got 33.0"),
            ("attention_factor", "x", "could not convert"),
            ("attention_factor", [], "float"),
            ("attention_factor", 0, "attention_factor: expected a positive number, got 0.0"),
            ("original_max_position_embeddings", INF, "infinity"),
            ("original_max_position_embeddings", -1, "original_context: expected a positive number, got -1"),
        )
    },
    "yarn over theta 1": ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta: expected above 1 for YaRN, got 1.0"),
    "llama3 swapped": (
        {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "high_freq_factor: expected above low_freq_factor=4.0, got 1.0",
    ),
    "llama3 without a key": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_scaling__of_wrong_numbers_names_file_and_key(name: str, tmp_path: Path) -> None:
    """lablup/mlxcel#1355 (D3, the kind): what no rotation can be made from is the file's fault, and said so."""
    settings, message = WRONG[name]
    with pytest.raises(pf.CheckpointError, match=message) as caught:
        pf.load(tiny.write_tiny(tmp_path / "wrong", config=settings))
    assert str(tmp_path / "wrong") in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rope.LinearScaling(0.0), r"\[LinearScaling\] factor: expected a positive number, got 0.0"),
        (lambda: rope.YarnScaling(NAN, 4096), r"\[YarnScaling\] factor: expected a positive number, got nan"),
        (lambda: rope.YarnScaling(4.0, 0), r"\[YarnScaling\] original_context: expected a positive number, got 0"),
        (lambda: rope.YarnScaling(4.0, 4096, beta_fast=-1.0), r"\[YarnScaling\] beta_fast: expected a positive"),
        (lambda: rope.YarnScaling(4.0, 4096, attention_factor=NAN), r"\[YarnScaling\] attention_factor: expected"),
        (lambda: rope.Llama3Scaling(8.0, 4.0, 1.0), r"\[Llama3Scaling\] high_freq_factor: expected above low_freq_"),
        (lambda: rope.FrequencyFactors((1.0, 0.0)), r"\[FrequencyFactors\] divisors\[1\]: expected a positive"),
        (lambda: rope.inverse_frequencies(1.0, 64, rope.YarnScaling(4.0, 4096)), "rope_theta: expected above 1"),
    ],
)
def test_scaling__refuses_wrong_numbers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(pf.InvalidArgument, match=message):
        make()


def test_yarn__without_truncation_ramps_between_pairs() -> None:
    """transformers' `truncate: false`: the ramp of FACTS F.2 between the fractional pairs, not the whole ones."""
    inverse = rope.inverse_frequencies(1e6, 128, rope.YarnScaling(4.0, 32768, truncate=False))
    plain = 1e6 ** (-np.arange(0, 128, 2) / 128)
    low, high = (128 * np.log(32768 / (2 * np.pi * beta)) / (2 * np.log(1e6)) for beta in (32, 1))
    ramp = np.clip((np.arange(64) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(inverse, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-12)
    assert rope.attention_factor(rope.YarnScaling(0.5, 32768)) == 1


@pytest.mark.parametrize("theta", [0.0, -1.0, float("nan"), float("inf")])
def test_theta__without_frequencies_is_refused(theta: float) -> None:
    with pytest.raises(pf.InvalidArgument, match=r"rope_theta"):
        pf.init_state(pf.AttentionConfig(32, 2, 1, 16, rope_theta=theta))


@pytest.mark.parametrize(
    "key",
    [
        "yarn_beta_fast",
        "yarn_beta_slow",
        "attn_factor",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_log_multiplier",
        "factor",
    ],
)
def test_scaling__of_a_gguf_file_is_applied_or_refused_but_never_ignored(key: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8676 (D3, the kind): every YaRN number that GGUF has (FACTS F.3)."""
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 512}
    keys = {f"llama.rope.scaling.{name}": value for name, value in keys.items()}
    plain = pf.load(tiny.write_tiny_gguf(tmp_path / "plain.gguf", keys=keys)).config.attention
    assert plain.rope_scaling == rope.YarnScaling(4.0, 512)
    path = tiny.write_tiny_gguf(tmp_path / "other.gguf", keys=keys | {f"llama.rope.scaling.{key}": 3.0})
    try:
        attention = pf.load(path).config.attention
    except (pf.CheckpointError, pf.UnsupportedError) as error:
        assert key in str(error)
        return
    assert attention != plain, f"{key} is quietly ignored"


GGUF_SCALINGS: dict[str, tuple[dict[str, Any], rope.Scaling | str | None]] = {
    "a factor alone": ({"scaling.factor": 4.0}, rope.LinearScaling(4.0)),
    "the old key": ({"scale_linear": 4.0}, rope.LinearScaling(4.0)),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, None),
    "a factor of 0": ({"scaling.factor": 0.0}, None),
    "linear without a factor": ({"scaling.type": "linear"}, "llama.rope.scaling.factor"),
    "linear and attn_factor": ({"scaling.factor": 4.0, "scaling.attn_factor": 2.0}, "attn_factor is not built"),
    "a negative factor": ({"scaling.factor": -4.0}, "factor: expected a positive number, got -4.0"),
    "yarn by nothing": (
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 0},
        "original_context: expected a positive number, got 0",
    ),
    "longrope": ({"scaling.type": "longrope", "scaling.factor": 4.0}, "scaling.type 'longrope'"),
}


@pytest.mark.parametrize("name", GGUF_SCALINGS)
def test_scaling__of_a_gguf_file_is_what_llama_cpp_makes_of_it(name: str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8676 (D3, the kind): a factor without a type is linear scaling, as `rope.scale_linear` is."""
    settings, expected = GGUF_SCALINGS[name]
    path = tiny.write_tiny_gguf(tmp_path / "f.gguf", keys={f"llama.rope.{key}": x for key, x in settings.items()})
    if isinstance(expected, str):
        with pytest.raises((pf.CheckpointError, pf.UnsupportedError), match=rf"f\.gguf.*{expected}"):
            pf.load(path)
    else:
        assert pf.load(path).config.attention.rope_scaling == expected


def test_permuted_rows__give_the_model_they_came_from(tmp_path: Path) -> None:
    """vllm-project/vllm-metal#480; huggingface/transformers#31766; mattn/tensai#37; intel/auto-round#608 (D4).

    A llama-arch GGUF file has its q and k rows permuted, k by its own number of heads. Same keys (in another order of
    dims), same values, same logits as the safetensors they were made from; unpermuted rows would not give them.
    """
    rows = np.arange(8.0)[:, None]
    assert tiny.permute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    weights = tiny.tensors()
    models = [
        pf.load(tiny.write_tiny(tmp_path / "hf", weights=weights), strict=True),
        pf.load(tiny.write_tiny_gguf(tmp_path / "a.gguf", weights=weights), strict=True),
        pf.load(tiny.write_tiny_gguf(tmp_path / "b.gguf", weights=weights, permuted=False), strict=True),
    ]
    tokens = tiny.ids("Permuted rows load fine", bos=True)
    (hf_state, hf_logits), (state, logits), (_, wrong) = (m.forward(m.init_state(), tokens) for m in models)
    order = tiny.permute(np.arange(tiny.HEAD_DIM)[:, None], 1)[:, 0]
    ours, theirs = state.layers[0], hf_state.layers[0]
    np.testing.assert_allclose(ours.keys(), np.asarray(theirs.keys())[..., order], rtol=2.0**-10, atol=2.0**-12)
    np.testing.assert_array_equal(ours.values(), theirs.values())
    bound = 2.0**-8 * np.abs(np.asarray(hf_logits)).max()
    np.testing.assert_allclose(logits, hf_logits, rtol=0, atol=bound)
    assert np.abs(np.asarray(wrong) - np.asarray(hf_logits)).max() > 20 * bound


def test_permuted_rows__frequency_factors_of_a_gguf_file_are_used(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#8676 (D3), vllm-project/vllm#7268 (D5): `rope_freqs.weight` is Llama 3.1's scaling in GGUF."""
    factors = np.linspace(1, 8, tiny.HEAD_DIM // 2).astype(np.float32)
    weights = {"rope_freqs.weight": factors, **tiny.tensors()}
    model = pf.load(tiny.write_tiny_gguf(tmp_path / "f.gguf", weights=weights), strict=True)
    expected = 1e4 ** (-np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM) / factors
    np.testing.assert_allclose(model.config.attention.inverse_frequencies(), expected, rtol=1e-12)
    with pytest.raises(pf.CheckpointError, match=r"frequency factors"):
        pf.load(tiny.write_tiny_gguf(tmp_path / "s.gguf", weights=weights | {"rope_freqs.weight": factors[:3]}))
    with pytest.raises(pf.CheckpointError, match=r"'rope_freqs\.weight': expected a list of numbers.*\[1, 8\]"):
        pf.load(tiny.write_tiny_gguf(tmp_path / "t.gguf", weights=weights | {"rope_freqs.weight": factors[None]}))
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    both = pf.load(tiny.write_tiny_gguf(tmp_path / "u.gguf", weights=weights, keys=keys)).config.attention
    np.testing.assert_allclose(both.inverse_frequencies(), expected / 4, rtol=1e-12)
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 512}
    with pytest.raises(pf.UnsupportedError, match=r"'yarn' beside rope_freqs\.weight"):
        pf.load(tiny.write_tiny_gguf(tmp_path / "v.gguf", weights=weights, keys=keys))
