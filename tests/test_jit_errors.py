"""What a jitted function may not do, and failures: named, and nothing has changed or is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, _native_programs
from tests import tiny
from tests.conftest import settled_counts
from tests.test_jit import NORM, PAGED, bits, f16, f32, grown


def refusals() -> list[tuple[str, type[Exception], Callable[..., Any]]]:
    """What a message has to say, and a function of a state and an array that should raise it when it is recorded."""
    weights, token, held = tiny.layer(PAGED), np.zeros((1, 8, 256), np.float16), f16(2)
    unsupported = pf.UnsupportedError
    return [
        (r"values of an array", unsupported, lambda s, x: np.asarray(x)),
        (r"values of an array", unsupported, lambda s, x: x.tolist()),
        (r"values of an array", unsupported, lambda s, x: pf.rms_norm(x, NORM)[0, ...] if x.item() else x),
        (r"values of an array", unsupported, lambda s, x: pf.rms_norm(x, NORM).astype(np.float32)),
        (r"values of an array", unsupported, lambda s, x: pf.array(pf.swiglu(held, held), np.float32)),
        (r"^length: not known", unsupported, lambda s, x: s.length),
        (r"^length: not known", unsupported, lambda s, x: len(pf.causal_attention(s, f32(1), weights)[0])),
        (r"^length: not known", unsupported, lambda s, x: s.truncate(0)),
        (r"^length: not known", unsupported, lambda s, x: s.keys()),
        (r"^pages: not known", unsupported, lambda s, x: s.pages),
        (r"\[state_append\] cannot be part", unsupported, lambda s, x: s.append(token, token)),
        (r"\[truncate\] cannot be part", unsupported, lambda s, x: pf.init_state(PAGED).truncate(0)),
        (r"\[state_read\] cannot be part", unsupported, lambda s, x: pf.init_state(PAGED).keys()),
        (r"cannot be part", unsupported, lambda s, x: pf.dflash2_conv(x, f32(2), f32(2), side=0, rows=1)),
        (r"tokens: inside a jitted function", unsupported, lambda s, x: pf.embed(pf.argmax(f32(2)), x)),
        (r"targets: inside a jitted", unsupported, lambda s, x: pf.cross_entropy(f32(2), pf.argmax(f32(2)))),
        (r"outputs: output 1 is a view of an input", unsupported, lambda s, x: (pf.swiglu(x, x), x[-1:])),
        (r"outputs: output 0 .* not made", unsupported, lambda s, x: held),
        (r"outputs: output 0 .* not made", unsupported, lambda s, x: {"host": np.zeros(3, np.float32)}),
        (r"outputs: state 0 was not made", unsupported, lambda s, x: pf.init_state(PAGED)),
        (r"hashable values, got set", pf.InvalidArgument, lambda s, x: {1}),
        (r"\] up: expected", pf.InvalidArgument, lambda s, x: pf.swiglu(x, x[:1])),
        (r"^division by zero$", ZeroDivisionError, lambda s, x: (pf.causal_attention(s, f32(1), weights), 1 / 0)),
        (r"^$", KeyboardInterrupt, lambda s, x: interrupt(pf.causal_attention(s, f32(1), weights))),
        (r"tokens: expected 0…1, got 7", pf.InvalidArgument, lambda s, x: pf.embed([0, 7], x)),
    ]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_refusals__are_named_and_leave_no_recording(no_leaks: None) -> None:
    state, x = grown(5, PAGED), f16(2)
    before, shown, counts = pf.arena_stats()["used_pages"], bits(state), settled_counts()
    for number, (message, kind, function) in enumerate(refusals()):
        jitted = pf.jit(function)
        for _ in range(2):  # the second time as the first: nothing was kept
            with pytest.raises(kind, match=message) as caught:
                jitted(state, x)
            del caught
        # This thread records no longer: values can be read, and states appended to.
        assert (np.asarray(pf.swiglu(x, x)).shape, state.truncate(3).length) == ((2, 32), 3), number
        del jitted
    assert (pf.arena_stats()["used_pages"], bits(state)) == (before, shown)
    del function
    assert settled_counts() == counts


def test_refusals__inside_do_not_end_the_recording(no_leaks: None) -> None:
    """A function may try something and go another way."""

    def function(x: pf.Array) -> pf.Array:
        try:
            return pf.array(np.asarray(x) * 2)
        except pf.UnsupportedError:
            with pytest.raises(pf.InvalidArgument):
                pf.swiglu(pf.rms_norm(x, NORM), x[:1])
            return pf.residual_add(x, x)

    jitted = pf.jit(function)
    for seed in range(3):
        np.testing.assert_array_equal(jitted(f16(2, seed=seed)), np.asarray(f16(2, seed=seed)) * 2)


def test_repr__inside_says_what_is_known(no_leaks: None) -> None:
    """Tracebacks and debuggers print what they find."""
    seen: list[str] = []
    pf.jit(lambda s, x: seen.extend(map(repr, (s, x, pf.swiglu(x, x)))))(grown(5), f16(2))
    assert seen[0] == "KVState(recorded, heads=1, head_dim=16)"
    assert seen[1:] == ["Array(recorded, shape=[2, 32], dtype=float16)"] * 2


def test_indices__out_of_range_in_a_replay_change_nothing(no_leaks: None) -> None:
    weights, embedding = tiny.layer(PAGED), f16(20)

    def step(state: pf.KVState, tokens: Any, targets: Any) -> Any:
        state, x = pf.causal_attention(state, pf.embed(tokens, embedding), weights)
        loss = pf.cross_entropy(x, targets)
        return state, loss, pf.embed(tokens, pf.rms_norm(x, NORM))  # of two rows: a second limit for tokens

    jitted, state = pf.jit(step), grown(7, PAGED)
    good = [np.array(v, np.int32) for v in ([1, 0], [31, 0])]
    jitted(state, *good)
    before = pf.arena_stats(), settled_counts(), bits(state)
    for name, limit, tokens, targets in [
        ("embed] tokens", 19, [1, 20], good[1]),
        ("embed] tokens", 19, [-1, 1], good[1]),
        ("embed] tokens", 1, [1, 2], good[1]),
        ("cross_entropy] targets", 31, good[0], [0, 32]),
    ]:
        arguments = [np.asarray(a, np.int32) for a in (tokens, targets)]
        with pytest.raises(pf.InvalidArgument, match=rf"\[{name}: expected 0…{limit}, got "):
            jitted(state, *arguments)
        assert (pf.arena_stats(), settled_counts(), bits(state)) == before
    assert bits(jitted(state, *good)) == bits(step(state, *good))
    with pytest.raises(pf.InvalidArgument, match="dimensions"):
        jitted(state, good[0][:1], good[1][0])


def test_out_of_pages__in_a_replay_changes_nothing() -> None:
    """Three layers' states; the arena has room for two. Claims, marks and counts go back to where they were."""
    device = pf.Device(threads=1, arena_bytes=8 * 65536)
    weights = tiny.layer(PAGED, device)
    step = pf.jit(lambda states, x: [pf.causal_attention(s, x, weights)[0] for s in states])
    room = np.zeros((2, 7, 8, 256), np.float16)
    empty = pf.init_state(PAGED, device=device)
    states, x = [empty.append(*room) for _ in range(3)], pf.array(tiny.rows(1), device=device)
    longer = step(states, x)  # 8 tokens each, full pages
    step([s.truncate(7) for s in states], x)  # branches, and lets go
    filler = [empty.append(*room[:, :1]) for _ in range(3)]
    gc.collect()
    before, shown, counts = device.arena_stats(), [bits(s) for s in longer], settled_counts()
    assert before["free_pages"] == 2
    for _ in range(2):
        with pytest.raises(pf.OutOfPages, match="needed 1 more"):
            step(longer, x)
        after = device.arena_stats()
        assert [after[n] for n in ("used_pages", "free_pages")] == [before[n] for n in ("used_pages", "free_pages")]
        assert ([bits(s) for s in longer], settled_counts()) == (shown, counts)
    filler.pop().close()
    copied = device.arena_stats()["copied_pages"]
    longest = step(longer, x)  # in place: no mark is left of the failed runs
    assert device.arena_stats()["copied_pages"] == copied
    assert [s.length for s in longest] == [9, 9, 9]
    results = [bits(state) for state in longest]
    for state in longest:
        state.close()
    assert [bits(pf.causal_attention(state, x, weights)[0]) for state in longer] == results


