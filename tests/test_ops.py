"""The operations beside attention and linear, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from tests.cases.ops import SHAPES, TOP_K_WIDTHS, VOCABULARIES

shapes = pytest.mark.parametrize("shape", SHAPES)
streams = pytest.mark.parametrize("dtype", [np.float16, np.float32])
HALF_UNIT = 2.0**-11 * 1.001  # a float16 rounding, and what float32 arithmetic adds to it


@shapes
@streams
@pytest.mark.parametrize("weight_dtype", [np.float16, np.float32])
def test_rms_norm(shape: tuple[int, int], dtype: type, weight_dtype: type, no_leaks: None) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, (shape[0], 1))).astype(dtype)
    weight = rng.standard_normal(shape[1]).astype(weight_dtype)
    expected = reference.rms_norm(x, weight, epsilon=1e-5, rounding=False)
    np.testing.assert_allclose(pf.rms_norm(x, weight, epsilon=1e-5), expected, rtol=HALF_UNIT, atol=1e-7)


@shapes
@streams
def test_residual_add(shape: tuple[int, int], dtype: type) -> None:
    rng = np.random.default_rng(2)
    x, branch = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(np.float16)
    expected = (x.astype(np.float32) + branch.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(pf.residual_add(x, branch), expected)


@shapes
def test_swiglu(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    gate, up = (rng.standard_normal(shape) * 6).astype(np.float16), rng.standard_normal(shape).astype(np.float16)
    expected = reference.swiglu(gate, up, rounding=False)
    np.testing.assert_allclose(pf.swiglu(gate, up), expected, rtol=HALF_UNIT, atol=6e-8)


def test_swiglu__large_gates_saturate_without_nan() -> None:
    gate = np.array([[65504, -65504, 100, -100, 0, -0.0]], np.float16)
    y = np.asarray(pf.swiglu(gate, np.ones_like(gate)))
    np.testing.assert_array_equal(y, [[65504, 0, 100, 0, 0, 0]])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_cross_entropy(vocabulary: int) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((6, vocabulary)) * 8).astype(np.float32)
    logits[1] += 1000
    logits[2] -= 1000
    logits[3] *= 50
    targets = rng.integers(0, vocabulary, 6)
    expected = reference.cross_entropy(logits, targets)
    np.testing.assert_allclose(pf.cross_entropy(logits, targets), expected, rtol=1e-6, atol=2e-6)


def test_cross_entropy__a_uniform_model_scores_log_vocabulary() -> None:
    loss = np.asarray(pf.cross_entropy(np.full((3, 1000), 7.5, np.float32), [0, 500, 999]))
    np.testing.assert_allclose(loss, np.log(1000), rtol=1e-6)


def test_cross_entropy__minus_infinity_is_probability_zero() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    np.testing.assert_allclose(pf.cross_entropy(logits, [0]), np.log(2), rtol=1e-6)
    assert np.asarray(pf.cross_entropy(logits, [1]))[0] == np.inf


@pytest.mark.parametrize("width", TOP_K_WIDTHS)
def test_argmax_and_top_k__order_ties_and_nan(width: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.integers(-9, 9, (4, width)).astype(np.float32)  # many ties
    k = min(width, 40)
    values, indices = pf.top_k(x, k)
    expected_values, expected_indices = reference.top_k(x, k)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_array_equal(pf.argmax(x), reference.argmax(x))
    x[1, width // 2] = np.nan
    assert np.asarray(pf.argmax(x))[1] == width // 2
    assert np.asarray(pf.top_k(x, 1)[1])[1, 0] == width // 2
    x[2, ::3], x[2, 1::3] = np.nan, np.inf
    for ours, theirs in zip(pf.top_k(x, k), reference.top_k(x, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(pf.argmax(x), reference.argmax(x))


def test_exp__is_within_two_units() -> None:
    """cross_entropy of [x, 0] against target 1 is log(1 + e^x): below 0, e^x's own relative error."""
    x = np.linspace(-17, -8, 20001, dtype=np.float32)
    logits = np.stack([x, np.zeros_like(x)], axis=1)
    y = np.asarray(pf.cross_entropy(logits, np.ones(len(x), np.int32)), np.float64)
    np.testing.assert_allclose(y, np.log1p(np.exp(x.astype(np.float64))), rtol=2 * 2.0**-23)
