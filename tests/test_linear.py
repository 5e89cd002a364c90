"""Linear layers and embeddings in every weight format, against the dequantised product."""

from __future__ import annotations

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, reference
from pyferrum.weights import prepare
from tests.cases.ops import LINEAR_SHAPES
from tests.cases.weights import ALL_FORMATS, largest_error, random_weight

formats = pytest.mark.parametrize("format", ALL_FORMATS)


@formats
@pytest.mark.parametrize(("rows", "outputs", "inputs"), LINEAR_SHAPES)
def test_linear__agrees_with_the_definition(format: str, rows: int, outputs: int, inputs: int, no_leaks: None) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(np.float16)
    weight = random_weight(rng, format, (outputs, inputs))
    y = np.asarray(pf.linear(x, weight, dtype=np.float32))
    assert y.dtype == np.float32
    expected = reference.linear(x, weight, dtype=np.float32)
    assert (np.abs(y - expected) <= largest_error(x, weight)).all()
    half = np.asarray(pf.linear(x, weight))
    np.testing.assert_array_equal(half, y.astype(np.float16))


@pytest.mark.parametrize("format", [f for f in ALL_FORMATS if not f.endswith("K")])
@pytest.mark.parametrize("inputs", [32, 96, 160, 576])
@pytest.mark.parametrize("rows", [2, 9])
def test_linear__inputs_need_not_fill_the_last_group(format: str, rows: int, inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x = (rng.standard_normal((rows, inputs)) * np.exp(2 * rng.standard_normal((rows, inputs)))).astype(np.float16)
    weight = random_weight(rng, format, (33, inputs))
    error = np.abs(pf.linear(x, weight, dtype=np.float32) - reference.linear(x, weight, dtype=np.float32))
    assert (error <= largest_error(x, weight)).all()


@formats
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("exponent", [-24, -17, 0, 11])
def test_linear__inputs_within_a_factor_of_16_cost_float32_sums_only(format: str, rows: int, exponent: int) -> None:
    """Fixed point holds them exactly, down to the least float16; `largest_error` has no term for them."""
    rng = np.random.default_rng(7)
    x = rng.uniform(1, 16, (rows, 512))
    x[:, ::128] = 16
    x = (x * rng.choice([-1, 1], x.shape) * 2.0**exponent).astype(np.float16)
    weight = random_weight(rng, format, (33, 512))
    error = np.abs(pf.linear(x, weight, dtype=np.float32) - reference.linear(x, weight, dtype=np.float32))
    assert (error <= largest_error(x, weight)).all()


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
