"""The kernels' tables of cases (tests/cases), as a trace."""

from __future__ import annotations

import numpy as np

import pyferrum as pf
from pyferrum.formats import NUMBERS
from tests.aarch64.trace import Trace
from tests.cases.attention import CASES, Case
from tests.cases.dflash2 import ROUNDING, random_geometry
from tests.cases.ops import LINEAR_SHAPES, SHAPES, TOP_K_WIDTHS, VOCABULARIES
from tests.cases.weights import ALL_FORMATS, random_weight

MOST_TOKENS = 600  # of a call: an emulated machine is slow
F32, F16 = NUMBERS["F32"], NUMBERS["F16"]


def write_tables(trace: Trace) -> None:
    """Every case of every table."""
    for case in CASES:
        write_attention(trace, case)
    write_states(trace)
    for format in ALL_FORMATS:
        write_linear(trace, format)
    write_operations(trace)
    for seed in range(6):
        write_dflash2(trace, seed)
    write_rounding(trace)


def write_attention(trace: Trace, case: Case) -> None:
    """One sequence alone; several packed, then one call in a loop."""
    trace.case(f"attention, {case.name}")
    rng = np.random.default_rng(len(case.name) * 1000 + case.head_dim)
    weights = case.weights(rng).tensors(trace.device)
    attention = trace.attention(case.config())
    states = [trace.state(case.key_value_heads, case.head_dim) for _ in case.chunks]

    def rows(tokens: int) -> np.ndarray:
        return rng.standard_normal((min(tokens, MOST_TOKENS), case.hidden)).astype(case.dtype)

    for step in range(len(case.chunks[0])):
        xs = [rows(chunks[step]) for chunks in case.chunks]
        states = trace.attend(attention, weights, states, xs, packed=len(states) > 1)
    if len(states) > 1:
        states = trace.attend(attention, weights, states, [rows(2) for _ in states], packed=False)
    for state in states:
        trace.read(state)


