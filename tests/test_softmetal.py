"""SoftMetal catches what it promises to catch, and the Metal device on it behaves: errors, order, caches, ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.softmetal.runner import ROOT, SOFT, make

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on macOS Metal itself is there")

LIBRARY = SOFT / "libferrum.so"


@pytest.fixture(scope="module")
def strict() -> Path:
    make("softmetal-strict")
    return SOFT / "strict" / "strict"


@pytest.fixture(scope="module")
def library() -> Path:
    """The library on SoftMetal. Its objects are the Makefile's, so that one builds it."""
    names = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    command = ["make", "-j2", f"PYTHON={sys.executable}", "softmetal"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return LIBRARY


# ---- SoftMetal itself

CASES = {
    # What is right, so that the other cases mean something.
    "barrier": "8",
    "copy": "5",
    "slabs": "9",
    "optional absent": "7",
    "no-copy": "made ",
    "source": "made",
    # Order: from last to first, where no barrier is; 3 + 1, doubled, becomes 3 doubled, + 1.
    "no barrier": "7",
    # Memory.
    "read past the end": 'kernel strict_copy: touches byte 256 of buffer "x", which has 256\nafter a copy',
    "undeclared slab": 'kernel strict_pages: touches byte 0 of buffer "slab 1", which is neither bound nor declared',
    "slab declared read-only": 'kernel strict_pages: writes byte 0 of buffer "slab 1", which it may only read',
    "freed while bound": 'kernel strict_copy: buffer "gone" was freed before the GPU was done with it',
    "freed but in a table": 'kernel strict_pages: touches byte 0 of buffer "gone", which was freed',
    "no-copy unmapped": "kernel strict_copy: touches memory of the caller's that is gone",
    "no-copy unaligned": "nil newBufferWithBytesNoCopy: pointer and length have to be multiples of the page size",
    "no-copy with half a page": "nil newBufferWithBytesNoCopy: pointer and length have to be multiples of the page",
    # Arguments and limits.
    "unbound": "kernel strict_copy: nothing is bound at index 0\nafter a copy",
    "bound where nothing is": "kernel strict_copy: has no argument at index 5",
    "bound for the dispatch before": "kernel strict_copy: nothing is bound at index 0",
    "optional unbound": "kernel strict_optional: nothing is bound at index 0",
    "too many threads": "kernel strict_copy: expected 1…1024 threads a threadgroup, got 2048",
    "half a SIMD-group": "kernel strict_copy: the pipeline was promised whole SIMD-groups, got 48 threads",
    "no such function": "there is no function strict_nothing",
    "missing constant": "function strict_optional wants function constant 0",
    "source with an include": "the source includes a file, which Metal cannot find at run time",
    "commit twice": "a command buffer is committed twice",
}


@pytest.mark.parametrize("case", CASES)
def test_softmetal__is_strict(strict: Path, case: str) -> None:
    out = subprocess.run([strict, case], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.startswith(CASES[case])
    assert out.stdout.endswith("\nalive: 0\n")


@pytest.mark.parametrize("case", ["fresh buffer", "fresh threadgroup memory"])
def test_softmetal__undefined_memory_is_nan(strict: Path, case: str) -> None:
    out = subprocess.run([strict, case], capture_output=True, text=True, timeout=60)
    assert out.stdout.lstrip("-").startswith("nan\n")


def test_softmetal__every_case_is_tested(strict: Path) -> None:
    out = subprocess.run([strict], capture_output=True, text=True, timeout=60)
    assert set(out.stdout.splitlines()) == {*CASES, "fresh buffer", "fresh threadgroup memory"}


def test_metallib__is_taken_instead_of_the_source(strict: Path) -> None:
    out = subprocess.run([strict.parent / "metallib"], capture_output=True, text=True, timeout=60)
    assert out.stdout.splitlines() == [
        "SoftMetal",
        "kernel strict_nothing (constants 5) has no pipeline: there is no function strict_nothing",
    ]


# ---- clang's analyzer

LEAK = """
#import <Metal/Metal.h>
void leak(id<MTLDevice> device);
void leak(id<MTLDevice> device) { (void)[[device newBufferWithLength:4 options:0] contents]; }
"""


def test_analyzer__finds_nothing() -> None:
    make("softmetal-analyze")


def test_analyzer__finds_a_planted_leak(tmp_path: Path) -> None:
    (tmp_path / "leak.m").write_text(LEAK)
    with pytest.raises(AssertionError, match="leak"):
        make("softmetal-analyze", f"ANALYZE_MORE={tmp_path / 'leak.m'}")


# ---- The device on it: each piece in an interpreter of its own

PREAMBLE = """
import ctypes, gc, os, sys, time
import numpy as np
import pyferrum as pf
from pyferrum import _native
soft = ctypes.CDLL(os.environ["PYFERRUM_LIBRARY"])
soft.softmetal_complaint.restype = ctypes.c_char_p
soft.softmetal_live_objects.restype = ctypes.c_uint64
soft.softmetal_set_order.argtypes = [ctypes.c_uint64]
class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("dispatches", "command_buffers", "compiled", "buffer_bytes")]
def counts():
    result = Counts()
    soft.softmetal_count(ctypes.byref(result))
    return result
def all_gone():
    gc.collect()
    end = time.monotonic() + 10
    while soft.softmetal_live_objects() and time.monotonic() < end:
        time.sleep(0.001)
    return soft.softmetal_live_objects() == 0
rng = np.random.default_rng(0)
config = pf.AttentionConfig(64, 4, 2, 16, maximum_context_tokens=8192)
def weights(device):
    shapes = [(64,), (64, 64), (32, 64), (32, 64), (64, 64)]
    return pf.AttentionWeights(*[pf.array(rng.normal(size=s).astype(np.float16) / 8, device=device) for s in shapes])
def attend(device, w, steps=(5, 1, 1)):
    x_of = np.random.default_rng(1)
    state, outs = pf.init_state(config, device=device), []
    # All of them first: making an array waits for the device.
    for x in [pf.array(x_of.normal(size=(n, 64)).astype(np.float16), device=device) for n in steps]:
        state, y = pf.causal_attention(state, x, w)
        outs.append(y)
    return np.concatenate([np.asarray(y) for y in outs])
"""


def run(library: Path, tmp_path: Path, code: str, **environment: str) -> str:
    """What `code` prints, with SoftMetal as its default device."""
    inherited = os.environ | {"PYFERRUM_LIBRARY": str(library), "PYFERRUM_DEVICE": "metal"}
    inherited |= {"PYFERRUM_CACHE": str(tmp_path), "PYFERRUM_DEBUG_POISON": "1"} | environment
    out = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=120
    )
    assert (out.returncode, out.stderr) == (0, ""), out.stderr
    return out.stdout


FAILURE = """
x = pf.array(np.ones((2, 8), np.float16))
good = pf.swiglu(x, x)
good.tolist()
soft.softmetal_fail_kernel(b"swiglu_f16")
bad = pf.swiglu(x, x)
try:
    bad.tolist()
except pf.DeviceError as error:
    print(error)
fine = pf.swiglu(x, x)
assert fine.tolist() == good.tolist()
"""


def test_failure__comes_with_the_next_read_under_the_name_of_the_op(library: Path, tmp_path: Path) -> None:
    out = run(library, tmp_path, FAILURE)
    assert out.startswith("[swiglu")
    assert "the GPU failed: kernel swiglu_f16: fails because a test wants it to" in out


ASYNCHRONOUS = """
soft.softmetal_set_delay(3000)
device = pf.default_device()
w = weights(device)
before = counts()
expected = attend(device, w)
soft.softmetal_set_delay(0)
again = attend(device, w)
np.testing.assert_array_equal(expected, again)
x = pf.array(np.ones((2, 64), np.float16))
soft.softmetal_set_delay(3000)
start, middle = time.monotonic(), counts()
for _ in range(400):  # unread: the host runs ahead, in batches
    x = pf.residual_add(x, x)
    x = pf.swiglu(x, x)
x.tolist()
assert counts().dispatches - middle.dispatches == 800
print(counts().command_buffers - middle.command_buffers)
assert soft.softmetal_complaint() == b""
"""


def test_submit__is_asynchronous_and_in_batches(library: Path, tmp_path: Path) -> None:
    """A command buffer that waits is filled: 64 launches each, but for the first ones, which find the GPU idle."""
    assert 800 // 64 <= int(run(library, tmp_path, ASYNCHRONOUS)) <= 20


ORDER = """
device = pf.default_device()
w = weights(device)
half = pf.array(np.full((1, 8), 0.5, np.float16))
soft.softmetal_set_delay(2000)  # so that calls share a command buffer
results = []
for seed in (0, 1, 2, 3, 1 << 63):
    soft.softmetal_set_order(seed)
    results.append(attend(device, w, (40, 1, 3, 1)))
    x = pf.array(np.ones((1, 8), np.float32))
    for _ in range(10):  # calls that depend on each other
        x = pf.residual_add(x, half)
    assert x.tolist() == [[6.0] * 8]
for result in results[1:]:
    np.testing.assert_array_equal(result, results[0])
"""


def test_barriers__make_every_order_of_dispatches_the_same(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, ORDER)


LIMITS = """
x = pf.array(np.ones((2, 8), np.float16))
for width, threads in ((16, 1024), (32, 64)):
    soft.softmetal_set_limits(width, threads)
    try:
        pf.swiglu(x, x)
    except pf.DeviceError as error:
        print(error)
"""


def test_pipeline__that_cannot_run_a_launch_is_refused(library: Path, tmp_path: Path) -> None:
    first, second = run(library, tmp_path, LIMITS).splitlines()
    assert "SIMD-groups of 16 threads" in first and "expected 32" in first
    assert "at most 64 threads a threadgroup" in second and "expected 256" in second


ARCHIVE = """
x = pf.array(np.ones((2, 8), np.float16))
pf.swiglu(x, x).tolist()
pf.swiglu(x, x).tolist()  # nothing new is compiled: the archive is written
print(counts().compiled)
"""


def test_archive__of_pipelines_spares_the_next_process_the_compiler(library: Path, tmp_path: Path) -> None:
    assert run(library, tmp_path, ARCHIVE) == "1\n"
    (archive,) = tmp_path.iterdir()
    assert archive.name.startswith("pipelines-")
    assert run(library, tmp_path, ARCHIVE) == "0\n"
    archive.write_text("something else")
    assert run(library, tmp_path, ARCHIVE) == "1\n"
    assert run(library, tmp_path, ARCHIVE) == "0\n"
    assert run(library, tmp_path, ARCHIVE, MTL_SHADER_VALIDATION="1") == "1\n"
    assert list(tmp_path.iterdir()) == [archive]
    assert run(library, tmp_path, ARCHIVE, PYFERRUM_CACHE=str(archive)) == "1\n"  # not a folder: no archive


ENDS = """
soft.softmetal_set_delay(2000)
def use(read):
    with pf.Device("metal") as device:
        w = weights(device)
        x = pf.array(np.ones((2, 64), np.float16), device=device)
        state, y = pf.causal_attention(pf.init_state(config, device=device), x, w)
        for _ in range(70):
            y = pf.swiglu(y, y)
        if read:
            y.tolist()
use(True)
assert all_gone(), soft.softmetal_live_objects()
use(False)  # nobody waits for the last calls; they run, and then everything goes, the device last
assert all_gone(), soft.softmetal_live_objects()
assert counts().buffer_bytes == 0
assert set(_native.debug_counts().values()) == {0}
assert soft.softmetal_complaint() == b""
"""


@pytest.mark.parametrize("poison", ["0", "1"])
def test_device__goes_with_its_last_call_read_or_not(library: Path, tmp_path: Path, poison: str) -> None:
    run(library, tmp_path, ENDS, PYFERRUM_DEBUG_POISON=poison)


THREADS = """
import threading
device = pf.default_device()
w = weights(device)
expected = attend(device, w, (3, 1, 1, 2))
wrong = []
def work():
    for _ in range(6):
        if not np.array_equal(attend(device, w, (3, 1, 1, 2)), expected):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
del thread, threads
gc.collect()
assert pf.arena_stats()["used_pages"] == 0
assert soft.softmetal_complaint() == b""
"""


def test_threads__share_a_device(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, THREADS)


WRAP = """
import mmap, tempfile
with tempfile.TemporaryFile() as file:
    file.write(np.arange(8192, dtype=np.float16).tobytes())
    file.flush()
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
device = pf.default_device()
before = counts().buffer_bytes
buffer = _native.buffer_wrap(device.handle, mapped[256:])
assert counts().buffer_bytes == before  # no copy
assert _native.buffer_view(buffer).tobytes() == mapped[256:].tobytes()
x = pf.array(np.zeros((2, 64), np.float16))
tensor = _native.tensor(buffer, 128, [2, 64], 1)
zero = _native.tensor(x.buffer, 0, [2, 64], 1)
(sum,) = _native.operation("residual_add", device.handle, tensor, zero)
np.testing.assert_array_equal(_native.buffer_view(sum).view(np.float16), np.arange(192, 320, dtype=np.float16))
for bytes in ((1 << 30) + 1, 1 << 40, (1 << 63) + 1, (1 << 64) - 1):
    out = _native.ffi.new("ferrum_buffer **")
    assert _native.lib.ferrum_buffer_new(device.handle[0], bytes, out) == _native.lib.FERRUM_OUT_OF_MEMORY
    assert b"has at most 1073741824" in _native.ffi.string(_native.lib.ferrum_last_error())
assert soft.softmetal_complaint() == b""
"""


def test_wrap__takes_a_mapped_file_as_it_is(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, WRAP)
