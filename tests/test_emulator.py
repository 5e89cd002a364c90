"""The emulator itself: what its shim computes, and that each of its detectors detects.

Every planted fault lies in tests/softmetal/faults, beside a correct twin that no detector may complain about. Without
these tests a green run of the real shaders would say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.softmetal.runner import ASAN_STATUS, FAILED_DISPATCH, SOFT, TSAN_STATUS, VARIANTS, Program, Result, make

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux")

# Kernel: threadgroups, threads, floats in x and in y. All read x at slot 0 and write y at slot 1.
SHAPES = {
    "missing_first_barrier": (1, 128, 128, 128),
    "missing_second_barrier": (1, 128, 512, 512),
    "missing_simdgroup_barrier": (1, 128, 128, 128),
    "overlapping_threadgroups": (3, 32, 128, 128),
    "same_output_twice": (3, 32, 32, 32),
    "divergent_sum": (1, 64, 64, 64),
    "two_sums": (1, 32, 32, 32),
    "divergent_barrier": (1, 128, 128, 128),
    "two_barriers": (1, 64, 64, 64),
    "divergent_store": (1, 32, 64, 64),
    "past_an_array": (1, 64, 64, 64),
    "never_written": (1, 64, 64, 64),
    "too_much": (1, 64, 64, 64),
    "misaligned": (1, 4, 64, 64),
}
VALUES = np.random.default_rng(5).uniform(0.0, 1.0, 512).astype(np.float32)


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    make("softmetal-faults")


def program(variant: str, folder: Path) -> Program:
    return Program(SOFT / variant / "run-faults", folder)


def run(variant: str, kernel: str, folder: Path, seeds: tuple[int, ...] = (0,)) -> Result:
    """One dispatch a seed, each with outputs of its own: y0, y1 …"""
    groups, threads, inputs, outputs = SHAPES[kernel.removesuffix("_correct")]
    work = program(variant, folder)
    work.buffer("x", VALUES[:inputs])
    for i, seed in enumerate(seeds):
        work.order(seed)
        work.zeros(f"y{i}", outputs)
        work.dispatch(kernel, (groups,), (threads,), {0: "x", 1: f"y{i}"})
        work.save(f"y{i}")
    return work.run()


# ---- Races

RACES = [
    "missing_first_barrier",
    "missing_second_barrier",
    "missing_simdgroup_barrier",
    "overlapping_threadgroups",
]


@pytest.mark.parametrize("kernel", [*RACES, "same_output_twice"])
def test_thread_sanitizer_finds_the_race(kernel: str, tmp_path: Path) -> None:
    """Also where every order of threads gives the same numbers, as in same_output_twice."""
    result = run("tsan", kernel, tmp_path)
    assert result.status == TSAN_STATUS
    assert "data race" in result.message
    file = "overlapping_threadgroups" if kernel == "same_output_twice" else kernel
    assert f"{file}.metal:" in result.message


@pytest.mark.parametrize("kernel", RACES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_thread_sanitizer_is_content_with_the_twin(kernel: str, seed: int, tmp_path: Path) -> None:
    result = run("tsan", f"{kernel}_correct", tmp_path, (seed,) * 3)
    assert result.status == 0, result.message


@pytest.mark.parametrize("kernel", ["missing_first_barrier", "missing_second_barrier", "missing_simdgroup_barrier"])
def test_run_ahead_shows_the_race(kernel: str, tmp_path: Path) -> None:
    """Random orders give a wrong number where a barrier is missing, and the same numbers where none is."""
    seeds = tuple(range(1, 21))
    (tmp_path / "right").mkdir()
    right = run("plain", f"{kernel}_correct", tmp_path / "right", (0, *seeds))
    wrong = run("plain", kernel, tmp_path, seeds)
    assert right.status == wrong.status == 0
    expected = right.outputs["y0"]
    for name, values in right.outputs.items():
        np.testing.assert_array_equal(values, expected, err_msg=name)
    differing = [name for name, values in wrong.outputs.items() if not np.array_equal(values, expected)]
    assert len(differing) >= 10


def test_an_order_is_repeatable(tmp_path: Path) -> None:
    first = run("plain", "missing_second_barrier", tmp_path, (7,))
    again = run("plain", "missing_second_barrier", tmp_path, (7,))
    np.testing.assert_array_equal(first.outputs["y0"], again.outputs["y0"])


# ---- Memory


@pytest.mark.parametrize(("kernel", "status"), [("past_a_page", ASAN_STATUS), ("past_a_page_correct", 0)])
def test_address_sanitizer_knows_a_page(kernel: str, status: int, tmp_path: Path) -> None:
    work = program("asan", tmp_path)
    pages = VALUES[:128].reshape(2, 64).astype(np.float16)
    work.buffer("page0", pages[0])
    work.buffer("page1", pages[1])
    work.table("pages", "page0", "page1")
    work.zeros("y", 2)
    work.dispatch(kernel, (2,), (32,), {0: "pages", 1: "y"})
    work.save("y")
    result = work.run()
    assert result.status == status, result.message
    if status:
        assert "heap-buffer-overflow" in result.message
        assert "past_a_page.metal:" in result.message
    else:
        np.testing.assert_allclose(result.outputs["y"], pages.astype(np.float32).sum(1), rtol=1e-6)


@pytest.mark.parametrize(("kernel", "status"), [("past_an_array", ASAN_STATUS), ("past_an_array_correct", 0)])
def test_address_sanitizer_knows_threadgroup_memory(kernel: str, status: int, tmp_path: Path) -> None:
    result = run("asan", kernel, tmp_path)
    assert result.status == status, result.message
    if status:
        assert "threadgroup_memory.metal:" in result.message


def test_misaligned_load(tmp_path: Path) -> None:
    result = run("asan", "misaligned", tmp_path)
    assert result.status == ASAN_STATUS
    assert "misaligned address" in result.message
    assert "threadgroup_memory.metal:" in result.message


@pytest.mark.parametrize("seed", [0, 3])
def test_fresh_threadgroup_memory_is_nan(seed: int, tmp_path: Path) -> None:
    assert np.isnan(run("plain", "never_written", tmp_path, (seed,)).outputs["y0"]).all()


# ---- Divergence, and other dispatches that cannot go on


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("kernel", "parts"),
    [
        ("divergent_sum", ["simd_sum (divergent_sum.metal:", "of the same SIMD-group has ended"]),
        ("two_sums", ["simd_sum (divergent_sum.metal:", "simd_max (divergent_sum.metal:", "of one SIMD-group"]),
        ("divergent_barrier", ["threadgroup_barrier (divergent_barrier.metal:", "has ended"]),
        ("two_barriers", ["waits at threadgroup_barrier (", "and thread (", "at threadgroup_barrier ("]),
        ("divergent_store", ["has loaded or stored", "simdgroup_barrier (divergent_barrier.metal:"]),
        ("too_much", ["threadgroup memory: 32772 bytes with array values, the limit is 32768"]),
    ],
)
def test_failure_is_named(variant: str, kernel: str, parts: list[str], tmp_path: Path) -> None:
    result = run(variant, kernel, tmp_path)
    assert result.status == FAILED_DISPATCH, result.message
    assert result.message.startswith(f"{kernel}, threadgroup (0, 0, 0): ")
    for part in parts:
        assert part in result.message
    if kernel != "too_much":  # both threads
        assert result.message.count("thread (") == 2, result.message


def test_divergence_names_the_right_threads(tmp_path: Path) -> None:
    result = run("plain", "divergent_sum", tmp_path)
    summing = np.flatnonzero(VALUES[:32] > 0.5)[0]
    assert f"thread ({summing}, 0, 0) waits in simd_sum" in result.message


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", ["divergent_sum", "divergent_barrier"])
def test_twins_of_divergent_kernels(variant: str, kernel: str, tmp_path: Path) -> None:
    result = run(variant, f"{kernel}_correct", tmp_path, (0, 1, 2))
    assert result.status == 0, result.message


def test_unusable_dispatches(tmp_path: Path) -> None:
    for kernel, groups, threads, bindings, size, message in [
        ("where", (1,), (1025,), {0: "y"}, 0, "threads of a threadgroup: (1025, 1, 1)"),
        ("where", (0,), (32,), {0: "y"}, 0, "threadgroups: (0, 1, 1)"),
        ("where", (1,), (32,), {}, 0, "buffer 0 is unbound"),
        ("optional", (1,), (32,), {0: "y"}, 40000, "threadgroup memory: 40000 bytes"),
    ]:
        work = program("plain", tmp_path)
        work.zeros("y", 4096)
        work.dispatch(kernel, groups, threads, bindings, threadgroup_bytes=size)
        result = work.run()
        assert result.status == FAILED_DISPATCH
        assert message in result.message


# ---- The shim's arithmetic


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_positions(variant: str, seed: int, tmp_path: Path) -> None:
    work = program(variant, tmp_path)
    work.order(seed)
    work.zeros("y", 3 * 2 * 80 * 8, np.uint32)
    work.dispatch("where", (3, 2), (40, 2), {0: "y"})
    work.save("y", np.uint32)
    result = work.run()
    assert result.status == 0, result.message
    y = result.outputs["y"].reshape(2, 3, 2, 40, 8)
    for at in np.ndindex(2, 3, 2, 40):
        group_y, group_x, thread_y, thread_x = at
        index = 40 * thread_y + thread_x
        expected = [group_x, group_y, thread_x, thread_y, index, index % 32, index // 32, 40002]
        assert y[at].tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_simd_functions(seed: int, tmp_path: Path) -> None:
    x = np.arange(1, 33, dtype=np.float32)
    work = program("plain", tmp_path)
    work.order(seed)
    work.buffer("x", x)
    work.zeros("y", 15 * 32)
    work.dispatch("lanes", (1,), (32,), {0: "x", 1: "y"})
    work.save("y")
    rows = work.run().outputs["y"].reshape(15, 32)
    lane = np.arange(32)
    expected = [
        np.full(32, x.sum()),
        np.full(32, 32),
        np.full(32, 1),
        x[::-1],
        x[lane ^ 5],
        np.where(lane + 3 < 32, x[(lane + 3) % 32], x),
        np.where(lane >= 3, x[lane - 3], x),
        np.full(32, x[7]),
        np.cumsum(x),
        np.cumsum(x) - x,
        np.ones(32),
        np.ones(32),
        np.full(32, x.sum()),
        np.full(32, 2 * x.sum()),
        np.ones(32),
    ]
    for row, right in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row, right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices(variant: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(-8, 8, (8, 16)).astype(np.float16)
    b = rng.integers(-8, 8, (8, 8)).astype(np.float16)
    work = program(variant, tmp_path)
    work.buffer("a", a)
    work.buffer("b", b)
    work.zeros("y", 192)
    work.dispatch("matrices", (1,), (32,), {0: "a", 1: "b", 2: "y"})
    work.save("y")
    result = work.run()
    assert result.status == 0, result.message
    product, turned, elements = result.outputs["y"].reshape(3, 8, 8)
    np.testing.assert_array_equal(product, 1 + a[:, :8].astype(np.float32) @ b)
    np.testing.assert_array_equal(turned, 2 * (a[:, :8].astype(np.float32) @ b.T))
    np.testing.assert_array_equal(elements, np.arange(64).reshape(8, 8))


def test_numbers(tmp_path: Path) -> None:
    h = np.array([0.1, 0.7, 3.3, 2.0], np.float16)
    data = np.arange(16, dtype=np.uint8)
    work = program("plain", tmp_path)
    work.buffer("h", h)
    work.buffer("bytes", data)
    work.zeros("y", 16)
    work.dispatch("numbers", (1,), (32,), {0: "h", 1: "bytes", 2: "y"})
    work.save("y")
    y = work.run().outputs["y"]
    v = np.array([h[0], h[1], 3, 4], np.float32)
    expected = [
        np.float16(h[0] * h[1]) + h[2],
        np.float32(1.1),
        np.float32(1.1) + np.float32(1e-9),
        v[0],
        4,
        ((v[0] + v[1]) + v[2]) + v[3],
        data.view(np.float16)[3],
        data[2],
        (1 + 2.0**-12) ** 2 - 1,
        2,
        1,
        1,
        2,
        np.inf,
        1.5,
        np.exp(np.float32(1)),
    ]
    np.testing.assert_array_equal(y[:15], np.array(expected[:15], np.float32))
    np.testing.assert_allclose(y[15], expected[15], rtol=2e-7)


def test_function_constants_and_dynamic_memory(tmp_path: Path) -> None:
    work = program("plain", tmp_path)
    work.buffer("extra", np.full(32, 100, np.float32))
    for name, constants, bindings in [("without", 0, {0: "y"}), ("with", 1 << 20, {0: "y", 1: "extra"})]:
        work.zeros("y", 32)
        work.dispatch("optional", (1,), (32,), bindings, constants, threadgroup_bytes=128)
        work.save("y", as_name=name)
    result = work.run()
    np.testing.assert_array_equal(result.outputs["without"], np.arange(32)[::-1])
    np.testing.assert_array_equal(result.outputs["with"], np.arange(32)[::-1] + 100)
