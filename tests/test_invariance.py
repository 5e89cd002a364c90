"""Bit for bit: chunks, threads, splits over the context, and instruction sets change nothing."""

from __future__ import annotations

import numpy as np
import pytest

import pyferrum as pf
from tests.cases.attention import CASES, Case
from tests.cases.weights import ALL_FORMATS, random_weight

SETS = ("avx512", "avx2", "neon", "portable")


def devices() -> dict[str, pf.Device]:
    """Every instruction set of this machine, with one thread and with three."""
    found = {}
    for name in SETS:
        try:
            found |= {f"{name}, {n} threads": pf.Device(instruction_set=name, threads=n) for n in (1, 3)}
        except pf.DeviceError:
            continue
    return found


DEVICES = devices()


def on(device: pf.Device, weight: object) -> object:
    """The weight on another device."""
    if isinstance(weight, pf.BlockArray):
        return pf.block_array(weight._bytes(), weight.format, weight.shape, device=device)
    return None if weight is None else pf.array(np.asarray(weight), device=device)


def run(case: Case, device: pf.Device, xs: list[np.ndarray], weights: pf.AttentionWeights) -> list[np.ndarray]:
    local = pf.AttentionWeights(*(on(device, weight) for weight in weights))
    state, ys = pf.init_state(case.config(), device=device), []
    for x in xs:
        state, y = pf.causal_attention(state, pf.array(x, device=device), local)
        ys.append(np.asarray(y))
    return [*ys, np.asarray(state.keys()), np.asarray(state.values())]


