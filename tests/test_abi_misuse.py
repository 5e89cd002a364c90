"""What a C caller may get wrong, or run into, without harm: each case is a status, and the next call works."""

import mmap
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, _native_attention, _native_programs, _native_rings
from pyferrum._cdef import ffi
from tests.test_abi import python

lib = _native.lib
GIB = 1 << 30
MAP_NORESERVE = 0x4000  # of Linux on x86-64 and arm64


@pytest.fixture
def device() -> Iterator[pf.Device]:
    with pf.Device("cpu", threads=2) as device:
        yield device


def sparse(device: pf.Device, size: int) -> tuple[Any, Any]:
    """A buffer of zeros that take no memory until they are written, and their owner."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if sys.platform == "linux" else 0)
    owner = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    return _native.buffer_wrap(device.handle, owner), owner


def limit_memory(more: int) -> None:
    """No more address space than this process has, and `more` bytes."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory() -> None:
    """A product that finds no memory for its activations, then an ordinary one."""
    with pf.Device("cpu", threads=2) as device:
        x = pf.array(np.ones((64, 1024), np.float16), device=device)
        buffer, _owner = sparse(device, 2 * GIB)
        limit_memory(GIB)
        wide = _native.tensor(buffer, 0, (1, GIB), 1)
        with pytest.raises(MemoryError):
            _native.operation("linear", device.handle, wide, wide, _native.NO_TENSOR, 0)
        np.testing.assert_array_equal(np.asarray(pf.linear(x, x)), 1024)
    print("done")


def out_of_threads() -> None:
    """A machine that gives no more threads."""
    limit_memory(200 << 20)
    with pytest.raises(pf.DeviceError, match=r"\[device\] threads: the system gave \d+ of 256"):
        pf.Device("cpu", threads=256)
    pf.Device("cpu", threads=1).close()
    print("done")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
@pytest.mark.parametrize("case", [out_of_memory, out_of_threads])
def test_limits__of_the_machine_are_errors_and_the_next_call_works(case: Any) -> None:
    result = python(f"from tests import test_abi_misuse; test_abi_misuse.{case.__name__}()")
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_rows__of_2_to_the_31_columns_are_refused(device: pf.Device) -> None:
    """Kernels count columns with 32 bits, some of them signed."""
    buffer, _owner = sparse(device, 8 * GIB + 64)
    x = _native.tensor(buffer, 0, (1, (1 << 31) + 16), 0)
    target = pf.array(np.zeros(1, np.int32), device=device)
    for name, arguments, outputs in (
        ("argmax", [x], 1),
        ("top_k", [x, 4], 2),
        ("cross_entropy", [x, target.tensor], 1),
    ):
        with pytest.raises(pf.InvalidArgument, match=r"expected fewer than 2\^31 columns, got 2147483664"):
            _native.operation(name, device.handle, *arguments, outputs=outputs)


def test_names__of_a_recording_that_has_ended_are_refused(device: pf.Device) -> None:
    """Nothing ran, so there is nothing behind them."""
    x = pf.array(np.ones((2, 8), np.float16), device=device)
    square = pf.array(np.eye(8, dtype=np.float16), device=device)
    config = pf.AttentionConfig(8, 2, 1, 4, maximum_context_tokens=64)
    weights = pf.AttentionWeights(
        np.ones(8, np.float32), *(np.ones(shape, np.float16) for shape in ((8, 8), (4, 8), (4, 8), (8, 8)))
    )
    empty = pf.init_state(config, device=device)
    native, _kept = weights.native(device)
    _native_programs.program_begin(device.handle, [x.tensor], [empty.handle], run=False)
    try:
        [y] = _native.operation("linear", device.handle, x.tensor, square.tensor, _native.NO_TENSOR, 1)
        operands = config.native(device), native
        [after], [z] = _native_attention.causal_attention(*operands, False, [empty.handle], [2], [x.tensor])
        with pytest.raises(pf.UnsupportedError, match=r"state_describe\] state: comes from a recording"):
            _native.state_describe(after)
    finally:
        _native_programs.program_abandon()
    name, message = _native.tensor(y, 0, (2, 8), 1), "comes from a recording that has ended"
    with pytest.raises(pf.InvalidArgument, match=r"linear\] x: " + message):
        _native.operation("linear", device.handle, name, square.tensor, _native.NO_TENSOR, 1)
    with pytest.raises(pf.InvalidArgument, match=r"buffer_contents\] buffer: " + message):
        _native.buffer_wait(z)
    with pytest.raises(pf.InvalidArgument, match=r"causal_attention\] states: " + message):
        _native_attention.causal_attention(*operands, False, [after], [2], [x.tensor])
    with pytest.raises(pf.InvalidArgument, match=r"truncate\] state: " + message):
        _native.state_truncate(after, 0)
    with pytest.raises(pf.InvalidArgument, match=r"inputs: " + message):
        _native_programs.program_begin(device.handle, [name], [], run=False)
    np.testing.assert_array_equal(np.asarray(pf.linear(x, square)), 1)


