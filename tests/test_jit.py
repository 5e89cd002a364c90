"""Jitted functions: the bits of the originals at every length, what is captured and refused, and failures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native
from pyferrum.jit import record
from pyferrum.models import llama
from tests import tiny
from tests.conftest import settled_counts

PAGED = pf.AttentionConfig(32, 8, 8, 256, maximum_context_tokens=100)
"""Eight tokens a page."""


def bits(value: Any) -> Any:
    """A nest as something to compare: types, shapes and bytes; states as their keys and values."""
    if isinstance(value, pf.KVState):
        return "state", value.config, value.length, bits(value.keys()), bits(value.values())
    if isinstance(value, (pf.Array, np.ndarray)):
        return "array", value.shape, str(value.dtype), np.asarray(value).tobytes()
    if isinstance(value, dict):
        return {name: bits(child) for name, child in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [bits(child) for child in value]
    if hasattr(value, "tree_flatten"):
        return type(value), bits(value.tree_flatten())
    return type(value), bits(vars(value)) if hasattr(value, "__dict__") else value


def assert_same(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """The jitted function has the original's bits: recorded with the first arguments, replayed with all of them."""
    jitted = pf.jit(function)
    for arguments in [*calls, *calls]:
        assert bits(jitted(*arguments)) == bits(function(*arguments))


def f16(rows: int, width: int = 32, seed: int = 0) -> pf.Array:
    return pf.array(tiny.rows(rows, seed, width=width, dtype=np.float16))


def f32(rows: int, width: int = 32, seed: int = 0) -> pf.Array:
    return pf.array(tiny.rows(rows, seed, width=width))


def grown(tokens: int, config: pf.AttentionConfig = tiny.LAYER, seed: int = 3) -> pf.KVState:
    shape = (2, tokens, config.key_value_heads, config.head_dim)
    keys, values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return pf.init_state(config).append(keys, values)


W = np.random.default_rng(9).standard_normal((48, 32)).astype(np.float16) / 6
NORM = np.linspace(0.5, 1.5, 32, dtype=np.float32)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, y, t: pf.rms_norm(x, NORM),
    "linear": lambda x, y, t: pf.linear(x, W, dtype=np.float32),
    "linear with bias": lambda x, y, t: pf.linear(x, W, NORM[:1].repeat(48)),
    "linear by an argument": lambda x, y, t: pf.linear(x, y),
    "embed": lambda x, y, t: pf.embed(t, x),
    "embed of rows made here": lambda x, y, t: pf.embed(t, pf.swiglu(x, y), dtype=np.float16),
    "swiglu": lambda x, y, t: pf.swiglu(x, y),
    "residual_add": lambda x, y, t: pf.residual_add(x, y),
    "cross_entropy": lambda x, y, t: pf.cross_entropy(pf.linear(x, W, dtype=np.float32), t),
    "argmax": lambda x, y, t: pf.argmax(pf.linear(x, W, dtype=np.float32)),
    "top_k": lambda x, y, t: pf.top_k(pf.linear(x, W, dtype=np.float32), 5),
    "no rows": lambda x, y, t: pf.rms_norm(pf.swiglu(x[:0], y[:0]), NORM),
    "the same twice": lambda x, y, t: pf.residual_add(x, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str, no_leaks: None) -> None:
    calls = [(f16(3, seed=s), f16(3, seed=s + 1), pf.array(np.array([s % 3, 0, 2], np.int32))) for s in range(3)]
    assert_same(OPERATIONS[name], *calls)


