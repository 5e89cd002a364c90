"""Random jitted functions against the same calls one by one: arrays inside never meet in memory while they live."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyferrum as pf
from tests import tiny
from tests.test_jit import bits, grown

WIDTHS = (8, 32, 96, 600)
ROWS = 3
PAGED = pf.AttentionConfig(32, 2, 2, 256, maximum_context_tokens=400)
"""32 tokens a page."""


@pytest.fixture(scope="module")
def kit() -> dict[Any, Any]:
    """What the functions capture."""
    rng = np.random.default_rng(0)
    made: dict[Any, Any] = {"layer": tiny.layer(PAGED)}
    for width in WIDTHS:
        made["norm", width] = pf.array(rng.standard_normal(width).astype(np.float32))
        for out in WIDTHS:
            made[out, width] = pf.array((rng.standard_normal((out, width)) / width**0.5).astype(np.float16))
    return made


Instruction = tuple[str, int, int, int]


def interpret(kit: dict[Any, Any], program: list[Instruction], arrays: list[pf.Array], states: list[pf.KVState]) -> Any:
    """Every value that the instructions make, inputs first. An instruction picks operands that fit, by number."""
    values, states = list(arrays), list(states)

    def pick(number: int, fits: Callable[[pf.Array], bool]) -> pf.Array | None:
        found = [v for v in values if fits(v)]
        return found[number % len(found)] if found else None

    def matrix(v: pf.Array, *formats: str) -> bool:
        return v.ndim == 2 and v.format in formats and v.shape[0] > 0

    for name, a, b, c in program:
        if name == "norm" and (x := pick(a, lambda v: matrix(v, "F16", "F32") and v.shape[1] in WIDTHS)):
            values.append(pf.rms_norm(x, kit["norm", x.shape[1]]))
        elif name == "linear" and (x := pick(a, lambda v: matrix(v, "F16") and v.shape[1] in WIDTHS)):
            weight = kit[WIDTHS[b % len(WIDTHS)], x.shape[1]]
            values.append(pf.linear(x, weight, dtype=(np.float16, np.float32)[c % 2]))
        elif name == "product" and (x := pick(a, lambda v: matrix(v, "F16"))):
            w = pick(b, lambda v: matrix(v, "F16") and v.shape[1] == x.shape[1])
            values.append(pf.linear(x, w, dtype=(np.float16, np.float32)[c % 2]))
        elif name == "swiglu" and (x := pick(a, lambda v: matrix(v, "F16"))):
            values.append(pf.swiglu(x, pick(b, lambda v: matrix(v, "F16") and v.shape == x.shape)))
        elif name == "add" and (x := pick(a, lambda v: matrix(v, "F16", "F32"))):
            if y := pick(b, lambda v: matrix(v, "F16") and v.shape == x.shape):
                values.append(pf.residual_add(x, y))
        elif name == "rows" and (x := pick(a, lambda v: matrix(v, "F16", "F32"))):
            start = b % x.shape[0]
            values.append(x[start : start + 1 + c % 3])
        elif name == "gather" and (x := pick(a, lambda v: matrix(v, "F16", "F32"))):
            index = pf.array(np.array([b % x.shape[0], 0, c % x.shape[0]], np.int32))
            values.append(pf.embed(index, x, dtype=(np.float16, np.float32)[c % 2]))
        elif name == "top" and (x := pick(a, lambda v: matrix(v, "F32"))):
            values.extend(pf.top_k(x, 1 + b % min(x.shape[1], 7)))
            values.append(pf.argmax(x))
        elif name == "loss" and (
            x := pick(a, lambda v: matrix(v, "F32") and v.shape[0] == ROWS and v.shape[1] in WIDTHS)
        ):
            values.append(pf.cross_entropy(x, arrays[-1]))
        elif name == "attend" and (x := pick(a, lambda v: matrix(v, "F16", "F32") and v.shape[1] == 32)):
            state, y = pf.causal_attention(states[b % len(states)], x, kit["layer"])
            values.append(y)
            states.append(state)
        elif name == "packed" and (
            x := pick(a, lambda v: matrix(v, "F16", "F32") and v.shape[1] == 32 and v.shape[0] > 1)
        ):
            group = [states[b % len(states)], states[c % len(states)]]
            made, y = pf.causal_attention(group, pf.Ragged(x, [1, x.shape[0] - 1]), kit["layer"])
            values.append(y)
            states.extend(made)
    return values, states


NAMES = ["norm", "linear", "product", "swiglu", "add", "rows", "gather", "top", "loss", "attend", "packed"]
NUMBER = st.integers(0, 1000)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from([*NAMES, "linear", "norm", "swiglu", "add"]), NUMBER, NUMBER, NUMBER),
    min_size=4,
    max_size=40,
)


def inputs(seed: int) -> tuple[list[pf.Array], list[pf.KVState]]:
    rng = np.random.default_rng(seed)
    arrays = [pf.array(rng.standard_normal((ROWS, w)).astype(d)) for w, d in ((32, "f4"), (8, "f2"), (600, "f2"))]
    arrays.append(pf.array(rng.integers(0, 8, ROWS).astype(np.int32)))
    return arrays, [grown(length, PAGED, seed) for length in ((0, 31), (30, 64), (29, 255))[seed % 3]]


@settings(
    max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(PROGRAMS, st.lists(NUMBER, min_size=1, max_size=6))
def test_programs__have_the_bits_of_their_calls(
    kit: dict[Any, Any], program: list[Instruction], kept: list[int]
) -> None:
    """Few outputs: nearly everything lies in scratch. Freed memory is NaN, so what is read too late shows."""

    def function(arrays: list[pf.Array], states: list[pf.KVState]) -> Any:
        values, made = interpret(kit, program, arrays, states)
        own = {id(array.buffer) for array in arrays}
        results = [v for v in values if id(v.buffer) not in own]  # rows of an input are refused: no call made them
        return [results[k % len(results)] for k in kept] if results else [], made[len(states) :], arrays[0]

    jitted = pf.jit(function)
    for seed in (0, 1, 2, 0):
        arguments = inputs(seed)
        assert bits(jitted(*arguments)) == bits(function(*arguments))


def test_scratch__of_a_deep_function_is_that_of_its_widest_place(no_leaks: None) -> None:
    """A chain of 60 intermediates of 1.2 MB is replayed in the memory of a few; long-lived ones are not disturbed."""
    rng = np.random.default_rng(0)
    norm = pf.array(rng.standard_normal(600).astype(np.float32))

    def function(x: pf.Array) -> Any:
        early = [x := pf.rms_norm(x, norm) for _ in range(3)]
        small = pf.rms_norm(x[:1], norm)
        for _ in range(60):
            x = pf.rms_norm(x, norm)
        return [pf.swiglu(e, x) for e in early], pf.swiglu(small, x[-1:]), pf.residual_add(early[1], early[2])

    jitted = pf.jit(function)
    for seed in range(3):
        x = pf.array(np.random.default_rng(seed).standard_normal((1000, 600)).astype(np.float16))
        assert bits(jitted(x)) == bits(function(x))
    gc.collect()
    with pf.Device(threads=1, poison=False) as device:  # no memory of earlier calls to hand out again
        norm = pf.array(np.asarray(norm), device=device)
        x = pf.array(np.asarray(x), device=device)
        jitted(x)
        before = tiny.resident_bytes()
        jitted(x)
        device.arena_stats()  # waits
        assert tiny.resident_bytes() - before < 20 << 20
    del jitted