def test_devices__the_portable_path_is_always_compared() -> None:
    assert {"portable, 1 threads", "portable, 3 threads"} <= set(DEVICES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_attention__has_the_same_bits_on_every_instruction_set_and_thread_count(case: Case) -> None:
    rng = np.random.default_rng(0)
    weights = case.weights(rng)
    # The portable path is slow: at most 300 tokens of the long cases.
    chunks = [min(tokens, 300) for tokens in case.chunks[0]]
    xs = [rng.standard_normal((tokens, case.hidden)).astype(case.dtype) for tokens in chunks]
    (_, first), *rest = ((name, run(case, device, xs, weights)) for name, device in DEVICES.items())
    for name, results in rest:
        for a, b in zip(first, results, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_attention__has_the_same_bits_however_it_is_cut(case: Case) -> None:
    rng = np.random.default_rng(1)
    weights, config = case.weights(rng), case.config()
    total = min(sum(case.chunks[0]) + 30, 400)
    x = rng.standard_normal((total, case.hidden)).astype(case.dtype)
    whole, expected = pf.causal_attention(pf.init_state(config), x, weights)
    cuts = [np.sort(rng.choice(np.arange(1, total), 5, replace=False)) for _ in range(2)]
    for cut in (np.arange(1, total) if total < 60 else [1, total - 1], *cuts):
        state, ys = pf.init_state(config), []
        for part in np.split(x, cut):
            state, y = pf.causal_attention(state, part, weights)
            ys.append(np.asarray(y))
        np.testing.assert_array_equal(np.concatenate(ys), expected)
        np.testing.assert_array_equal(state.keys(), whole.keys())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_attention__a_token_of_nan_reaches_no_earlier_one(case: Case) -> None:
    """Nor, behind a window, a later one: rows that go together read the values that each of them sees."""
    rng = np.random.default_rng(3)
    weights = case.weights(rng)
    x = rng.standard_normal((min(sum(case.chunks[0]) + 30, 300), case.hidden)).astype(case.dtype)
    broken = x.copy()
    at = len(x) // 2
    broken[at] = np.nan
    for name, device in DEVICES.items():
        if name.startswith("portable") and "3" in name:
            continue  # a slow path, and threads are not the matter
        good, bad = run(case, device, [x], weights)[0], run(case, device, [broken], weights)[0]
        np.testing.assert_array_equal(good[:at], bad[:at], err_msg=name)
        assert np.isnan(bad[at]).all(), name
        if window := case.config().sliding_window:
            np.testing.assert_array_equal(good[at + window :], bad[at + window :], err_msg=name)


@pytest.mark.parametrize(("key_value_heads", "context"), [(2, 3000), (3, 750)])
def test_attention__a_split_over_the_context_has_the_bits_of_the_whole(key_value_heads: int, context: int) -> None:
    """One token over 3,000 is split into spans that several threads take; a block of 40 tokens is not. Pages of three
    heads end in five keys that are no whole tile."""
    case = Case("split", head_dim=64, query_heads=3 * key_value_heads, key_value_heads=key_value_heads)
    rng = np.random.default_rng(2)
    weights = case.weights(rng)
    x = rng.standard_normal((context + 40, case.hidden)).astype(np.float32)
    for device in DEVICES.values():
        local = pf.AttentionWeights(*(on(device, weight) for weight in weights))
        before, _ = pf.causal_attention(
            pf.init_state(case.config(), device=device), pf.array(x[:context], device=device), local
        )
        _, block = pf.causal_attention(before, pf.array(x[context:], device=device), local)
        state = before
        for i in range(40):
            state, y = pf.causal_attention(state, pf.array(x[context + i : context + i + 1], device=device), local)
            np.testing.assert_array_equal(np.asarray(y)[0], np.asarray(block)[i])
        if "avx" not in str(device):
            break  # one pass of the portable path is enough here


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_linear__has_the_same_bits_on_every_instruction_set(format: str) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, format, (35, 2560))
    x = rng.standard_normal((49, 2560)).astype(np.float16)
    results = {
        name: [
            np.asarray(pf.linear(pf.array(x[:rows], device=device), on(device, weight), dtype=np.float32))
            for rows in (1, 5, 13, 25, 49)
        ]
        for name, device in DEVICES.items()
    }
    (_, first), *rest = results.items()
    for name, other in rest:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_ops__have_the_same_bits_on_every_instruction_set() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((9, 1001)).astype(np.float32) * 5
    h = x.astype(np.float16)
    weight = rng.standard_normal(1001).astype(np.float32)

    def everything(device: pf.Device) -> list[np.ndarray]:
        local = pf.array(x, device=device)
        half = pf.array(h, device=device)
        results = (
            pf.rms_norm(local, weight),
            pf.rms_norm(half, weight),
            pf.swiglu(half, half),
            pf.residual_add(local, half),
            pf.cross_entropy(local, np.arange(9)),
            *pf.top_k(local, 20),
        )
        return [np.asarray(result) for result in results]

    (_, first), *rest = ((name, everything(device)) for name, device in DEVICES.items())
    for name, other in rest:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("formats", [("F16", "F32", "F16"), ("BF16", "F32", "F16")])
def test_attention__of_unprepared_weights_of_several_formats(formats: tuple[str, ...]) -> None:
    """Projections of one input run side by side, each thread with room of its own for the weights it lays out."""
    rng = np.random.default_rng(0)
    config = pf.AttentionConfig(hidden_size=256, query_heads=8, key_value_heads=8, head_dim=32)
    matrices = [random_weight(rng, format, (256, 256)) for format in (*formats, "F16")]
    x = rng.standard_normal((20, 256)).astype(np.float32)

    def run(device: pf.Device, times: int) -> list[bytes]:
        weights = pf.AttentionWeights(np.ones(256, np.float32), *(on(device, w) for w in matrices))
        state, local = pf.init_state(config, device=device), pf.array(x, device=device)
        return [np.asarray(pf.causal_attention(state, local, weights)[1]).tobytes() for _ in range(times)]

    (want,) = run(pf.Device(threads=1), 1)
    assert set(run(pf.Device(threads=5), 150)) == {want}


def test_program__norms_in_a_row_read_before_they_write() -> None:
    """A linear launch runs what comes before it row by row, unless a row written early is one still to be read."""
    rng = np.random.default_rng(0)
    device = pf.Device(threads=5)

    def half(*shape: int) -> pf.Array:
        return pf.array((rng.standard_normal(shape) / 8).astype(np.float16), device=device)

    first, second, last, one, two = half(512, 512), half(512, 512), half(256, 512), half(512), half(512)

    def of_one(x: pf.Array) -> pf.Array:
        wide = pf.linear(x, first, dtype=np.float32)
        return pf.linear(pf.rms_norm(pf.rms_norm(wide, one), two), last, dtype=np.float32)

    def of_two(x: pf.Array) -> pf.Array:
        branch = pf.linear(pf.linear(x, second), second)
        stream = pf.residual_add(pf.linear(x, first, dtype=np.float32), branch)
        return pf.linear(pf.rms_norm(pf.rms_norm(stream, one), two), last, dtype=np.float32)

    for function in (of_one, of_two):
        jitted = pf.jit(function)
        for rows in (128, 7):
            for _ in range(40):
                x = half(rows, 512)
                assert np.asarray(jitted(x)).tobytes() == np.asarray(function(x)).tobytes()
