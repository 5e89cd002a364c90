"""Arrays: what goes in comes out bit for bit, what would be changed silently is refused, views outlive their array."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native
from pyferrum.formats import BLOCK_FORMATS, FORMATS
from tests.cases.weights import random_blocks

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int32]
block_formats = pytest.mark.parametrize("format", BLOCK_FORMATS)


def bits(x: Any) -> bytes:
    """An array's elements in order: equal bytes are equal arrays, NaN and signed zeros included."""
    return np.asarray(x).tobytes()


class OnlyDLPack:
    """A foreign array: nothing but the protocol. `old` asks as consumers did before DLPack 1.0."""

    def __init__(self, x: Any, *, old: bool = False, error: str = "") -> None:
        self.x, self.old, self.error = x, old, error

    def __dlpack__(self, **options: Any) -> Any:
        if self.error:
            raise BufferError(self.error)
        return self.x.__dlpack__(**({} if self.old else options))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_array__any_layout_is_copied_in_order(dtype: Any, no_leaks: None) -> None:
    """safetensors/safetensors#825; ml-explore/mlx#369 (F6, the kind): memory order is not element order."""
    source = np.random.default_rng(0).integers(-99, 99, (8, 9)).astype(dtype)
    cuts = (np.s_[:], np.s_[::3, 1::2], np.s_[::-1, ::-2], np.s_[3], np.s_[2, 4], np.s_[:0], np.s_[:, :0])
    turned = source.reshape(4, 2, 9).transpose(2, 0, 1), np.asfortranarray(source), np.broadcast_to(source[:1], (5, 9))
    for x in (*(source[cut] for cut in cuts), *turned, source[2:3, 4].reshape(())):
        a = pf.array(x)
        assert (a.shape, a.dtype, a.ndim, a.size, a.nbytes) == (x.shape, np.dtype(dtype), x.ndim, x.size, x.nbytes)
        out = np.asarray(a)
        assert (out.shape, out.dtype, bits(out)) == (x.shape, x.dtype, bits(x))
    a, before = pf.array(source), bits(source)
    source += np.asarray(1, dtype)
    assert bits(a) == before, "an Array must not see later writes to what it was made from"


@pytest.mark.parametrize("bit_pattern", [np.uint32, np.uint16])
def test_array__every_bit_pattern_survives(bit_pattern: Any) -> None:
    """safetensors/safetensors#436; ml-explore/mlx#3974, #3975 (F7): bfloat16 crosses, and no NaN loses its payload."""
    patterns = np.random.default_rng(0).integers(0, 1 << 16, 5000).astype(bit_pattern)
    if bit_pattern is np.uint32:
        patterns = patterns << 16 | patterns[::-1]
    for dtype in (d for d in DTYPES if np.dtype(d).itemsize == np.dtype(bit_pattern).itemsize):
        assert bits(pf.array(patterns.view(dtype))) == patterns.tobytes()


def test_array__python_numbers_become_float32_or_int32() -> None:
    floats = [[[1.5, 2], [3, 4]], 0.25, [], [[], []]]
    whole = [[1, -2, 3], 7, [[2**31 - 1, -(2**31) + 1]]]
    for value, dtype in [(v, np.float32) for v in floats] + [(v, np.int32) for v in whole]:
        a = pf.array(value)
        assert a.dtype == dtype
        assert (a.tolist(), a.shape) == (value, np.shape(value))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, -(2**63), 2**63 - 1])
def test_array__python_integers_beyond_int32_are_refused(value: int) -> None:
    with pytest.raises(pf.InvalidArgument, match=r"^x: .*int32"):
        pf.array([0, value])