def test_layer__of_a_llama_at_every_length(no_leaks: None) -> None:
    """Attention, MLP, residuals: over growing states, through page boundaries."""
    rng = np.random.default_rng(0)
    mlp = [rng.standard_normal(shape).astype(np.float16) / 6 for shape in ((48, 32), (48, 32), (32, 48))]
    layer = llama.LayerParams(tiny.layer(PAGED), pf.array(NORM), *map(pf.array, mlp))

    def step(state: pf.KVState, x: pf.Array) -> tuple[pf.KVState, pf.Array]:
        state, x = pf.causal_attention(state, x, layer.attention)
        return state, llama.mlp(x, layer, epsilon=1e-5)

    jitted = pf.jit(step)
    for count in (1, 3, 9):  # 1: 1…20 tokens, three pages; 9: tiles of rows, and a page at once
        plain = fast = pf.init_state(PAGED)
        for index in range(60 // (count + 2)):
            x = f32(count, seed=index)
            plain, expected = step(plain, x)
            fast, y = jitted(fast, x)
            assert bits((fast, y)) == bits((plain, expected))


def test_attention__over_one_span_and_two(no_leaks: None) -> None:
    """A recording of a short context serves a long one, whose plan has other launches."""
    weights = tiny.layer()
    x = f32(1)
    for span in (256, 1024):
        starts = [span - 2, span - 1, span, span + 1, 3, 0, 2 * span + 5]
        assert_same(lambda s, x: pf.causal_attention(s, x, weights), *((grown(n), x) for n in starts))


def test_attention__so_small_that_one_thread_takes_it_and_then_not(no_leaks: None) -> None:
    """One recording, taken by one thread of the CPU device in a short context and by all in a longer one."""
    config = pf.AttentionConfig(32, 1, 1, 16, maximum_context_tokens=8192)  # 1,024 tokens a page and span
    weights, x = tiny.layer(config), f32(1)
    starts = [3, 1023, 1024, 2100, 5, 1030, 1022]
    assert_same(lambda s, x: pf.causal_attention(s, x, weights), *((grown(n, config), x) for n in starts))


@pytest.mark.parametrize("form", ["packed", "looped"])
def test_attention__of_several_states(form: str, no_leaks: None) -> None:
    weights, lengths = tiny.layer(PAGED), [1, 3, 2]

    def step(states: tuple[pf.KVState, ...], x: pf.Array) -> Any:
        if form == "packed":
            return pf.causal_attention(states, pf.Ragged(x, lengths), weights)
        return pf.causal_attention(states, [x[:1], x[1:4], x[4:]], weights)

    a, b, c = grown(7, PAGED, 1), grown(8, PAGED, 2), grown(0, PAGED)
    assert_same(step, ((a, b, c), f32(6)), ((c, a, b), f32(6, seed=1)), ((a, a, a), f32(6)), ((b, b, a), f32(6)))


def test_states__used_twice_and_extended_twice(no_leaks: None) -> None:
    """Forks inside, and chains; every state that comes out is as if alone."""
    weights = tiny.layer(PAGED)

    def fork(state: pf.KVState, x: pf.Array, y: pf.Array) -> Any:
        one, a = pf.causal_attention(state, x, weights)
        two, b = pf.causal_attention(state, y, weights)
        three, c = pf.causal_attention(one, y, weights)
        four, d = pf.causal_attention(three, pf.rms_norm(x, NORM), weights)
        return {"states": [one, two, three, four], "ys": (a, b, c, d)}

    calls = [(grown(n, PAGED), f32(2), f32(2, seed=5)) for n in (0, 3, 6, 7, 8, 15)]
    assert_same(fork, *calls)
    jitted = pf.jit(lambda s, t, x: (pf.causal_attention(s, x, weights), pf.causal_attention(t, x, weights)))
    state = grown(5, PAGED)
    for _ in range(3):
        (left, a), (right, b) = jitted(state, state, f32(1))
        assert bits((left, a)) == bits((right, b)) == bits(pf.causal_attention(state, f32(1), weights))


def test_inputs__stay_as_they_were_and_fork(no_leaks: None) -> None:
    """Replays branch and claim as calls do: in place where they may, one page copied where not."""
    weights, state = tiny.layer(PAGED), grown(5, PAGED)
    step = pf.jit(lambda s, x: pf.causal_attention(s, x, weights))
    before, shown = pf.arena_stats(), bits(state)
    results = [step(state, f32(1, seed=seed)) for seed in range(4)]
    after = pf.arena_stats()
    # The first is in place, the others copy the tail. (The recording's own alias of the state is gone by then.)
    assert after["copied_pages"] - before["copied_pages"] == 3
    assert after["used_pages"] - before["used_pages"] == 3
    assert bits(state) == shown
    for seed, result in enumerate(results):
        assert bits(result) == bits(pf.causal_attention(state, f32(1, seed=seed), weights))


def test_captured__arrays_and_states(no_leaks: None) -> None:
    """What a function takes from outside is what it was, even if it shares memory with an argument."""
    table, weights, prefix = f16(6), tiny.layer(PAGED), grown(11, PAGED)
    assert_same(lambda x: pf.linear(x, table), (table,), (f16(6, seed=1),))
    assert_same(lambda x: pf.residual_add(x, table[5:]), (table[:1],), (table[3:4],), (f16(1, seed=1),))
    assert_same(lambda x, y: pf.residual_add(x, y), (table[:2], table[1:3]), (table[4:], f16(2)), (f16(2), f16(2)))
    assert_same(lambda x: pf.causal_attention(prefix, x, weights), (f32(2),), (f32(2, seed=1),))
    made_inside = pf.jit(lambda x: pf.causal_attention(pf.init_state(PAGED), x, weights))
    pf.default_device()._cache.clear()  # the configuration is then made inside as well
    for seed in range(3):
        state, y = made_inside(f32(2, seed=seed))
        assert bits((state, y)) == bits(pf.causal_attention(pf.init_state(PAGED), f32(2, seed=seed), weights))
    constant = pf.jit(lambda x: pf.residual_add(x, pf.array(np.arange(32, dtype=np.float16)[None])))
    np.testing.assert_array_equal(constant(f16(1)), constant(f16(1)))


def test_weights__as_arguments(no_leaks: None) -> None:
    """Blocks and NamedTuples of weights may change from run to run too."""
    rng = np.random.default_rng(4)
    blocks = [pf.block_array(rng.integers(0, 60, 40 * 34, dtype=np.uint8), "Q8_0", (40, 32)) for _ in range(2)]
    assert_same(lambda x, w: pf.linear(x, w), *((f16(2, seed=s), w) for s in (0, 1) for w in (*blocks, f16(40))))
    one, two = tiny.layer(PAGED), tiny.layer(PAGED)._replace(q_norm=None, o_proj=f16(32, 2048, seed=8))
    assert_same(pf.causal_attention, *((grown(3, PAGED), f32(2), w) for w in (one, two, one)))


# ---- Nests


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "box"
    made: Any = field(default=None, init=False)


def test_nests__come_back_as_they_are(no_leaks: None) -> None:
    weights = tiny.layer()

    def step(pair: Pair, more: dict[str, Any], *, mode: str = "a", flags: tuple[Any, ...] = ()) -> Any:
        state, y = pf.causal_attention(pair.left, pair.right, weights)
        box = Box([y, {"tail": y[-1:], "head": y[:2], "mode": mode}], mode)
        object.__setattr__(box, "made", more["x"])
        again = pf.rms_norm(more["x"], NORM)
        return Pair(state, box), [pair.left, more["x"], None, flags, Pair], {"y": (y, again, again[1:2], again[0])}

    jitted = pf.jit(step)
    for seed in range(3):
        arguments = Pair(grown(4 + seed), f32(3, seed=seed)), {"x": f16(2, seed=seed)}
        for options in ({}, {"mode": "b"}, {"flags": (1, 2.0, -0.0)}, {"flags": (True, 2, 0.0), "mode": "b"},
                        {"flags": (np.float64(0.0),)}, {"flags": (np.float64(-0.0),)}, {"flags": ({1: 2},)},
                        {"flags": ({True: 2},)}):  # fmt: skip
            result, expected = jitted(*arguments, **options), step(*arguments, **options)
            assert bits(result) == bits(expected)
            assert repr(result[1][3]) == repr(options.get("flags", ()))  # 1 is not True, and 0.0 not -0.0
            assert result[1][0] is arguments[0].left and result[1][1] is result[0].right.made is arguments[1]["x"]


def test_numpy__arguments_become_arrays_on_the_device_of_the_others(no_leaks: None) -> None:
    function = pf.jit(pf.swiglu)
    with pf.Device(threads=1) as own:
        here, there = f16(2), pf.array(np.asarray(f16(2)), device=own)
        host = np.asarray(f16(2, seed=1))
        for x, device in ((here, pf.default_device()), (there, own), (here, pf.default_device()), (host, None)):
            y = function(x, host)
            assert device is None or y.device is device
            np.testing.assert_array_equal(y, pf.swiglu(np.asarray(x), host))
        for mixed in ((here, there), (there, here)):
            with pytest.raises(pf.InvalidArgument, match="one device"):
                function(*mixed)
        with pytest.raises(pf.InvalidArgument, match="float64"):
            function(here, host.astype(np.float64))
    del function  # its recordings keep the device
    with pytest.raises(pf.InvalidArgument, match="hashable values, got set"):
        pf.jit(lambda x, s: x)(here, {1})


def test_other_device__inside_is_captured_not_recorded(no_leaks: None) -> None:
    with pf.Device(threads=1) as own:
        x = pf.array(np.asarray(f16(1)), device=own)
        seen = []

        def function(y: pf.Array) -> pf.Array:
            there = pf.rms_norm(x, pf.array(NORM, device=own))
            seen.append(np.asarray(there))  # depends on no argument, on a device that is not recorded
            pf.init_state(tiny.LAYER, device=own).append(np.ones((1, 1, 16), "f2"), np.ones((1, 1, 16), "f2"))
            return pf.residual_add(y, seen[0])

        jitted = pf.jit(function)
        for seed in range(2):
            assert bits(jitted(f16(1, seed=seed))) == bits(pf.residual_add(f16(1, seed=seed), seen[0]))
        assert len(seen) == 1


# ---- Recordings


@pytest.fixture
def few_recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.import_module("pyferrum.jit"), "PROGRAMS", 3)
    yield


