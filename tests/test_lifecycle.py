"""Handles, threads, signals and failures: nothing leaks, nothing crashes, and a failed call changes nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native
from tests import tiny
from tests.conftest import settled_counts

# ---- Closing


@pytest.mark.parametrize("end", ["close", "with", "collector"])
def test_counts__go_back_to_where_they_were(end: str, tmp_path: Path) -> None:
    """abetlen/llama-cpp-python#1513 (H2): closed by close(), by `with` and by the collector, all to the last handle."""
    start = settled_counts()
    device = pf.Device(threads=2)
    weights, empty = tiny.layer(device=device), pf.init_state(tiny.LAYER, device=device)
    state, y = pf.causal_attention(empty, tiny.rows(5), weights)
    fork = state.truncate(3).append(np.ones((2, 1, 16), np.float16), np.ones((2, 1, 16), np.float16))
    model = pf.load(tiny.write_tiny(tmp_path), device=device)
    seen, logits = model.forward(model.init_state(), [1, 2, 3])
    during = _native.debug_counts()
    assert during["devices"] == start["devices"] + 1
    assert during["states"] == start["states"] + 3 + tiny.LAYERS
    assert during["buffers"] > start["buffers"] + len(weights)
    objects = [state, fork, empty, y, seen, logits, *weights]
    if end == "close":
        for thing in objects:
            thing.close()
        assert device.arena_stats()["used_pages"] == 0
        device.close()
        del model
    elif end == "with":
        for thing in (state, fork, empty, seen):
            with thing as same:
                assert same is thing
        with device:
            pass
        del weights, model, y, logits, objects, thing, same
    else:
        cycle: list[Any] = [objects, model, device]
        cycle.append(cycle)
        del device, weights, empty, state, y, fork, model, seen, logits, objects, cycle
    assert settled_counts() == start


def test_close__twice_is_once_and_use_after_it_is_an_error(no_leaks: None) -> None:
    """abetlen/llama-cpp-python#1513 (H2): close is idempotent, and every use after it is a StateError."""
    device = pf.Device(threads=1)
    weights, x = tiny.layer(device=device), pf.array(tiny.rows(2), device=device)
    state, _ = pf.causal_attention(pf.init_state(tiny.LAYER, device=device), x, weights)
    kept = state.truncate(1)
    token, closed = np.zeros((1, 1, 16), np.float16), pf.array(tiny.rows(2), device=device)
    for thing in (state, state, closed):
        thing.close()
    uses: list[Callable[[], Any]] = [
        lambda: pf.causal_attention(state, x, weights),
        lambda: pf.causal_attention([kept, state], [x, x], weights),
        lambda: state.truncate(1),
        lambda: state.append(token, token),
        state.keys,
        lambda: state.pages,
        lambda: pf.causal_attention(kept, closed, weights),
        lambda: pf.causal_attention(kept, x, weights._replace(q_proj=closed)),
    ]
    for use in uses:
        with pytest.raises(pf.StateError, match="closed"):
            use()
    assert (repr(state), len(state)) == ("KVState(closed, length=2)", 2)
    device.close()
    device.close()
    for use in (
        device.info,
        lambda: pf.array([1.0], device=device),
        lambda: pf.init_state(tiny.LAYER, device=device),
        lambda: pf.causal_attention(kept, x, weights),
        lambda: pf.rms_norm(x, np.ones(32, np.float32)),
    ):
        with pytest.raises(pf.StateError, match="device was closed"):
            use()
    assert repr(device) == "Device(closed)"
    assert (np.asarray(x).shape, kept.keys().shape) == ((2, 32), (1, 1, 16))


