"""A kernel that this project did not write runs on the emulator and agrees with the project that did.

MLX's single-query attention, as its macOS wheel ships it, against MLX's own CPU device. So the emulator is not merely
consistent with our shaders. The wheel is downloaded into the build folder; without it these tests fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.softmetal.runner import SOFT, VARIANTS, Program, make

if sys.platform != "linux":
    pytest.skip("the emulator runs on Linux", allow_module_level=True)

import mlx.core as mx

FOLDER = SOFT / "outside"
KERNEL = "mlx/include/mlx/backend/metal/kernels/sdpa_vector.h"


def wheel() -> Path:
    """The macOS wheel of mlx-metal, in the version of the mlx installed here."""
    name = f"mlx_metal-{mx.__version__}-py3-none-macosx_14_0_arm64.whl"
    if not (FOLDER / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "macosx_14_0_arm64", "--dest", str(FOLDER), f"mlx-metal=={mx.__version__}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"no wheel of mlx-metal {mx.__version__}: {done.stderr}"
    return FOLDER / name


def for_the_emulator(source: str) -> str:
    """What our own common.h says by macros: function constants and threadgroup arrays. Nothing else is touched."""
    source, includes = re.subn(r"#include <metal_simdgroup>\n", "", source)
    # Only the two-pass variant, which is not instantiated here, has a constant that is a number.
    source, numbers = re.subn(
        r"constant int (\w+) \[\[function_constant\(\d+\)\]\];", r"static constexpr int \1 = 32;", source
    )
    source, constants = re.subn(
        r"constant bool (\w+) \[\[function_constant\((\d+)\)\]\];", r"FERRUM_CONSTANT(\1, \2)", source
    )
    source, arrays = re.subn(r"threadgroup (\w+) (\w+)\[([^\]]+)\];", r"FERRUM_THREADGROUP(\1, \2, \3)", source)
    assert (includes, numbers, constants) == (1, 1, 6)
    assert arrays >= 3
    return source


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel()) as contents:
        text = for_the_emulator(contents.read(KERNEL).decode())
    header = FOLDER / "mlx_sdpa_vector.h"
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    make("softmetal-outside")


TYPES = {
    "f32": (np.dtype(np.float32), mx.float32),
    "f16": (np.dtype(np.float16), mx.float16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), mx.bfloat16),
}


@dataclass(frozen=True)
class Case:
    type: str
    head_dim: int
    query_heads: int
    key_value_heads: int
    queries: int
    keys: int
    causal: bool = False
    mask: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        extras = "".join(f"-{name}" for name in ("causal", "mask", "sinks") if getattr(self, name))
        heads = f"{self.query_heads}:{self.key_value_heads}"
        return f"{self.type}-{self.head_dim}-{heads}-{self.queries}x{self.keys}{extras}"


CASES = [
    *[Case(type, 64, 4, 2, 1, keys) for type in TYPES for keys in (1, 31, 32, 33, 300)],
    *[Case(type, 128, 3, 1, 1, 77) for type in TYPES],
    Case("f32", 96, 2, 2, 1, 50),
    Case("f32", 256, 2, 1, 1, 65),
    *[Case(type, 64, 4, 4, 5, 40, causal=True) for type in TYPES],
    Case("f32", 64, 4, 2, 3, 70, mask=True),
    Case("f16", 64, 4, 2, 1, 70, sinks=True),
]


def inputs(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(case.keys * 100 + case.head_dim)
    dtype = TYPES[case.type][0]
    shapes = {
        "q": (case.query_heads, case.queries, case.head_dim),
        "k": (case.key_value_heads, case.keys, case.head_dim),
        "v": (case.key_value_heads, case.keys, case.head_dim),
    }
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    if case.mask:
        arrays["mask"] = rng.random((case.query_heads, case.queries, case.keys)) < 0.6
        arrays["mask"][:, :, 0] = True
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.query_heads).astype(dtype)
    return arrays


def on_the_emulator(case: Case, variant: str, seed: int, arrays: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Arguments, constants and grid as MLX's host code gives them."""
    work = Program(SOFT / variant / "run-outside", folder)
    dtype = TYPES[case.type][0]
    numbers: dict[int, np.ndarray] = {
        4: np.array([case.query_heads // case.key_value_heads], np.int32),
        5: np.array([case.keys], np.int32),
        6: np.array([case.keys * case.head_dim], np.uint64),
        7: np.array([case.head_dim], np.uint64),
        8: np.array([case.keys * case.head_dim], np.uint64),
        9: np.array([case.head_dim], np.uint64),
        10: np.array([case.head_dim**-0.5], np.float32),
    }
    bindings = {0: "q", 1: "k", 2: "v", 3: "out"}
    constants = case.causal << 22
    if case.mask:
        constants |= 1 << 20 | 1 << 23
        bindings[11] = "mask"
        strides = (1, case.keys, case.queries * case.keys)
        numbers |= {13 + i: np.array([stride], np.int32) for i, stride in enumerate(strides)}
    if case.sinks:
        constants |= 1 << 25
        bindings[16] = "sinks"
        numbers[17] = np.array([case.query_heads], np.int32)
    for name, array in arrays.items():
        work.buffer(name, array)
    for slot, number in numbers.items():
        bindings[slot] = f"number{slot}"
        work.buffer(bindings[slot], number)
    work.zeros("out", arrays["q"].size, dtype)
    work.order(seed)
    kernel = f"mlx_sdpa_vector_{case.type}_{case.head_dim}"
    work.dispatch(kernel, (case.query_heads, case.queries), (1024,), bindings, constants)
    work.save("out", dtype)
    result = work.run()
    assert result.status == 0, result.message
    return result.outputs["out"].reshape(arrays["q"].shape).astype(np.float64)


def on_mlx(case: Case, arrays: dict[str, np.ndarray]) -> np.ndarray:
    dtype = TYPES[case.type][1]
    with mx.stream(mx.cpu):
        given = {name: mx.array(array.astype(np.float32)).astype(dtype)[None] for name, array in arrays.items()}
        if case.mask:
            given["mask"] = mx.array(arrays["mask"])[None]
        y = mx.fast.scaled_dot_product_attention(
            given["q"],
            given["k"],
            given["v"],
            scale=case.head_dim**-0.5,
            mask="causal" if case.causal else given.get("mask"),
            sinks=given["sinks"][0] if case.sinks else None,
        )
        return np.array(y.astype(mx.float32))[0].astype(np.float64)


# Values of about one: a few float32 roundings; of the 16-bit types, one or two of the result's.
TOLERANCE = {"f32": 1e-6, "f16": 1.5e-3, "bf16": 1e-2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_mlx(case: Case, tmp_path: Path) -> None:
    arrays = inputs(case)
    got = on_the_emulator(case, "plain", case.keys % 3, arrays, tmp_path)
    np.testing.assert_allclose(got, on_mlx(case, arrays), atol=TOLERANCE[case.type], rtol=0)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "plain"])
def test_sanitizers_have_nothing_against_it(variant: str, tmp_path: Path) -> None:
    """It is a correct kernel, so whatever they said here would be a false report."""
    case = Case("f32", 64, 2, 1, 1, 100)
    arrays = inputs(case)
    plain = on_the_emulator(case, "plain", 0, arrays, tmp_path)
    for seed in (0, 1):
        np.testing.assert_array_equal(on_the_emulator(case, variant, seed, arrays, tmp_path), plain)