def test_recordings__one_a_shape_and_the_latest_used_are_kept(few_recordings: None, no_leaks: None) -> None:
    calls = []

    def function(x: pf.Array, scale: Any = None) -> pf.Array:
        calls.append((x.shape, x.format, scale))
        return pf.rms_norm(x, np.ones(x.shape[1], np.float32))

    jitted = pf.jit(function)
    before = _native.debug_counts()["programs"]
    shapes: list[tuple[Any, ...]] = [(f16(1),), (f16(2),), (f32(1),), (f16(1),), (f16(2, 64),)]
    for arguments in shapes:
        jitted(*arguments)
    assert len(calls) == 4  # the fourth call was a replay, and kept the first recording; the fifth ended the second
    assert _native.debug_counts()["programs"] - before == 3
    for arguments, recorded in (((f16(1),), 0), ((f32(1),), 0), ((f16(2, 64),), 0), ((f16(2),), 1), ((f16(1),), 1)):
        count = len(calls)
        assert bits(jitted(*arguments)) == bits(function(*arguments)) and calls.pop()
        assert len(calls) - count == recorded
    jitted(f16(1), float("nan"))
    count = len(calls)
    jitted(f16(1), float("nan"))
    assert len(calls) == count


def test_nested__is_part_of_the_recording(no_leaks: None) -> None:
    runs = []

    @pf.jit
    def inner(x: Any, y: Any) -> tuple[pf.Array, pf.Array]:
        runs.append(x)
        return pf.swiglu(x, y), pf.rms_norm(y, NORM)

    def outer(x: pf.Array) -> Any:
        a, b = inner(x, np.asarray(f16(2, seed=7)))
        return inner(a, b)

    inner(f16(2), f16(2))  # has a recording of its own already
    assert_same(outer, *((f16(2, seed=s),) for s in range(3)))
    before = _native.debug_counts()["programs"]
    jitted, count = pf.jit(outer), len(runs)
    for seed in range(3):
        jitted(f16(2, seed=seed))
    assert (_native.debug_counts()["programs"] - before, len(runs) - count) == (1, 2)