def test_weights__kept_for_the_next_call_hold_no_memory_and_no_closed_array(no_leaks: None) -> None:
    """The native weights are made once; any change of a weight, its end included, makes the next call look again."""
    x, empty = tiny.rows(2), pf.init_state(tiny.LAYER)

    def results(weights: pf.AttentionWeights) -> list[bytes]:
        return [np.asarray(pf.causal_attention(empty, x, weights)[1]).tobytes() for _ in range(2)]

    weights = tiny.layer()
    full = results(weights)
    for field in weights._fields[1:]:
        host = np.asarray(getattr(weights, field))
        assert results(weights._replace(**{field: host * 2})) != full
        assert results(weights._replace(**{field: pf.array(host * 2)})) != full
        assert results(weights._replace(**{field: host})) == results(weights) == full
    bare = weights._replace(q_norm=None, o_bias=None)
    assert full != results(bare) == results(tiny.layer()._replace(q_norm=None, o_bias=None))
    assert results(bare._replace(q_norm=np.asarray(weights.q_norm), o_bias=np.asarray(weights.o_bias))) == full
    for field in weights._fields:
        weights = tiny.layer()
        assert results(weights) == full
        before = _native.debug_counts()["buffers"]
        getattr(weights, field).close()
        assert _native.debug_counts()["buffers"] == before - 1
        with pytest.raises(pf.StateError, match="closed"):
            results(weights)
        closed = getattr(weights, field)
        if field in ("q_norm", "o_bias"):  # closed where the kept weights have none
            results(bare)
            with pytest.raises(pf.StateError, match="closed"):
                results(bare._replace(**{field: closed}))


EXIT = """
import sys, threading, time
import pyferrum as pf
model = pf.load(sys.argv[1])
state, logits = model.forward(model.init_state(), [1, 2, 3])
sys.stash = (model, state, logits, logits.__array__())  # goes last of all, when modules are empty
other = pf.array([1.0, 2.0], device=pf.Device(threads=4))
steps = pf.generate(model, "hello", max_tokens=50, ignore_eos=True)
step = next(steps)  # a suspended generator
cycle = [state, model, other]
cycle.append(cycle)
class Late:
    def __del__(self, model=model, state=state):
        model.forward(state, [4])  # a call while the interpreter goes down
late = Late()
thread = threading.Thread(target=lambda: [model.forward(state, [5]) for _ in range(10**6)], daemon=True)
thread.start()
time.sleep(0.05)
"""


def test_exit__with_live_objects_is_silent(tmp_path: Path) -> None:
    """abetlen/llama-cpp-python#1610, #846; run-llama/llama_index#9299 (H1): empty stderr and exit code 0."""
    folder = tiny.write_tiny(tmp_path)
    without_thread = EXIT[: EXIT.index("thread = ")]
    for code in (without_thread, without_thread + "sys.exit(0)\n", EXIT):
        result = tiny.python(code, folder)
        assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


FORK = """
import gc, os, sys, time
import numpy as np
import pyferrum as pf
model = pf.load(sys.argv[1])
device = model.device if sys.argv[2] == "default" else pf.Device(threads=4)
x = pf.array(np.ones((3, 8), np.float16), device=device)
state, logits = model.forward(model.init_state(), [1, 2, 3])
expected = model.forward(state, [4])[1].tolist()
time.sleep(float(sys.argv[3]))  # the pool's threads spin for a moment, then sleep
pid = os.fork()
if pid == 0:
    uses = [lambda: model.forward(state, [4]), lambda: pf.swiglu(x, x), lambda: pf.array([1.0], device=device),
            lambda: state.layers[0].truncate(1), lambda: state.layers[0].keys(), lambda: model.init_state(),
            device.arena_stats]
    for number, use in enumerate(uses):
        try:
            use()
        except (pf.StateError, pf.DeviceError) as error:
            assert "fork" in str(error), error
        else:
            raise SystemExit(f"use {number} went through in the child")
    assert x.tolist() == [[1.0] * 8] * 3
    with pf.Device(threads=2) as own:
        assert pf.swiglu(*[pf.array(np.zeros((1, 8), np.float16), device=own)] * 2).tolist() == [[0.0] * 8]
    if device is not model.device:
        device.close()
    del x, state, logits, own
    gc.collect()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert model.forward(state, [4])[1].tolist() == expected
"""


