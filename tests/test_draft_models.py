"""Draft models: what their files hold, and their forward pass against the reference."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from pyferrum.models import dflash, dflash_files, llama
from tests import tiny
from tests.drafts import PUBLISHED, drafter_for, parsed, random_tensors, settings, write_draft, write_draft_gguf


def features(count: int, seed: int = 0, width: int = 2 * tiny.HIDDEN) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


# ---- Files


def test_published_27b__tensors_and_parameters() -> None:
    config = parsed(PUBLISHED)
    shapes = dflash_files.tensor_shapes(config)
    assert (len(shapes), sum(math.prod(s) for s in shapes.values())) == (81, 1_924_404_480)
    first = dflash_files.tensor_shapes(dflash.without_second(config))
    assert (len(first), sum(math.prod(s) for s in first.values())) == (58, 1_730_213_120)
    assert shapes["layers.0.attention_conv.kernel_projection.weight"] == (1280, 5120)
    assert config.windows == (2048,) * 5 and config.causal == (False,) * 5
    assert (config.block_size, config.target_layers, config.mask_token) == (8, (5, 19, 33, 47, 61), 248070)


def test_config__both_spellings_and_no_silent_default() -> None:
    nested = settings(64, second=True)
    flat = nested | nested["dflash_config"] | {"dflash_config": {}}
    assert parsed(nested) == parsed(flat)
    assert parsed(nested | {"block_size": 16}).block_size == 8  # what is nested comes first
    for key in ("block_size", "mask_token_id", "target_layer_ids", "selector_top_k", "conv_kernel_size"):
        lacking = flat | {key: None}
        with pytest.raises(pf.CheckpointError, match=f"{key}: expected"):
            parsed(lacking)
    with pytest.raises(pf.CheckpointError, match="sliding_window: missing"):
        parsed(nested | {"sliding_window": None})
    with pytest.raises(pf.CheckpointError, match=r"target layers: expected ascending layers 0…1"):
        parsed(
            nested
            | {"num_target_layers": 2}
            | {"dflash_config": nested["dflash_config"] | {"target_layer_ids": [0, 2]}}
        )
    with pytest.raises(pf.UnsupportedError, match="attention_sink_bias"):
        parsed(nested | {"attention_sink_bias": True})
    with pytest.raises(pf.UnsupportedError, match="architecture 'LlamaForCausalLM'"):
        parsed(nested | {"architectures": ["LlamaForCausalLM"]})


def test_config__causality_is_resolved_in_order() -> None:
    base = settings(64, second=False, windows=(24, None))
    inner = base["dflash_config"]
    for change, expected in (
        ({"is_causal": True}, (True, True)),
        ({"is_causal": None, "dflash_config": inner | {"causal": False}}, (False, False)),
        ({"is_causal": False, "dflash_config": inner | {"causal": True}}, (False, False)),
        ({"is_causal": None}, (True, False)),
    ):
        assert parsed(base | change).causal == expected


def test_load__is_strict(target: pf.Model, tmp_path: Path) -> None:
    config = settings(tiny.HIDDEN, second=True)
    weights = random_tensors(parsed(config, target))
    lacking = {name: w for name, w in weights.items() if name != "layers.1.mlp_conv.base_kernel"}
    with pytest.raises(pf.CheckpointError, match=r"/a: tensor 'layers.1.mlp_conv.base_kernel' is missing"):
        pf.load_draft(write_draft(tmp_path / "a", target, config=config, weights=lacking), target)
    more = weights | {"enc.aux_norm.weight": weights["norm.weight"]}
    with pytest.raises(pf.CheckpointError, match=r"/b: 1 tensors of the file are not used: 'enc.aux_norm.weight'"):
        pf.load_draft(write_draft(tmp_path / "b", target, config=config, weights=more), target)
    first = config | {"architectures": ["DFlashDraftModel"]}
    with pytest.raises(pf.CheckpointError, match=r"11 tensors of the file are not used"):
        pf.load_draft(write_draft(tmp_path / "c", target, config=first, weights=weights), target)
    beyond = settings(tiny.HIDDEN, second=False, target_layer_ids=[1, 2])
    with pytest.raises(pf.CheckpointError, match=r"target layers: expected ascending layers 0…1 .* got \[1, 2\]"):
        pf.load_draft(write_draft(tmp_path / "d", target, config=beyond), target)
    with pytest.raises(pf.CheckpointError, match="no such file"):
        pf.load_draft(tmp_path / "none", target)
    for i, (options, message) in enumerate((
        ({"selector_top_k": 0}, "selector_top_k: expected 1…64, got 0"),
        ({"selector_top_k": 65}, "selector_top_k: expected 1…64, got 65"),
        ({"conv_kernel_size": 9}, "conv_kernel_size: expected 0…8, got 9"),
    )):  # fmt: skip
        made = settings(tiny.HIDDEN, second=True, **options)
        with pytest.raises(pf.CheckpointError, match=message):
            pf.load_draft(write_draft(tmp_path / f"limits{i}", target, config=made), target)
    quantised = config | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(pf.UnsupportedError, match="quantization_config: quant_method 'fp8' is not built"):
        pf.load_draft(write_draft(tmp_path / "q", target, config=quantised, weights=weights), target)
    scaled = weights | {"layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)}
    with pytest.raises(pf.UnsupportedError, match=r"parts of weights .*'layers\.0\.mlp\.up_proj\.weight_scale'"):
        pf.load_draft(write_draft(tmp_path / "s", target, config=config, weights=scaled), target)
    bytes_ = weights | {"fc.weight": weights["fc.weight"].astype(np.int8)}
    with pytest.raises(pf.UnsupportedError, match=r"'fc\.weight': weights of dtype I8"):
        pf.load_draft(write_draft(tmp_path / "i", target, config=config, weights=bytes_), target)
    for layers, message in ((10**9, "expected 1…1024 layers"), (0, "expected 1…1024 layers, got 0")):
        with pytest.raises(pf.CheckpointError, match=f"num_hidden_layers: {message}"):
            parsed(config | {"num_hidden_layers": layers})
    wide = settings(128, second=False)
    with pytest.raises(pf.CheckpointError, match="hidden_size: expected 64, the target's, got 128"):
        pf.load_draft(write_draft(tmp_path / "e", target, config=wide), target)


def test_load__every_spelling_gives_the_same_model(target: pf.Model, tmp_path: Path) -> None:
    config = settings(tiny.HIDDEN, second=True, windows=(24, None))
    weights = random_tensors(parsed(config, target))
    prefixed = {"model." + name + (".weight" if "codebook" in name else ""): w for name, w in weights.items()}
    models = [
        pf.load_draft(write_draft(tmp_path / "a", target, config=config, weights=weights), target),
        pf.load_draft(write_draft(tmp_path / "b", target, config=config, weights=prefixed), target),
        pf.load_draft(write_draft_gguf(tmp_path / "c.gguf", parsed(config, target), weights), target),
        pf.load_draft(
            write_draft_gguf(tmp_path / "d.gguf", parsed(config, target), weights, target_layers=[0, 1]), target
        ),
    ]
    results = []
    for model in models:
        assert model.taps == (0, 1)
        state = model.extend(model.init_state(1), [[0] * 30], [features(30)])
        results.append(model.propose(state, [5], [8], 0.0, [pf.random.key(0)])[0].tokens)
    assert results == [results[0]] * 4
    overridden = pf.load_draft(tmp_path / "a", target, target_layers=[0, 1])
    assert overridden.taps == (0, 1)


def test_load__logs_every_resolved_setting_once(
    target: pf.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="pyferrum"):
        model = drafter_for(target, tmp_path, True)
    [line] = [record.getMessage() for record in caplog.records if "draft model" in record.getMessage()]
    for field in fields(model.config):
        assert f"{field.name}={getattr(model.config, field.name)!r}" in line


# ---- Taps


def test_taps__are_the_residual_stream_behind_their_layers(target: pf.Model) -> None:
    tokens = np.array(tiny.ids("What is tapped"), np.int32)
    taps: dict[int, Any] = {0: None, 1: None}
    _, logits = target.forward(target.init_state(), tokens, taps=taps)
    np.testing.assert_array_equal(logits, target.forward(target.init_state(), tokens)[1])
    x = pf.embed(tokens, target.params.embedding)
    for index, layer in enumerate(target.params.layers):
        _, x = pf.causal_attention(pf.init_state(target.config.attention), x, layer.attention)
        x = llama.mlp(x, layer, epsilon=target.config.attention.epsilon)
        np.testing.assert_array_equal(taps[index], x)
    batched: dict[int, Any] = {1: None}
    target.forward([target.init_state()] * 2, [tokens[:3], tokens], taps=batched)
    np.testing.assert_array_equal(batched[1][0], np.asarray(x)[:3])
    np.testing.assert_array_equal(batched[1][1], x)
    with pytest.raises(pf.InvalidArgument, match="taps: expected layers 0…1, got 2"):
        target.forward(target.init_state(), tokens, taps={2: None})


# ---- The forward pass


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("windows", [(24, 24), (None, None), (24, None)])
def test_forward__agrees_with_the_reference(
    target: pf.Model, tmp_path: Path, second: bool, windows: tuple[int | None, ...]
) -> None:
    """Contexts from nothing to beyond two windows and past where a full layer's ring doubles, two lanes apart."""
    model = drafter_for(target, tmp_path, second, windows=windows)
    config, params = model.config, model.params
    ours, theirs = model.init_state(2), dflash.init_draft_state(config, 2, ops=reference)
    rng = np.random.default_rng(0)
    for step, count in enumerate((0, 1, 5, 20, 17, 300, 3)):
        rows = (2, 8, 16, 5)[step % 4]
        new = [features(count, step), features(count // 2, step + 100)]
        ours = dflash.extend(params, config, ours, new)
        theirs = dflash.extend(params, config, theirs, new, ops=reference)
        x = rng.standard_normal((2 * rows, tiny.HIDDEN)).astype(np.float32)
        hidden = np.asarray(dflash.forward(params, config, ours, x, rows), np.float64)
        expected = dflash.forward(params, config, theirs, x, rows, ops=reference)
        np.testing.assert_allclose(hidden, expected, atol=1.5e-2 * np.abs(expected).max())
        assert np.abs(hidden - expected).mean() < 2e-3 * np.abs(expected).mean()


def test_forward__scales_of_embeddings_and_logits_are_applied(target: pf.Model, tmp_path: Path) -> None:
    """FACTS D.3, D.8: `input_embedding_scale`, `output_multiplier`, and then `final_logit_softcapping`."""
    plain = drafter_for(target, tmp_path / "plain", True)
    logits = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    model = drafter_for(target, tmp_path / "scaled", True, input_embedding_scale=2.0, **logits)
    state = model.extend(model.init_state(1), [[0] * 9], [features(9)])
    ids = [5, *[model.config.mask_token] * 4]
    x = 2 * np.asarray(pf.embed(ids, target.params.embedding))
    x[1:] = x[1:].astype(pf.bfloat16)  # the mask's row is kept so
    hidden = np.asarray(dflash.forward(plain.params, plain.config, state, x, 5))[1:]
    ours, scores = model.scores(state, [5], 5)
    np.testing.assert_array_equal(ours, hidden)
    assert np.abs(hidden - plain.scores(state, [5], 5)[0]).max() > 0.01
    scaled = 0.5 * np.asarray(pf.linear(hidden, target.params.output, dtype=np.float32))
    np.testing.assert_allclose(scores, 3 * np.tanh(scaled / 3), rtol=1e-5, atol=1e-6)
    half = drafter_for(target, tmp_path / "half", True, input_embedding_scale=2.0, output_multiplier=0.5)
    np.testing.assert_array_equal(half.scores(state, [5], 5)[1], scaled)
    config, weights = parsed(settings(tiny.HIDDEN, second=True), target), random_tensors(plain.config)
    keys = {"logit_scale": 0.5, "final_logit_softcapping": 3.0}
    file = pf.load_draft(write_draft_gguf(tmp_path / "d.gguf", config, weights, keys=keys), target)
    assert (file.config.logit_scale, file.config.softcap) == (0.5, 3.0)


def test_forward__causal_layers_see_no_later_row(target: pf.Model, tmp_path: Path) -> None:
    config = settings(tiny.HIDDEN, second=False) | {"is_causal": True}
    model = pf.load_draft(write_draft(tmp_path, target, config=config), target)
    state = model.extend(model.init_state(1), [[0] * 9], [features(9)])
    x = np.random.default_rng(0).standard_normal((8, tiny.HIDDEN)).astype(np.float32)
    whole = np.asarray(dflash.forward(model.params, model.config, state, x, 8))
    # Close, not equal: the order in which columns are summed follows their places in the packed arrays.
    short = dflash.forward(model.params, model.config, state, x[:5], 5)
    np.testing.assert_allclose(short, whole[:5], atol=4e-3)
    free = pf.load_draft(write_draft(tmp_path / "free", target, config=config | {"is_causal": False}), target)
    assert np.abs(np.asarray(dflash.forward(free.params, free.config, state, x, 8))[:5] - whole[:5]).max() > 0.1


def test_second__with_identity_convolution_and_a_zero_codebook_is_the_first(target: pf.Model, tmp_path: Path) -> None:
    config = settings(tiny.HIDDEN, second=True)
    weights = random_tensors(parsed(config, target))
    for name, weight in weights.items():
        if "base_kernel" in name:
            weight[:, 0], weight[:, 1:] = 1, 0
        elif "kernel_projection" in name or "successor" in name:
            weight[:] = 0
    second = pf.load_draft(write_draft(tmp_path / "2", target, config=config, weights=weights), target)
    kept = {name: w for name, w in weights.items() if "conv" not in name and "selector" not in name}
    plain = config | {"architectures": ["DFlashDraftModel"]}
    first = pf.load_draft(write_draft(tmp_path / "1", target, config=plain, weights=kept), target)
    context = [features(60), features(11)]
    tokens = [[0] * 60, [0] * 11]
    proposals = []
    for model in (first, second):
        state = model.extend(model.init_state(2), tokens, context)
        np.testing.assert_array_equal(model.scores(state, [7, 8], 8)[1], first.scores(state, [7, 8], 8)[1])
        proposals.append([p.tokens for p in model.propose(state, [7, 8], [8, 8], 0.0, [pf.random.key(0)] * 2)])
    assert proposals[0] == proposals[1]


@pytest.mark.parametrize("windows", [(24, 24), (24, None)])
def test_context__in_pieces_is_the_context_at_once(
    target: pf.Model, tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    """Also what proposals between the pieces leave behind: nothing. A block's keys are never kept (z-lab/dflash#15)."""
    model = drafter_for(target, tmp_path, True, windows=windows)
    f = features(90)
    once = model.extend(model.init_state(1), [[0] * 90], [f])
    pieces = model.init_state(1)
    for start, stop in ((0, 1), (1, 20), (20, 83), (83, 90)):
        pieces = model.extend(pieces, [[0] * (stop - start)], [f[start:stop]])
        model.propose(pieces, [5], [8], 0.0, [pf.random.key(0)])
    assert once.lengths == pieces.lengths == (90,)
    a, b = (np.asarray(model.scores(state, [5], 8)[1]) for state in (once, pieces))
    np.testing.assert_array_equal(a, b)
    # Lanes beside it change no bit.
    both = model.extend(model.init_state(2), [[0] * 40, [0] * 90], [features(40, 1), f])
    np.testing.assert_array_equal(np.asarray(model.scores(both, [9, 5], 8)[1])[7:], a)