def test_record__without_running_claims_no_page_and_makes_the_same_program(no_leaks: None) -> None:
    weights, state, x = tiny.layer(PAGED), grown(7, PAGED), f32(2)  # two tokens more take a page

    def function(arrays: list[Any], states: list[pf.KVState]) -> Any:
        new, y = pf.causal_attention(states[0], arrays[0], weights)
        return [pf.residual_add(y, pf.rms_norm(y, NORM))], [new]

    before = pf.arena_stats()["allocated_pages"]
    program = record(pf.default_device(), function, [x], [state], run=False)[0]
    assert pf.arena_stats()["allocated_pages"] == before
    made, expected = program.run([x], [state]), function([x], [state])
    assert bits(made) == bits(expected)


def test_model__inside_is_part_of_the_recording(tmp_path: Any, no_leaks: None) -> None:
    model = pf.load(tiny.write_tiny(tmp_path))

    def step(state: pf.ModelState) -> Any:
        state, scores = model.forward(state, [5, 6], last_only=True)
        return state, pf.argmax(scores), pf.top_k(scores, 3)

    states = [model.forward(model.init_state(), range(n))[0] for n in (3, 40)]
    model.forward(states[0], [5, 6], last_only=True)  # recorded on its own
    assert_same(step, *((state,) for state in states))
    with pytest.raises(pf.UnsupportedError, match="length: not known"):
        pf.jit(lambda s: model.forward(s.truncate(s.length - 1), [1]))(states[0])