REFUSED: dict[str, tuple[Any, str]] = {
    "float64": (np.ones(2), r"float64 .*astype\(numpy\.float32\)"),
    "int64": (np.ones(2, np.int64), r"int64 .*astype\(numpy\.int32\)"),
    "uint8": (np.ones(2, np.uint8), r"uint8 .*astype\(numpy\.int32\)"),
    "big-endian float32": (np.ones(2, ">f4"), r"big-endian float32.*newbyteorder"),
    "object": (np.array([1, None]), r"Python objects.*astype\(numpy\.float32\)"),
    "none": (None, r"Python objects"),
    "complex": (np.ones(2, np.complex64), r"complex64"),
    "text": (np.array(["a"]), r"expected float32, float16, bfloat16, int32, got <U1"),
    "bytes": (b"abc", r"got \|S3"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), r"datetime64"),
    "records": (np.zeros(2, [("a", "f4")]), r"got \[\('a', '<f4'\)\]"),
    "bool": (np.ones(2, bool), r"got bool"),
    "ragged": ([[1, 2], [3]], r"array of numbers"),
    "float64 by DLPack": (OnlyDLPack(np.ones(3)), r"float64"),
    "unreadable DLPack": (OnlyDLPack(np.ones(3), error="it lives on a GPU"), r"it lives on a GPU"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_array__what_would_change_is_refused_with_the_fix(kind: str) -> None:
    value, message = REFUSED[kind]
    with pytest.raises(pf.InvalidArgument, match=rf"^x: .*{message}"):
        pf.array(value)


def test_array__the_argument_is_named_where_the_array_goes_in() -> None:
    x, wide, block = np.ones((1, 2), np.float16), np.ones((2, 2)), np.zeros(34, np.uint8)
    with pytest.raises(pf.InvalidArgument, match=r"^weight: float64"):
        pf.linear(x, wide)
    with pytest.raises(pf.InvalidArgument, match=r"^branch: float64"):
        pf.residual_add(x, wide)
    with pytest.raises(pf.InvalidArgument, match=r"^x: expected an Array, got a BlockArray in Q8_0 blocks"):
        pf.rms_norm(pf.block_array(block, "Q8_0", (1, 32)), np.ones(32, np.float32))


@pytest.mark.parametrize("source", [np.float64, np.int64, np.uint8, bool, ">f4", ">i8", np.float16])
def test_array__a_dtype_converts_as_numpy_does(source: Any) -> None:
    x = np.array([[0, 1], [1, 0]]).astype(source)
    for dtype in DTYPES:
        a = pf.array(x, dtype)
        assert (a.dtype, bits(a)) == (np.dtype(dtype), bits(x.astype(dtype)))
    with pytest.raises(pf.InvalidArgument, match=r"^x: float64"):
        pf.array(x, np.float64)


def test_array__an_array_passes_through_or_goes_to_the_named_device() -> None:
    a = pf.array([1.5, 2.5])
    assert pf.array(a) is a
    with pf.Device(threads=1) as other:
        moved, halved = pf.array(a, device=other), pf.array(a, np.float16, device=other)
        assert (bits(moved), bits(halved)) == (bits(a), bits(np.float16([1.5, 2.5])))
        assert halved.device is other
        assert moved.device is other, "device= is where the copy is wanted"


def test_array__dlpack_objects_come_in(no_leaks: None) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x, x[::2, ::-3], x.T, x[:0]):
        a = pf.array(OnlyDLPack(view))
        assert (a.shape, bits(a)) == (view.shape, bits(view))