@pytest.mark.parametrize(("device", "pause"), [("default", 0.1), ("own", 0)])
def test_fork__child_gets_errors_and_leaves_quietly(device: str, pause: float, tmp_path: Path) -> None:
    """H10 (by design): the child has none of the device's threads; the parent goes on as if nothing had happened."""
    result = tiny.python(FORK, tiny.write_tiny(tmp_path), device, pause)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


INTERRUPT = """
import gc, os, signal, sys, threading, time
import numpy as np
import pyferrum as pf
from pyferrum import _native
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
model = pf.load(sys.argv[1])
tokens = np.arange(60000) % 97
state, _ = model.forward(model.init_state(), tokens[:700])
model.forward(state, tokens[:1500], last_only=True)  # a model keeps what it has recorded
expected = np.asarray(model.forward(state, [5])[1])
gc.collect()
before, pages = _native.debug_counts(), pf.arena_stats()["used_pages"]
for attempt in range(5):
    threading.Timer(0.1 + 0.013 * attempt, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.perf_counter()
    try:
        model.forward(state, tokens, last_only=True)
    except KeyboardInterrupt:
        seconds = time.perf_counter() - start
    else:
        raise SystemExit("the prefill was not interrupted")
    gc.collect()
    assert seconds < 3, seconds
    assert _native.debug_counts() == before, (before, _native.debug_counts())
    assert pf.arena_stats()["used_pages"] == pages
np.testing.assert_array_equal(model.forward(state, [5])[1], expected)
"""


def test_interrupt__lands_between_calls_with_every_state_intact(tmp_path: Path) -> None:
    """DESIGN §5: Ctrl-C during a long prefill is a KeyboardInterrupt at once; what was computed before is as it was."""
    result = tiny.python(INTERRUPT, tiny.write_tiny(tmp_path, config={"max_position_embeddings": 100_000}))
    assert (result.returncode, result.stderr) == (0, "")


# ---- Threads


@pytest.mark.parametrize("shared", [True, False], ids=["one state", "own states"])
def test_threads__have_the_bits_they_have_alone(shared: bool, no_leaks: None) -> None:
    """ml-explore/mlx#3619, #2809; oxiglade/mlx-rs#349; waybarrios/vllm-mlx#128 (H4): 8 threads, 50 calls each."""
    weights = tiny.layer()
    start, _ = pf.causal_attention(pf.init_state(tiny.LAYER), tiny.rows(7), weights)
    xs = [tiny.rows(1, seed=seed) for seed in range(50)]
    barrier = threading.Barrier(8)

    def chain(state: pf.KVState) -> list[bytes]:
        barrier.wait()
        results = []
        for x in xs:
            new, y = pf.causal_attention(state, x, weights)
            results.append(np.asarray(y).tobytes())
            state = state if shared else new
        return [*results, np.asarray(state.keys()).tobytes()]

    barrier = threading.Barrier(1)
    expected = chain(start)
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(chain, [start] * 8 if shared else [start.truncate(7) for _ in range(8)]):
            assert results == expected


def test_threads__that_end_at_once(no_leaks: None) -> None:
    """ml-explore/mlx#2809 (H4): handles made by threads that are gone are as good as others, and go as others go."""
    weights, state = tiny.layer(), pf.init_state(tiny.LAYER)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(pf.causal_attention(state, tiny.rows(3), weights)))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, expected = pf.causal_attention(state, tiny.rows(3), weights)
    assert len(results) == 100
    for _, y in results:
        np.testing.assert_array_equal(y, expected)


# ---- Failures


