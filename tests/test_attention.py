"""Causal attention against its definition, over the table of cases, alone and in every batched form."""

from __future__ import annotations

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from tests.cases.attention import CASES, Case

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))

# The oracle rounds where the kernels round. A sum that differs in its last float32 bit may then fall on the other side
# of a float16 rounding: at most one unit (2^-11 relative) in q, k, v, the context or the projection, of values of
# about one. Three of them may meet in an output.
TOLERANCE = 3 * 2.0**-10


def inputs(case: Case) -> tuple[pf.AttentionConfig, pf.AttentionWeights, list[list[np.ndarray]]]:
    rng = np.random.default_rng(len(case.name) * 1000 + case.head_dim)
    weights = case.weights(rng)
    xs = [
        [rng.standard_normal((tokens, case.hidden)).astype(case.dtype) for tokens in chunks] for chunks in case.chunks
    ]
    return case.config(), weights, xs


def run_alone(config: pf.AttentionConfig, weights: pf.AttentionWeights, xs: list[np.ndarray], module=pf):
    state, ys = module.init_state(config), []
    for x in xs:
        state, y = module.causal_attention(state, x, weights)
        ys.append(np.asarray(y))
    return state, ys


@by_name
def test_attention__agrees_with_the_definition(case: Case, no_leaks: None) -> None:
    config, weights, sequences = inputs(case)
    for xs in sequences:
        state, ys = run_alone(config, weights, xs)
        expected_state, expected = run_alone(config, weights, xs, reference)
        for y, e, x in zip(ys, expected, xs, strict=True):
            assert y.dtype == x.dtype
            scale = np.abs(e - x).max() + (np.abs(e).max() if case.dtype == "float16" else 0)
            np.testing.assert_allclose(y.astype(np.float64), e, atol=TOLERANCE * scale, rtol=0)
        key_scale = np.abs(expected_state.keys).max()
        np.testing.assert_allclose(state.keys(), expected_state.keys, atol=2.0**-10 * key_scale, rtol=0)
        np.testing.assert_allclose(state.values(), expected_state.values, atol=2.0**-10 * key_scale, rtol=2.0**-10)


@pytest.mark.invariance
@by_name
def test_attention__packed_and_looped_sequences_have_the_bits_they_have_alone(case: Case, no_leaks: None) -> None:
    config, weights, sequences = inputs(case)
    # The same sequence three times over, where the table has one: equal neighbours must not disturb each other.
    sequences = sequences if len(sequences) > 1 else sequences * 3
    alone = [run_alone(config, weights, xs) for xs in sequences]
    for packed in (True, False):
        states: tuple[pf.KVState, ...] = tuple(pf.init_state(config) for _ in sequences)
        for step in range(len(sequences[0])):
            xs = [xs[step] for xs in sequences]
            if packed:
                ragged = pf.Ragged(np.concatenate(xs), [len(x) for x in xs])
                states, y = pf.causal_attention(states, ragged, weights)
                ys = np.split(np.asarray(y), np.cumsum(ragged.lengths)[:-1])
            else:
                states, looped = pf.causal_attention(states, xs, weights)
                ys = [np.asarray(y) for y in looped]
            for y, (_, expected) in zip(ys, alone, strict=True):
                np.testing.assert_array_equal(y, expected[step])
        for state, (expected_state, _) in zip(states, alone, strict=True):
            np.testing.assert_array_equal(state.keys(), expected_state.keys())
            np.testing.assert_array_equal(state.values(), expected_state.values())


@by_name
def test_attention__what_lies_past_the_length_is_never_read(case: Case) -> None:
    """The same calls on states whose unwritten slots hold NaN, then infinity, give the same bits."""
    config, weights, (xs, *_) = inputs(case)
    _, expected = run_alone(config, weights, xs)
    for poison in (np.nan, np.inf):
        state = pf.init_state(config)
        for x, e in zip(xs, expected, strict=True):
            junk = np.full((state.tokens_per_page + 3, config.key_value_heads, config.head_dim), poison, np.float16)
            if state.length + len(junk) < 4096:
                state.append(junk, junk).close()  # written behind the state's length, then given up
            state, y = pf.causal_attention(state, x, weights)
            np.testing.assert_array_equal(np.asarray(y), e)


def test_attention__same_state_twice_in_one_call() -> None:
    config, weights, ((x0, x1, x2), *_) = inputs(CASES[0])
    state, _ = pf.causal_attention(pf.init_state(config), x0, weights)
    (a, b), (ya, yb) = pf.causal_attention([state, state], [x1, x2], weights)
    assert (a.length, b.length) == (state.length + len(x1), state.length + len(x2))
    np.testing.assert_array_equal(ya, pf.causal_attention(state, x1, weights)[1])
    np.testing.assert_array_equal(yb, pf.causal_attention(state, x2, weights)[1])
    np.testing.assert_array_equal(a.keys(0, state.length), b.keys(0, state.length))


def test_attention__positions_far_out_are_exact() -> None:
    """Angles at a position of 200,000 are as good as near zero: no float32 product of position and frequency."""
    case = Case("far", head_dim=32, key_value_heads=1, query_heads=1, options={"maximum_context_tokens": 262144})
    config, weights, ((x, *_), *_) = inputs(case)
    length = 200_001
    zeros = np.zeros((length, 1, 32), np.float16)
    state, _ = pf.causal_attention(pf.init_state(config).append(zeros, zeros), x, weights)
    far = reference.KVState(config, np.zeros((length, 1, 32)), np.zeros((length, 1, 32)))
    expected, _ = reference.causal_attention(far, x, weights)
    np.testing.assert_allclose(state.keys(length), expected.keys[length:], atol=2e-3, rtol=2.0**-10)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("span", [256, 1024])
def test_attention__a_score_of_minus_infinity_has_no_weight(span: int, tokens: int) -> None:
    """Also where a span has no other: of 256 keys on the CPU, of 1,024 on Metal."""
    config = pf.AttentionConfig(hidden_size=64, query_heads=1, key_value_heads=1, head_dim=64, rope_dim=2)
    weights = pf.AttentionWeights(np.ones(64, np.float32), *[np.eye(64, dtype=np.float16)] * 4)
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, span + 44, 1, 64)).astype(np.float16)
    keys[:span, 0, 5] = -np.inf
    x = np.abs(rng.standard_normal((tokens, 64)))
    _, y = pf.causal_attention(pf.init_state(config).append(keys, values), x.astype(np.float32), weights)
    before = reference.init_state(config).append(keys, values)
    with np.errstate(invalid="ignore"):
        _, expected = reference.causal_attention(before, x.astype(np.float32), weights)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(np.asarray(y), expected, atol=1e-2)
    keys[:, 0, 5] = -np.inf  # nothing is left but the new tokens themselves
    _, y = pf.causal_attention(pf.init_state(config).append(keys, values), x.astype(np.float32), weights)
    assert np.isfinite(np.asarray(y)).all()