def test_out_of_pages__while_recording_leaves_nothing(no_leaks: None) -> None:
    with pf.Device(threads=1, arena_bytes=2 * 65536) as device:
        weights, x = tiny.layer(PAGED, device), pf.array(tiny.rows(8), device=device)
        step = pf.jit(lambda s, x, w: [pf.causal_attention(s, x, w)[0] for _ in range(3)])
        state = pf.init_state(PAGED, device=device)
        for _ in range(2):
            with pytest.raises(pf.OutOfPages):
                step(state, x, weights)
            gc.collect()
            assert device.arena_stats()["used_pages"] == 0
        state, _ = pf.causal_attention(state, x, weights)
        device.arena_stats()  # waits


def test_context__too_long_in_a_replay_is_refused(no_leaks: None) -> None:
    weights, jitted = tiny.layer(PAGED), pf.jit(pf.causal_attention)
    states = [grown(n, PAGED) for n in (3, 99, 100)]
    for state in states[:2]:
        assert bits(jitted(state, f32(1), weights)) == bits(pf.causal_attention(state, f32(1), weights))
    before = pf.arena_stats(), settled_counts()
    with pytest.raises(pf.InvalidArgument, match="maximum_context_tokens"):
        jitted(states[2], f32(1), weights)
    assert (pf.arena_stats(), settled_counts()) == before


