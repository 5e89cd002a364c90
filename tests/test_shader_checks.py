"""Static checks of the shaders, and that each of these checks finds what it is for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyferrum import _native
from tests.softmetal import checks
from tests.softmetal.emulator.generate import SignatureError, parse

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="clang-19 with other languages; Apple's compiler follows"
)


@pytest.mark.parametrize("path", checks.shaders(), ids=lambda path: path.stem)
def test_address_spaces(path: Path) -> None:
    assert checks.check_a(path) == []
    assert checks.check_b(path) == []


@pytest.mark.parametrize("path", checks.sources(), ids=lambda path: path.name)
def test_dialect(path: Path) -> None:
    assert checks.lint(path) == []


def test_every_kernel_exists_once() -> None:
    """What the planner can name, the shaders have, and nothing else."""
    names = [kernel.name for path in checks.shaders() for kernel in checks.kernels(path)]
    assert sorted(names) == sorted(_native.kernel_names())


# ---- The checks themselves

KERNEL = """#include "common.h"
struct page {
    device half *data;
};
kernel void probe(device float *y [[buffer(0)]], constant float &c [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {
    FERRUM_THREADGROUP(float, shared, 32)
    STATEMENT
    y[lane + 1] = shared[lane];
}
"""


def kernel_of(statement: str) -> str:
    return KERNEL.replace("STATEMENT", statement)


def write(folder: Path, text: str, name: str = "probe.metal") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_sound_kernel_passes(tmp_path: Path) -> None:
    path = write(tmp_path, kernel_of("shared[lane] = c;"))
    assert checks.check_a(path) == checks.check_b(path) == checks.lint(path) == []


@pytest.mark.parametrize(
    ("statement", "by_a"),
    [
        ("threadgroup float *p = y; p[0] = c;", True),
        ("device float *p = shared; p[0] = c;", True),
        ("thread float *p = y; p[0] = c;", True),
        ("device float *p = &c; p[0] = 1.0f;", True),
        ("c = 1.0f;", True),
        ("device half *p = ((threadgroup page *)shared)->data + y;", True),
        ("threadgroup float *p = (threadgroup float *)y; p[0] = c;", False),  # a cast: only B objects
        ("constant float *p = (constant float *)y; y[1] = p[0];", False),
        ("y[0] = undeclared;", True),
    ],
)
def test_mixed_address_spaces_are_found(statement: str, by_a: bool, tmp_path: Path) -> None:
    path = write(tmp_path, kernel_of(statement))
    assert any("error:" in line for line in checks.check_b(path))
    assert any("error:" in line for line in checks.check_a(path)) == by_a


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("y[0] = float(double(c));", "no double"),
        ("float4 v = (float4)(c);", "constructor"),
        ("float4 v = static_cast<float4>(half4(c));", "constructor"),
        ("threadgroup float more[4];", "FERRUM_THREADGROUP"),
        ("y[0] = metal::exp(c);", "metal::"),
        ("y[0] = fast::exp(c);", "precise"),
        ("y[lane * p.query_stride] = c;", "32-bit offset"),
        ("y[0] = probe(c);", "calls itself"),
        ("atomic_fetch_add_explicit(y, 1, 0);", "atomics"),
        ("uint row __attribute__((aligned(4)));", "__attribute__((__x__))"),
    ],
)
def test_dialect_faults_are_found(statement: str, why: str, tmp_path: Path) -> None:
    # Some of these do not compile either; the lint must say so before anybody tries on a Mac.
    path = write(tmp_path, kernel_of(statement))
    found = checks.lint(path)
    line = 5 if why == "calls itself" else 8
    assert any(why in complaint and complaint.startswith(f"probe.metal:{line}: ") for complaint in found), found


def test_comments_and_wide_offsets_are_not_faults(tmp_path: Path) -> None:
    path = write(tmp_path, kernel_of("y[ulong(lane) * p.query_stride] = c;  // double, metal::, (float4)x"))
    assert checks.lint(path) == []


def test_only_the_common_header_includes_the_library(tmp_path: Path) -> None:
    assert checks.lint(write(tmp_path, "#include <metal_stdlib>\n")) != []
    assert checks.lint(write(tmp_path, "#include <metal_stdlib>\n", "common.h")) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("device float *y", "without its attribute"),
        ("device float *y [[buffer(0)]], uint lane", "without its attribute"),
        ("device float *y [[buffer(0)]], uint lane [[thread_position_in_nothing]]", "is not one of ours"),
        ("float *y [[buffer(0)]]", "device or constant"),
        ("threadgroup float *memory [[threadgroup(1)]]", "threadgroup(0)"),
    ],
)
def test_signatures_are_checked(arguments: str, why: str) -> None:
    with pytest.raises(SignatureError, match=why.replace("(", r"\(").replace(")", r"\)")):
        parse(f"kernel void probe({arguments}) {{}}")


def test_signatures_are_read() -> None:
    kernels, constants = parse(
        "emu_constant(has_bias, 2);\n"
        "kernel void one(device const half *x [[buffer(FIRST)]], device half *y [[buffer(2)]],\n"
        "  device const uchar *bias [[buffer(3), function_constant(has_bias)]], constant params &p [[buffer(4)]],\n"
        "  uint3 group [[threadgroup_position_in_grid]]) { y[0] = x[0]; }\n"
    )
    assert constants == ["has_bias"]
    (kernel,) = kernels
    assert [a.name for a in kernel.arguments] == ["x", "y", "bias", "p", "group"]
    assert [a.writes for a in kernel.arguments[:4]] == [False, True, False, False]
    assert kernel.arguments[0].index == "FIRST"
    assert kernel.arguments[2].constant == "has_bias"