def test_recording__ends_with_its_end_whatever_that_says(device: pf.Device) -> None:
    row = pf.array(np.ones((2, 8), np.float16), device=device)
    for _ in range(2):
        assert lib.ferrum_program_begin(device.handle[0], 1, 1, row.tensor, 0, ffi.NULL) == 0
        assert lib.ferrum_program_end(0, ffi.NULL, 0, ffi.NULL, ffi.NULL) == lib.FERRUM_INVALID_ARGUMENT


def test_recording__forgets_a_call_that_failed(device: pf.Device) -> None:
    """Token 50 is none of ten: that call failed, and a run must not fail for it."""
    tokens = pf.array(np.array([50], np.int32), device=device)
    few = pf.array(np.zeros((10, 8), np.float16), device=device)
    many = pf.array(np.ones((100, 8), np.float16), device=device)
    out = ffi.new("ferrum_buffer **")
    _native_programs.program_begin(device.handle, [tokens.tensor], [])
    try:
        with pytest.raises(pf.InvalidArgument, match="expected 0…9, got 50"):
            _native.operation("embed", device.handle, tokens.tensor, few.tensor, 1)
        assert (
            lib.ferrum_embed(device.handle[0], tokens.tensor, many.tensor, 1, ffi.NULL) == lib.FERRUM_INVALID_ARGUMENT
        )
        [y] = _native.operation("embed", device.handle, tokens.tensor, many.tensor, 1)
        program = _native_programs.program_end([_native.tensor(y, 0, (1, 8), 1)], [])
    finally:
        _native_programs.program_abandon()
    outs = ffi.new("ferrum_buffer **[]", [out])
    status = lib.ferrum_program_run(
        program[0], tokens.tensor, ffi.NULL, ffi.NULL, outs, 0, ffi.NULL, ffi.NULL, ffi.NULL
    )
    assert status == 0, ffi.string(lib.ferrum_last_error())
    lib.ferrum_buffer_release(out)


def test_memory__that_is_not_aligned_is_refused(device: pf.Device) -> None:
    bytes_ = np.zeros(65, np.uint8)
    buffer = _native.buffer_wrap(device.handle, bytes_[1:] if bytes_.ctypes.data % 2 == 0 else bytes_[:64])
    x = _native.tensor(buffer, 0, (2, 16), 1)
    with pytest.raises(pf.InvalidArgument, match="memory is not aligned to the element size 2"):
        _native.operation("swiglu", device.handle, x, x)


def test_table__of_no_rows_has_no_index(device: pf.Device) -> None:
    with pytest.raises(pf.InvalidArgument, match="tokens: expected none, since there is nothing to choose from, got 1"):
        pf.embed([0], pf.array(np.zeros((0, 32), np.float16), device=device))


def test_prepare__keeps_every_shape_at_an_offset(device: pf.Device) -> None:
    """Preparing lays 16 MB out anew; doing it again finds them, within microseconds."""
    made = pf.array(np.ones((4096, 2048), np.float16), device=device)

    def seconds(rows: int) -> float:
        start = time.perf_counter()
        assert _native.weight_prepare(device.handle, _native.tensor(made._buffer, 0, (rows, 2048), 1)) == rows * 4096
        return time.perf_counter() - start

    first = [seconds(4096), seconds(2048)]
    again = [min(seconds(rows) for _ in range(20)) for rows in (4096, 2048)]
    assert again[0] < first[0] / 10 and again[1] < first[1] / 10, (first, again)


def test_sizes__that_would_wrap_are_refused(device: pf.Device) -> None:
    with pytest.raises(pf.InvalidArgument, match=r"hidden_size: expected 1…2\^31 - 1, got 4294967295"):
        pf.AttentionConfig(2**32 - 1, 2, 1, 4).native(device)
    ring = _native_rings.ring_new(device.handle, 1, 8, 1, 64)
    zeros = pf.array(np.zeros((1, 8, 1, 64), np.float32), device=device)
    with pytest.raises(pf.InvalidArgument, match=r"lengths: expected less than 2\^63"):
        _native_rings.ring_load(ring, zeros.tensor, zeros.tensor, [2**64 - 1], [0])