WRONG_WEIGHTS = {
    "a missing one": (lambda w: None, "expected a tensor, got none"),
    "float64": (lambda w: np.asarray(w, np.float64), "float64"),
    "int32": (lambda w: np.asarray(w).astype(np.int32), "I32"),
    "one axis more": (lambda w: np.asarray(w)[None], r"expected \[.*got \[1, "),
    "a row more": (lambda w: np.concatenate([np.asarray(w), np.asarray(w)[:1]]), r"expected \[.*got \["),
    "none of them": (lambda w: np.asarray(w)[:0], r"expected \[.*got \[0"),
    "transposed": (lambda w: np.asarray(w).T[:-1], r"expected \[.*got \["),
    "an object": (lambda w: object(), "Python objects"),
    "elsewhere": (lambda w: pf.array(np.asarray(w), device=pf.Device(threads=1)), "another device"),
}


@pytest.mark.parametrize("kind", WRONG_WEIGHTS)
def test_wrong_weights__are_named_and_nothing_is_held(kind: str, no_leaks: None) -> None:
    """DESIGN §8: the message names the argument, what was expected and what was found."""
    weights, (change, message) = tiny.layer(), WRONG_WEIGHTS[kind]
    state, _ = pf.causal_attention(pf.init_state(tiny.LAYER), tiny.rows(3), weights)
    before = pf.arena_stats()
    for field in weights._fields if kind != "a missing one" else weights._fields[:5]:
        wrong = weights._replace(**{field: change(getattr(weights, field))})
        with pytest.raises((pf.InvalidArgument, pf.UnsupportedError), match=rf"weights\.{field}: .*{message}"):
            pf.causal_attention(state, tiny.rows(1), wrong)
    assert (pf.arena_stats(), state.length) == (before, 3)