def test_closed__arguments_and_devices(no_leaks: None) -> None:
    device = pf.Device(threads=1)
    weights = tiny.layer(PAGED, device)
    step = pf.jit(lambda s, x: pf.causal_attention(s, x, weights))
    state, x = pf.init_state(PAGED, device=device), pf.array(tiny.rows(1), device=device)
    longer, y = step(state, x)
    again = pf.array(np.asarray(y), device=device)
    again.close()
    for state_, x_ in ((longer, again), (step(state, x)[0], again)):
        with pytest.raises(pf.StateError, match="closed"):
            step(state_, x_)
    longer.close()
    with pytest.raises(pf.StateError, match="closed"):
        step(longer, x)
    for weight in weights:
        weight.close()
    assert bits(step(state, x)[1]) == bits(y)  # captured as they were
    device.close()
    with pytest.raises(pf.StateError, match="device was closed"):
        step(state, x)


def test_native__program_checks_what_it_is_given(no_leaks: None) -> None:
    """The C interface on its own: shapes, offsets, NULLs, and recordings that are not there."""
    device, state = pf.default_device().handle, grown(2, PAGED)
    x, weights = f16(3), tiny.layer(PAGED)
    with pytest.raises(pf.InvalidArgument, match="not recording"):
        _native_programs.program_end([x.tensor], [])
    for wrong in ([x[1:].tensor], [x[:2].tensor], [x.tensor, x.tensor]):
        with pytest.raises(pf.InvalidArgument, match="expected buffers of their own"):
            _native_programs.program_begin(device, wrong, [])
    with pytest.raises(pf.InvalidArgument, match="state 1 comes twice"):
        _native_programs.program_begin(device, [], [state.handle] * 2)
    _native_programs.program_begin(device, [x.tensor], [state.handle])
    with pytest.raises(pf.InvalidArgument, match="recording already"):
        _native_programs.program_begin(device, [x.tensor], [])
    y = pf.swiglu(x, x)
    new, _ = pf.causal_attention(pf.KVState(pf.default_device(), PAGED, state.handle, 2), f32(1), weights)
    program = _native_programs.program_end([y.tensor], [new.handle])
    other, tall = pf.init_state(tiny.LAYER), f16(9)
    for tensor, handle, message in [
        (f16(2), state, r"expected F16 \[3, 32\] for input 0"),
        (f32(3), state, r"expected F16 \[3, 32\] for input 0 as it was recorded, got F32"),
        (x, other, r"state 0 is not of the kind"),
    ]:
        with pytest.raises(pf.InvalidArgument, match=message):
            _native_programs.program_run(program, [tensor.tensor], [handle.handle], 1, [1])
    buffers, _, lengths = _native_programs.program_run(program, [tall[4:7].tensor], [grown(6, PAGED).handle], 1, [1])
    assert (_native.buffer_view(buffers[0]).tobytes(), lengths) == (bits(pf.swiglu(tall[4:7], tall[4:7]))[3], [7])
    null, new = _native.ffi.NULL, _native.ffi.new
    states, sizes, made = new("ferrum_state *[]", [state.handle[0]]), new("uint32_t[]", [1]), new("ferrum_state *[1]")
    for outs, groups, message in [
        ([null], 1, r"out_arrays\[i\]"),
        ([new("ferrum_buffer **")], 0, "expected groups of 1 states in all, got 0"),
    ]:
        results = new("ferrum_buffer **[]", outs), groups, sizes, new("ferrum_state **[]", [made]), null
        with pytest.raises(pf.InvalidArgument, match=message):
            _native._check(_native.lib.ferrum_program_run(program[0], x.tensor, null, states, *results))
    assert made[0] == null


FORK = """
import os, sys
import numpy as np
import pyferrum as pf
model = pf.load(sys.argv[1])
x = pf.array(np.ones((2, 8), np.float16))
step, outside = pf.jit(pf.swiglu), pf.jit(lambda x: pf.swiglu(x, x))
state, _ = model.forward(model.init_state(), [1, 2, 3])
expected, scores = step(x, x).tolist(), model.forward(state, [4])[1].tolist()

def child():
    for use in (lambda: step(x, x), lambda: outside(x), lambda: model.forward(state, [4])):
        try:
            use()
        except pf.StateError as error:
            assert "fork" in str(error), error
        else:
            raise SystemExit("went through in the child")
    with pf.Device(threads=1) as own:
        for _ in range(2):
            assert step(*[pf.array(np.ones((2, 8), np.float16), device=own)] * 2).tolist() == expected
    return 0

pid = os.fork()
if pid == 0:
    sys.exit(child())
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert step(x, x).tolist() == expected and outside(x).tolist() == expected
assert model.forward(state, [4])[1].tolist() == scores
"""


def test_fork__child_gets_errors_and_records_on_a_device_of_its_own(tmp_path: Path) -> None:
    result = tiny.python(FORK, tiny.write_tiny(tmp_path))
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")
