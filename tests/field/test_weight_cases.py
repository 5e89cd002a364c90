"""Weights: output widths that are no multiple of a tile, and activations beyond float16 (CASES.md C), as tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from pyferrum.models import llama
from tests import tiny
from tests.cases.weights import ALL_FORMATS, largest_error, random_weight

IN = 1024


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_output_widths__every_column_of_every_width_is_right(format: str, no_leaks: None) -> None:
    """ml-explore/mlx#4250, #665, #4201 (C1): N rows of weight that fill no tile give no zeros, garbage or NaN.

    K 1024, N in {1, 4, 31, 32, 33, 96}, M in {1, 2, 8}: x times the dequantised weight, every N and M alike bit for
    bit, and nothing outside the matrix read: the rows behind it are NaN.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, IN)).astype(np.float16)
    whole = random_weight(rng, format, (96, IN))
    expected, bound = x.astype(np.float64) @ reference.ops.wide(whole).T, largest_error(x, whole)
    full = np.asarray(pf.linear(x, whole, dtype=np.float32))
    row = whole.nbytes // 96
    content = whole._bytes().copy()
    for n in (1, 4, 31, 32, 33, 96):
        padded = np.concatenate([content[: n * row], np.full(64 * row, 0xFF, np.uint8)])  # all ones: NaN everywhere
        if isinstance(whole, pf.BlockArray):
            weight = pf.BlockArray(whole.device, pf.array(padded.view(np.float16)).buffer, (n, IN), format)
        else:
            weight = pf.array(padded.view(whole.dtype).reshape(-1, IN))[:n]
        for m in (1, 2, 8):
            y = np.asarray(pf.linear(x[:m], weight, dtype=np.float32))
            assert y.shape == (m, n)
            assert (np.abs(y - expected[:m, :n]) <= bound[:m, :n]).all()
            np.testing.assert_array_equal(y, full[:m, :n])


def test_large_activations__stay_finite_in_a_float32_stream() -> None:
    """bstnxbt/dflash-mlx#60 (C6): hidden values around 1e5 do not fit float16; a float32 stream carries them."""
    weights = tiny.layer()
    x = tiny.rows(6) * np.float32(1e5)
    assert np.abs(x).max() > np.finfo(np.float16).max
    expected_state, expected = reference.causal_attention(reference.init_state(tiny.LAYER), x, weights)
    state, y = pf.causal_attention(pf.init_state(tiny.LAYER), x, weights)
    assert np.isfinite(np.asarray(y)).all()
    branch = np.abs(expected - x).max()
    np.testing.assert_allclose(y, expected, rtol=2.0**-23, atol=2.0**-8 * branch)
    np.testing.assert_allclose(state.keys(), expected_state.keys, rtol=2.0**-9, atol=2.0**-9)
    norm = np.ones(32, np.float32)
    np.testing.assert_allclose(pf.rms_norm(x, norm), reference.rms_norm(x, norm), rtol=2.0**-10)


def test_large_activations__are_infinite_not_wrong_in_a_float16_stream() -> None:
    """bstnxbt/dflash-mlx#60 (C6): float16 is only ever the caller's choice, and past its range a sum is infinity."""
    x, branch = np.full((1, 8), 60000, np.float16), np.full((1, 8), 60000, np.float16)
    assert np.isposinf(np.asarray(pf.residual_add(x, branch))).all()
    assert np.asarray(pf.residual_add(x.astype(np.float32), branch)).tolist() == [[120000.0] * 8]
    ones = np.ones((8, 8), np.float32)
    assert np.isposinf(np.asarray(pf.linear(x, ones))).all()
    np.testing.assert_allclose(pf.linear(x, ones, dtype=np.float32), 480000, rtol=1e-6)


def test_large_activations__a_model_with_them_is_scored_like_one_without(tmp_path: Path) -> None:
    """bstnxbt/dflash-mlx#60 (C6): a checkpoint whose residual stream leaves float16's range has a float32 one.

    Its logits are those of the model with a stream 16,384 times smaller: norms take the scale out again.
    """
    small = tiny.tensors(dtype=np.float32)
    scaled = ("embed_tokens", "o_proj", "down_proj")
    large = {n: w * np.float32(16384) if any(part in n for part in scaled) else w for n, w in small.items()}
    tokens = tiny.ids("A spring tide", bos=True)
    logits, peak = [], np.float32(0)
    for name, weights in (("small", small), ("large", large)):
        model = pf.load(tiny.write_tiny(tmp_path / name, weights=weights, config={"rms_norm_eps": 1e-12}))
        assert model.dtype == np.float32
        logits.append(np.asarray(model.forward(model.init_state(), tokens)[1]))
        x = pf.embed(tokens, model.params.embedding)
        for layer in model.params.layers:
            _, x = pf.causal_attention(pf.init_state(model.config.attention), x, layer.attention)
            x = llama.mlp(x, layer, epsilon=1e-12)
            peak = np.abs(np.asarray(x)).max()
    assert peak > np.finfo(np.float16).max
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2.0**-7 * np.abs(logits[0]).max())