def write_states(trace: Trace) -> None:
    """Appends within and over pages, a branch that copies one, a truncated state that goes on."""
    for heads, dim in ((2, 64), (3, 40), (4, 256)):
        trace.case(f"states, {heads} heads of {dim}")
        rng = np.random.default_rng(dim)

        def tokens(count: int) -> list[np.ndarray]:
            return [rng.standard_normal((count, heads, dim)).astype(np.float16) for _ in range(2)]  # noqa: B023

        state = trace.state(heads, dim)
        kept = []
        for count in (5, 1, 16384 // (heads * dim), 3):
            state = trace.append(state, *tokens(count))
            kept.append(state)
        branch = trace.append(kept[1], *tokens(7))
        back = trace.append(trace.truncate(state, 9), *tokens(20))
        for each in (*kept, branch, back):
            trace.read(each)


def write_linear(trace: Trace, format: str) -> None:
    """linear and embed in one weight format."""
    trace.case(f"linear, {format}")
    rng = np.random.default_rng(7)
    for rows, outputs, inputs in LINEAR_SHAPES:
        x = trace.array(rng.standard_normal((rows, inputs)).astype(np.float16))
        weight = random_weight(rng, format, (outputs, inputs))
        for bias in (None, np.float32, np.float16):
            given = None if bias is None else rng.standard_normal(outputs).astype(bias)
            trace.operation("linear", x, weight, given, F32)
        trace.prepare(weight)
        trace.operation("linear", x, weight, None, F16)
    for rows in range(2, 7):
        trace.operation("linear", rng.standard_normal((rows, inputs)).astype(np.float16), weight, None, F32)
    broken = rng.standard_normal((4, inputs)).astype(np.float16)
    broken[1, 70], broken[2, 5] = np.nan, np.inf
    trace.operation("linear", broken, weight, None, F32)
    tokens = rng.integers(0, outputs, 50).astype(np.int32)
    for number in (F32, F16):
        trace.operation("embed", tokens, weight, number)


def write_operations(trace: Trace) -> None:
    """What has one launch."""
    trace.case("operations")
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        wide = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, (shape[0], 1))
        half = (rng.standard_normal(shape) * 6).astype(np.float16)
        for dtype in (np.float16, np.float32):
            for weight in (np.float16, np.float32):
                scale = rng.standard_normal(shape[1]).astype(weight)
                trace.operation("rms_norm", wide.astype(dtype), scale, 1e-5)
            trace.operation("residual_add", wide.astype(dtype), half)
        trace.operation("swiglu", half, rng.standard_normal(shape).astype(np.float16))
    gates = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = gates[np.isfinite(gates)].reshape(1, -1)
    trace.operation("swiglu", finite, np.ones_like(finite))
    for vocabulary in VOCABULARIES:
        logits = (rng.standard_normal((6, vocabulary)) * 8).astype(np.float32)
        logits[1] += 1000
        logits[2] -= 1000
        logits[3] *= 50
        trace.operation("cross_entropy", logits, rng.integers(0, vocabulary, 6).astype(np.int32))
    for width in TOP_K_WIDTHS:
        x = rng.integers(-9, 9, (4, width)).astype(np.float32)
        x[1, width // 2] = np.nan
        trace.operation("argmax", x)
        trace.operation("top_k", x, min(width, 40), outputs=2)


def write_dflash2(trace: Trace, seed: int) -> None:
    """Three rounds over a ring, then what a draft model does with a block."""
    trace.case(f"dflash2, seed {seed}")
    rng = np.random.default_rng(seed)
    g = random_geometry(rng)
    ring = trace.ring(g.lanes, g.window, g.key_value_heads, g.head_dim)
    if seed % 2:
        shape = (2, g.lanes, g.window, g.key_value_heads, g.head_dim)
        lengths = [int(n) for n in rng.integers(0, 2 * g.window, g.lanes)]
        positions = [int(n) for n in rng.integers(0, g.window, g.lanes)]
        ring = trace.load(ring, *rng.standard_normal(shape).astype(np.float32), lengths, positions)
    for _ in range(3):
        packed = trace.operation("dflash2_pack", *g.block(rng), owner=ring, outputs=3)
        mask = trace.operation("dflash2_mask", g.rows, g.heads, owner=ring)
        heads = g.heads, g.key_value_heads, g.key_value_heads
        given = [x.view(pf.bfloat16).reshape(g.lanes, h, -1, g.head_dim) for x, h in zip(packed, heads, strict=True)]
        trace.operation("dflash2_attention", *given, mask[0].view(pf.bfloat16).reshape(g.lanes, g.heads, g.rows, -1))
        ring = trace.commit(ring, *g.context(rng), [int(n) for n in rng.integers(0, g.commit + 1, g.lanes)])
        trace.operation("ring_read", owner=ring, outputs=2)
    rows, width = g.lanes * g.rows, g.heads * g.head_dim

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    trace.operation("dflash2_mask_rows", normal(rows, width), normal(width).astype(pf.bfloat16), g.lanes, g.rows)
    for side in (0, 1):
        x = normal(rows, width).astype(np.float16)
        trace.operation("dflash2_conv", x, normal(2, 2, width), normal(rows, 4 * g.heads), side, g.rows)
    for norm in (None, np.float32, np.float16):
        scale = None if norm is None else normal(g.head_dim).astype(norm)
        trace.operation("dflash2_heads", normal(rows, width), scale, normal(rows, g.head_dim // 2, 2), 1e-6)
    steps, k, rank = g.rows - 1, 8, 40
    ids = rng.integers(0, 1000, (g.lanes, steps, k)).astype(np.int32)
    books = normal(g.lanes, 1 + (steps - 1) * k, rank), normal(g.lanes, steps * k, rank)
    for temperature in (0.0, 0.05, 0.9):  # the second takes exp to its smallest results
        draws = rng.random((g.lanes, steps)).astype(np.float32) if temperature else None
        given = ids, normal(g.lanes, steps, k), normal(g.lanes, steps, rank), *books, draws
        trace.operation("dflash2_select", *given, temperature, outputs=2)


def write_rounding(trace: Trace) -> None:
    """float32 numbers that bfloat16 has no place for."""
    trace.case("dflash2, rounding")
    x = np.zeros((1, 2, 1, 64), np.float32)
    x[0, 0, 0, : len(ROUNDING)] = np.array([bits for bits, _ in ROUNDING], np.uint32).view(np.float32)
    ring = trace.ring(1, 4, 1, 64)
    trace.operation("dflash2_pack", x, x, x, owner=ring, outputs=3)
    trace.operation("ring_read", owner=trace.commit(ring, x, x, [1]), outputs=2)