def wrong_calls() -> list[tuple[str, Callable[[], Any]]]:
    """What a message has to say, and a call that should raise it."""
    weights, state, x = tiny.layer(), pf.init_state(tiny.LAYER), tiny.rows(2)
    elsewhere = pf.Device(threads=1)
    other, away = pf.init_state(replace(tiny.LAYER, epsilon=1e-6)), pf.init_state(tiny.LAYER, device=elsewhere)
    f16, f32, i32 = (pf.array(np.zeros((2, 32), d)) for d in (np.float16, np.float32, np.int32))
    vector, narrow, bf16 = np.zeros(32, np.float32), np.zeros((2, 31), np.float16), f16.astype(pf.bfloat16)
    kv, there = np.zeros((1, 1, 16), np.float16), pf.array(x, device=elsewhere)
    attend, ragged = pf.causal_attention, pf.Ragged
    return [
        *((r"^states: ", lambda s=s: attend(s, [x], weights)) for s in ([], [1], [state, None], "ab")),
        (r"^states: .*AttentionConfig", lambda: attend([state, other], [x, x], weights)),
        (r"states: .*another device", lambda: attend([state, away], [x, x], weights)),
        *((r"^x: ", lambda v=v: attend(state, v, weights)) for v in (x[0], x[None], x[:, :-1], x.astype(float), None)),
        (r"\] x: expected at least one token", lambda: attend(state, x[:0], weights)),
        *((r"\] x: expected F32 or F16, got", lambda v=v: attend(state, v, weights)) for v in (i32, bf16)),
        (r"\] x: .*maximum_context_tokens is 8192", lambda: attend(state, tiny.rows(8193), weights)),
        (r"\] x: .*another device", lambda: attend(state, there, weights)),
        (r"\] xs: expected one dtype", lambda: attend([state] * 2, [x, x.astype(np.float16)], weights)),
        (r"^xs: expected 2 arrays", lambda: attend([state, state], [x], weights)),
        (r"^x: a Ragged", lambda: attend(state, ragged(x, [2]), weights)),
        *(
            (r"^lengths: ", lambda n=n: attend([state] * 2, ragged(x, n), weights))
            for n in ([2], [0, 2], [3, -1], [1, 2])
        ),
        *((r"weights", lambda w=w: attend(state, x, w)) for w in (None, tuple(weights), weights._asdict())),
        *((r"\] keys: expected (F16|\[)", lambda k=k: state.append(k, kv)) for k in (kv.astype("f4"), kv[:, :, :8])),
        *((r"\] values: expected (F16|\[)", lambda v=v: state.append(kv, v)) for v in (kv.astype("f4"), kv[:0])),
        *((r"^length: expected 0…0", lambda n=n: state.truncate(n)) for n in (1, -1)),
        (r"\] x: expected 2 dimensions", lambda: pf.rms_norm(vector, vector)),
        (r"\] x: expected F16 or F32, got I32", lambda: pf.rms_norm(i32, vector)),
        (r"\] weight: expected \[32\]", lambda: pf.rms_norm(f16, vector[:31])),
        (r"\] weight: expected F16 or F32, got BF16", lambda: pf.rms_norm(f16, bf16[0])),
        *((r"\] epsilon: ", lambda e=e: pf.rms_norm(f16, vector, epsilon=e)) for e in (-1e-5, float("nan"))),
        (r"\] x: expected F16, got F32", lambda: pf.linear(f32, f16)),
        (r"\] x: expected 2 dimensions", lambda: pf.linear(f16[0], f16)),
        (r"\] weight: expected \[\*, 32\]", lambda: pf.linear(f16, narrow)),
        (r"\] weight: no kernel reads format I32", lambda: pf.linear(f16, i32)),
        (r"\] bias: expected \[2\]", lambda: pf.linear(f16, f16, vector)),
        (r"^dtype: expected float16 or float32", lambda: pf.linear(f16, f16, dtype=pf.bfloat16)),
        *((r"\] tokens: expected 0…1, got ", lambda t=t: pf.embed(t, f16)) for t in ([0, 2], [-1])),
        (r"^tokens: expected integers", lambda: pf.embed([0.5], f16)),
        (r"^tokens: expected numbers below 2\^31", lambda: pf.embed([-(2**40)], f16)),
        (r"\] tokens: expected 1 dimensions", lambda: pf.embed([[0]], f16)),
        (r"\] weight: expected 2 dimensions", lambda: pf.embed([0], vector)),
        (r"\] gate: expected F16, got F32", lambda: pf.swiglu(f32, f16)),
        (r"\] up: expected \[2, 32\]", lambda: pf.swiglu(f16, narrow)),
        (r"\] x: expected F16 or F32, got I32", lambda: pf.residual_add(i32, f16)),
        (r"\] branch: expected F16, got F32", lambda: pf.residual_add(f16, f32)),
        (r"\] branch: expected \[2, 32\]", lambda: pf.residual_add(f16, narrow)),
        (r"\] logits: expected F32, got F16", lambda: pf.cross_entropy(f16, [0, 0])),
        (r"\] targets: expected \[2\]", lambda: pf.cross_entropy(f32, [0])),
        *((r"\] targets: expected 0…31, got ", lambda t=t: pf.cross_entropy(f32, t)) for t in ([0, 32], [-1, 0])),
        (r"\] x: expected F32, got F16", lambda: pf.argmax(f16)),
        (r"\] x: expected at least one column", lambda: pf.argmax(np.zeros((2, 0), np.float32))),
        *((r"\] k: expected ", lambda k=k: pf.top_k(f32, k)) for k in (0, -1, 33, 2**32, 1.5)),
        (r"\] k: expected 1…1024", lambda: pf.top_k(np.zeros((1, 2000), np.float32), 1025)),
    ]


def test_wrong_calls__name_the_argument_and_hold_nothing(no_leaks: None) -> None:
    """DESIGN §8: every argument of causal_attention and of the operations; shapes, dtypes, ranges, devices."""
    calls = wrong_calls()
    before, problems = (settled_counts(), pf.arena_stats()), []
    for number, (message, call) in enumerate(calls):
        try:
            call()
            problems.append(f"call {number}, {message}: went through")
        except Exception as error:
            if not isinstance(error, (pf.InvalidArgument, pf.UnsupportedError)) or not re.search(message, str(error)):
                problems.append(f"call {number}, {message}: {error!r}")
    assert not problems, "\n".join(problems)
    assert (settled_counts(), pf.arena_stats()) == before