def test_as_numpy__no_copy_where_none_is_needed_and_read_only() -> None:
    a = pf.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    one, two = np.asarray(a), np.asarray(a, copy=False)
    assert np.shares_memory(one, two)
    for view in (one, two, np.asarray(a[1:]), np.from_dlpack(a)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    copied = np.array(a, copy=True)
    copied[...] = 0
    assert not np.shares_memory(copied, one)
    assert one.max() == 5


def test_as_numpy__a_view_cannot_be_made_writeable() -> None:
    a = pf.array([1.0])
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        np.asarray(a).flags.writeable = True


def test_as_numpy__dtype_and_copy_arguments() -> None:
    a = pf.array([1.5, -2.0])
    assert np.asarray(a, np.float64).dtype == np.float64
    assert np.shares_memory(np.asarray(a, np.float32, copy=False), np.asarray(a))
    np.testing.assert_array_equal(np.asarray(a, np.int32), [1, -2])
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(a, np.float64, copy=False)
    assert a.astype(ml_dtypes.bfloat16).dtype == pf.bfloat16
    with pytest.raises(pf.InvalidArgument, match="float64"):
        a.astype(np.float64)


@pytest.mark.parametrize("end", ["close", "drop", "device"])
def test_as_numpy__views_outlive_the_array(end: str, no_leaks: None) -> None:
    """abetlen/llama-cpp-python#1513 (H2): freed buffers are filled with NaN here, so a stale view would show."""
    device = pf.Device(threads=1, poison=True)
    a = pf.array(np.arange(1000, dtype=np.float32), device=device)
    views = [np.asarray(a), np.from_dlpack(a), np.asarray(a[10:])[-990:]]
    if end == "close":
        a.close()
    elif end == "device":
        device.close()
    del a
    gc.collect()
    if end != "device":
        pf.array(np.zeros(1000, np.float32), device=device)  # takes the memory, had it been given back
    for view in views:
        np.testing.assert_array_equal(view, np.arange(1000)[-len(view) :])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_dlpack__goes_out_without_a_copy(dtype: Any) -> None:
    a = pf.array(np.arange(6).reshape(2, 3).astype(dtype))
    assert a.__dlpack_device__() == (1, 0)
    view, copied = np.from_dlpack(a), np.from_dlpack(a, copy=True)
    # A consumer from before DLPack 1.0 cannot be told that memory is read-only: it must get memory of its own.
    old = np.from_dlpack(OnlyDLPack(a, old=True))
    assert [np.shares_memory(x, np.asarray(a)) for x in (view, copied, old)] == [True, False, False]
    assert bits(view) == bits(copied) == bits(old) == bits(a)


def test_dlpack__bfloat16_says_what_to_do() -> None:
    a = pf.array(np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(BufferError, match=r"bfloat16.*astype\(numpy\.float32\)"):
        np.from_dlpack(a)
    assert np.from_dlpack(a.astype(np.float32)).tolist() == [1, 1]


def test_rows__slices_share_memory_and_know_their_bounds() -> None:
    x = np.arange(24, dtype=np.float16).reshape(4, 3, 2)
    a = pf.array(x)
    for index in (0, 3, -1, -4, np.int64(2), slice(1, 3), slice(-1, None), slice(None), slice(3, 1), slice(9, 12)):
        assert (a[index].shape, bits(a[index])) == (x[index].shape, bits(x[index]))
    assert np.shares_memory(np.asarray(a[1:]), np.asarray(a))
    assert bits(a[1:][1:][0]) == bits(x[2])
    assert [bits(row) for row in a] == [bits(row) for row in x]
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"{index} is out of range for 4 rows"):
            a[index]
    for index in (slice(None, None, 2), slice(None, None, -1), (0, 1), None, 1.0, [0]):
        with pytest.raises(pf.InvalidArgument, match=r"numpy\.asarray\(x\)\[\.\.\.\]"):
            a[index]
    tail = a[2:]
    a.close()
    assert bits(tail) == bits(x[2:])


def test_scalars__item_len_and_rows() -> None:
    a = pf.array(2.5)
    assert (a.shape, a.item(), a.tolist(), len(pf.array([1, 2]))) == ((), 2.5, 2.5, 2)
    for use, error in ((lambda: len(a), TypeError), (lambda: a[0], ValueError), (pf.array([1, 2]).item, ValueError)):
        with pytest.raises(error):
            use()


def test_repr__shows_values_shape_and_dtype_and_is_short() -> None:
    assert repr(pf.array([[1.0, 2.5]])) == "Array([[1. , 2.5]], shape=[1, 2], dtype=float32)"
    assert repr(pf.array(np.ones(1, ml_dtypes.bfloat16))) == "Array([1], shape=[1], dtype=bfloat16)"
    assert repr(pf.array(np.zeros((0, 3), np.float16))) == "Array([], shape=[0, 3], dtype=float16)"
    big = repr(pf.array(np.zeros((1000, 1000), np.float32)))
    assert "..." in big
    assert big.endswith("shape=[1000, 1000], dtype=float32)")
    assert len(big) < 800


def test_block_until_ready__gives_back_what_it_got() -> None:
    a, block = pf.array([1.0]), pf.block_array(np.zeros(34, np.uint8), "Q8_0", (1, 32))
    trees = (a, {"a": [a, (a, {"b": block})], "n": 3, "none": None}, pf.AttentionWeights(a, block, block, block, block))
    for tree in trees:
        assert pf.block_until_ready(tree) is tree
    assert a.block_until_ready() is a
    a.close()
    for tree in trees:
        with pytest.raises(pf.StateError, match="closed"):
            pf.block_until_ready(tree)


def test_close__is_idempotent_and_use_after_it_is_an_error(no_leaks: None) -> None:
    """abetlen/llama-cpp-python#1513 (H2)."""
    a, block = pf.array(np.ones((2, 32), np.float16)), pf.block_array(np.zeros(34, np.uint8), "Q8_0", (1, 32))
    for x in (a, block):
        x.close()
        x.close()
        assert "closed, shape=[" in repr(x)
    uses: list[Callable[[], Any]] = [
        lambda: np.asarray(a),
        lambda: np.from_dlpack(a),
        lambda: a[0],
        lambda: a.astype(np.float32),
        lambda: pf.array(a, np.float32),
        lambda: pf.swiglu(a, a),
        lambda: pf.linear(np.ones((1, 32), np.float16), block),
        lambda: block.dequantize(),
    ]
    for use in uses:
        with pytest.raises(pf.StateError, match=r"this (Array|BlockArray) of shape \[\d, 32\] was closed"):
            use()


@block_formats
def test_blocks__dequantize_is_exactly_the_reference(format: str) -> None:
    """Every bit of the quants and scales, against gguf-py (FACTS G.3)."""
    shape = (64, 4 * FORMATS[format][1])
    data = random_blocks(np.random.default_rng(7), format, shape, 0.5)
    weight = pf.block_array(data, format, shape)
    assert (weight.shape, weight.nbytes, weight.format) == (shape, data.nbytes, format)
    assert repr(weight) == f"BlockArray(shape={list(shape)}, format={format})"
    expected = gguf.dequantize(data.reshape(64, -1), gguf.GGMLQuantizationType[format])
    assert np.isfinite(expected).all()
    assert weight.dequantize().dtype == np.float32
    np.testing.assert_array_equal(weight.dequantize(), expected)


# FACTS G.4: byte i of the block is 37 i + 11, d is 0.5, the second scale (m or dmin) 0.25; elements, then their sum.
VECTORS: dict[str, tuple[tuple[int, ...], dict[int, float], float]] = {
    "Q4_0": ((0,), {0: -1.5, 1: 1.0, 16: -1.5, 31: 0.0}, -10.5),
    "Q4_1": ((0, 2), {0: 7.75, 1: 2.25, 16: 4.75, 31: 6.25}, 130.5),
    "Q5_0": ((0,), {0: 4.5, 1: -1.0, 16: 7.0, 31: 0.5}, 7.5),
    "Q5_1": ((0, 2), {0: 9.75, 1: 12.25, 16: 9.75, 31: 2.75}, 260.5),
    "Q8_0": ((0,), {0: 42.5, 1: 61.0, 16: -45.5, 31: -24.0}, -88),
    "Q4_K": ((0, 2), {0: 157.75, 1: -12.75, 16: 157.75, 33: 10.0, 127: 40.5, 255: 24.25}, 27220),
    "Q5_K": ((0, 2), {0: 405.75, 1: -12.75, 16: 405.75, 33: -2.0, 127: -1.5, 255: 54.25}, 58108),
    "Q6_K": ((208,), {0: -715.5, 1: 848.0, 16: -216.0, 33: -336.0, 127: 750.0, 255: -30.0}, 2306),
}


@block_formats
def test_blocks__check_vectors(format: str) -> None:
    """FACTS G.4, numbers from outside this project: through `dequantize` and through both kernels that read blocks."""
    _, elements, size = FORMATS[format]
    scales_at, points, total = VECTORS[format]
    block = ((37 * np.arange(size) + 11) & 255).astype(np.uint8)
    for at, scale in zip(scales_at, (0.5, 0.25), strict=False):
        block[at : at + 2] = np.float16([scale]).view(np.uint8)
    weight = pf.block_array(block, format, (1, elements))
    y = weight.dequantize()[0]
    assert {at: float(y[at]) for at in points} == points
    assert float(y.sum(dtype=np.float64)) == total
    np.testing.assert_array_equal(pf.embed([0], weight)[0], y)
    one_hot = np.eye(elements, dtype=np.float16)[list(points)]
    columns = np.asarray(pf.linear(one_hot, weight, dtype=np.float32))[:, 0]
    np.testing.assert_array_equal(columns, np.float32(list(points.values())))


NONE = np.zeros(34, np.uint8)
BAD_BLOCKS: dict[str, tuple[Any, str, Any, str]] = {
    "unknown format": (NONE, "Q9_9", (1, 32), r"^format: expected one of Q4_0.*got 'Q9_9'"),
    "dense format": (NONE, "F16", (1, 17), r"^format: .*got 'F16'"),
    "too few bytes": (NONE[1:], "Q8_0", (1, 32), r"^data: expected 34 bytes.*got 33"),
    "too many bytes": (np.zeros(68, np.uint8), "Q8_0", (1, 32), r"^data: expected 34 bytes.*got 68"),
    "row not whole blocks": (NONE, "Q8_0", (2, 16), r"^shape: .*multiple of 32 for Q8_0"),
    "K-quant row of 896": (np.zeros(504, np.uint8), "Q4_K", (1, 896), r"^shape: .*multiple of 256 for Q4_K"),
    "negative": (NONE, "Q8_0", (-1, -32), r"^shape: "),
    "vector": (NONE, "Q8_0", (32,), r"^shape: "),
    "overflow": (NONE, "Q8_0", (1 << 59, 32), r"^data: expected \d+ bytes"),
    "float data": (NONE.astype(np.float32), "Q8_0", (1, 32), r"^data: expected uint8"),
    "values over a byte": ([256] * 34, "Q8_0", (1, 32), r"^data: expected uint8"),
}


@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_block_array__bad_arguments_are_named(name: str) -> None:
    """WestWaters/pollard-weights#103; ggml-org/llama.cpp#11976 (C4); nor is data of another dtype cut to bytes."""
    data, format, shape, message = BAD_BLOCKS[name]
    with pytest.raises(pf.InvalidArgument, match=message):
        pf.block_array(data, format, shape)


def test_close__leaves_memory_to_calls_under_way(no_leaks: None) -> None:
    """Another thread may be in a call with the array: it holds the native tensor, an address alone."""
    a = pf.array(np.ones((4, 4), np.float32))
    before, tensor = _native.debug_counts()["buffers"], a.tensor
    a.close()
    assert _native.debug_counts()["buffers"] == before
    with pytest.raises(pf.StateError, match="closed"):
        _ = a.tensor
    del tensor
    assert _native.debug_counts()["buffers"] == before - 1
    b = pf.array(np.ones((4, 4), np.float32))
    assert b.tensor is not None
    b.close()
    assert _native.debug_counts()["buffers"] == before - 1
    scalar = pf.array(np.float32(2.5))
    assert (float(scalar), int(scalar)) == (2.5, 2)