def test_model__keeps_recordings_of_other_batches_apart(tmp_path: Any, no_leaks: None) -> None:
    """One sequence of one token, last_only and a tap of layer 0; then two sequences of one token."""
    model = pf.load(tiny.write_tiny(tmp_path))
    empty, taps = model.init_state(), dict.fromkeys([0])
    _, one = model.forward(empty, [5], last_only=True, taps=taps)
    _, two = model.forward([empty, empty], [[5], [6]])
    np.testing.assert_array_equal(one, two[0])


def test_threads__record_and_run_at_once(few_recordings: None, no_leaks: None) -> None:
    """Eight threads over more shapes than recordings are kept, each with states of its own."""
    weights = tiny.layer()
    step = pf.jit(lambda s, x: pf.causal_attention(s, x, weights))

    def chain(seed: int, function: Callable[..., Any]) -> Any:
        state, ys = grown(seed + 1), []
        for index in range(30):
            state, y = function(state, f32(1 + (index + seed) % 5, seed=index))
            ys.append(bits(y))
        return bits(state), ys

    expected = [chain(seed, lambda s, x: pf.causal_attention(s, x, weights)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(chain, range(8), [step] * 8)) == expected


def test_counts__go_with_the_function() -> None:
    """A recording keeps what it captured, and no input of the run it was made in."""
    before = settled_counts()

    def make() -> Callable[..., Any]:
        weights, prefix = tiny.layer(), grown(3)
        return pf.jit(lambda s, x: (pf.causal_attention(s, x, weights), pf.causal_attention(prefix, x, weights)[0]))

    step = make()
    result = step(grown(2), f32(1)), step(grown(9), f32(1))
    during = settled_counts()
    assert during["programs"] == before["programs"] + 1
    assert pf.arena_stats()["used_pages"] >= 3
    del result
    after = settled_counts()
    assert (after["states"], after["buffers"]) == (before["states"] + 1, before["buffers"] + len(tiny.layer()) + 1)
    del step
    assert settled_counts() == before
