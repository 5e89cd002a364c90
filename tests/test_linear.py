"""Linear layers and embeddings in every weight format, against the dequantised product."""

from __future__ import annotations

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, reference
from pyferrum.weights import prepare
from tests.cases.ops import LINEAR_SHAPES
from tests.cases.weights import ALL_FORMATS, random_weight

formats = pytest.mark.parametrize("format", ALL_FORMATS)


def bound(x: np.ndarray, weight: np.ndarray, block: bool) -> np.ndarray:
    """Largest error of the float32 result, per element (docs/numerics.md).

    Block formats: each input is off by at most 2^-16 of its block's largest; every format: the float32 sums.
    """
    size = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T
    sums = size * x.shape[1] * 2.0**-24
    if not block:
        return sums
    blocks = x.reshape(len(x), -1, 32).astype(np.float64)
    step = np.abs(blocks).max(axis=2, keepdims=True) * 2.0**-16 * np.ones_like(blocks)
    # The minimum of a block meets the sum of its inputs; scale * q and min may be large and cancel.
    return sums + 2.5 * step.reshape(x.shape) @ np.abs(weight.astype(np.float64)).T + 2.0**-16 * size


@formats
@pytest.mark.parametrize(("rows", "outputs", "inputs"), LINEAR_SHAPES)
def test_linear__agrees_with_the_definition(format: str, rows: int, outputs: int, inputs: int, no_leaks: None) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(np.float16)
    weight = random_weight(rng, format, (outputs, inputs))
    dense = reference.ops.wide(weight)
    y = np.asarray(pf.linear(x, weight, dtype=np.float32))
    assert y.dtype == np.float32
    expected = reference.linear(x, weight, dtype=np.float32)
    error = np.abs(y - expected)
    assert (error <= bound(x, dense, format.startswith("Q"))).all(), error.max()
    half = np.asarray(pf.linear(x, weight))
    np.testing.assert_array_equal(half, y.astype(np.float16))


@formats
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_linear__adds_the_bias_before_rounding(format: str, dtype: type) -> None:
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((4, 256)).astype(np.float16), random_weight(rng, format, (21, 256))
    bias = rng.standard_normal(21).astype(dtype)
    plain = np.asarray(pf.linear(x, weight, dtype=np.float32))
    np.testing.assert_array_equal(pf.linear(x, weight, bias), (plain + bias.astype(np.float32)).astype(np.float16))


@pytest.mark.invariance
@formats
def test_linear__a_row_has_the_same_bits_in_any_company(format: str) -> None:
    rng = np.random.default_rng(9)
    x, weight = rng.standard_normal((600, 256)).astype(np.float16), random_weight(rng, format, (50, 256))
    together = np.asarray(pf.linear(x, weight, dtype=np.float32))
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 11), (11, 20), (5, 530), (599, 600)):
        np.testing.assert_array_equal(pf.linear(x[first:last], weight, dtype=np.float32), together[first:last])


@formats
@pytest.mark.parametrize("rows", [1, 21, 100])
def test_linear__a_weight_the_device_prepared_gives_the_same_bits(format: str, rows: int, no_leaks: None) -> None:
    rng = np.random.default_rng(11)
    x, given = rng.standard_normal((rows, 512)).astype(np.float16), random_weight(rng, format, (75, 512))
    weight = type(given)(given.device, _native.buffer_from(given.device.handle, given._bytes()), given.shape, format)
    as_stored = np.asarray(pf.linear(x, weight, dtype=np.float32))
    held = prepare(weight)
    assert held == 0 or held >= weight.nbytes
    assert prepare(weight) == held
    np.testing.assert_array_equal(pf.linear(x, weight, dtype=np.float32), as_stored)


@formats
def test_linear__a_row_of_nan_stays_alone(format: str) -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((5, 256)).astype(np.float16), random_weight(rng, format, (20, 256))
    expected = np.asarray(pf.linear(x, weight, dtype=np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x[2, 70] = bad
        y = np.asarray(pf.linear(x, weight, dtype=np.float32))
        assert not np.isfinite(y[2]).any()
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(expected, 2, 0))


@formats
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_embed__is_exactly_the_dequantised_row(format: str, dtype: type) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, format, (37, 512))
    tokens = rng.integers(0, 37, 50)
    rows = np.asarray(weight) if isinstance(weight, pf.Array) else weight.dequantize()
    np.testing.assert_array_equal(pf.embed(tokens, weight, dtype=dtype), rows.astype(np.float32)[tokens].astype(dtype))


def test_linear__empty_inputs_give_empty_outputs() -> None:
    weight = np.ones((3, 32), np.float16)
    assert pf.linear(np.zeros((0, 32), np.float16), weight).shape == (0, 3)
    assert pf.embed(np.zeros(0, np.int32), weight).shape == (0, 32)
