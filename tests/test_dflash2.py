"""The DFlash 2 functions of the device against their definitions and against whole sequences at absolute positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from pyferrum.reference.dflash2 import to_bfloat16
from tests.cases.dflash2 import ROUNDING, Geometry, Sequences, random_geometry

SEED = Geometry(1, 1, 1, 128, 2, 4, 2)
"""The geometry of the seed's test."""


def same_bits(ours: Any, expected: Any) -> None:
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours.view(np.uint16), expected.view(np.uint16))


def ring_of(g: Geometry, module: Any = pf) -> Any:
    return module.init_dflash2_ring(g.lanes, g.window, g.key_value_heads, g.head_dim)


# ---- The numbers of the seed (FACTS B.2, B.3, B.4, B.5)


def seed_block(first: float) -> np.ndarray:
    x = np.zeros((1, 2, 1, 128), np.float32)
    x[0, :, 0, 0] = first, first + 1
    return x


def test_seed__pack_mask_and_commit() -> None:
    keys, values = np.zeros((2, 1, 1, 4, 128), np.float32)
    keys[..., 0], values[..., 0] = [1, 2, 3, 4], [11, 12, 13, 14]
    ring = pf.load_dflash2_ring(keys, values, [3], [1])
    q = np.zeros((1, 2, 1, 128), np.float32)
    q[0, 0, 0, 0] = 40
    k, v = seed_block(20), seed_block(30)
    packed_q, packed_k, packed_v = (np.asarray(x, np.float32) for x in pf.dflash2_pack(ring, q, k, v))
    assert packed_q[0, 0, 0, 0] == 40
    np.testing.assert_array_equal(packed_k[0, 0, :, 0], [20, 21, 1, 4, 3])
    np.testing.assert_array_equal(packed_v[0, 0, :, 0], [30, 31, 11, 14, 13])
    mask = np.asarray(pf.dflash2_mask(ring, 2, 1)).reshape(-1).view(np.uint16)
    np.testing.assert_array_equal(mask, [0] * 9 + [0xFF80])
    after = pf.dflash2_commit(ring, k, v, [2])
    np.testing.assert_array_equal(np.asarray(after.keys(), np.float32)[0, 0, :, 0], [1, 20, 21, 4])
    assert (after.lengths, after.write_positions) == ((5,), (3,))
    # The old ring shows what it showed; slot 1 held no token of its three.
    np.testing.assert_array_equal(np.asarray(ring.keys(), np.float32)[0, 0, :, 0], [1, 0, 3, 4])


def test_seed__geometry() -> None:
    ring = pf.init_dflash2_ring(4, 2048, 8, 128)
    assert pf.dflash2_mask(ring, 8, 32).shape == (4, 32, 8, 2055)
    assert ring.pages == 0


def test_seed__mask_rows() -> None:
    hidden = np.array([[7, 8, 9], [0, 0, 0]], np.float32)
    y = pf.dflash2_mask_rows(hidden, np.array([2, 3, 4], pf.bfloat16), 1, 2)
    np.testing.assert_array_equal(y, [[7, 8, 9], [2, 3, 4]])


@pytest.mark.parametrize(("lanes", "rows", "width"), [(1, 2, 3), (4, 16, 576), (3, 5, 17)])
def test_mask_rows__is_the_definition(lanes: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    hidden = rng.standard_normal((lanes * rows, width)).astype(np.float32)
    mask = rng.standard_normal(width).astype(pf.bfloat16)
    y = pf.dflash2_mask_rows(hidden, mask, lanes, rows)
    np.testing.assert_array_equal(y, reference.dflash2_mask_rows(hidden, mask, lanes, rows))


# ---- Rings


@pytest.mark.parametrize("length", ["0", "1", "W - 2", "W - 1", "W", "3 * W"])
def test_lengths__with_nan_in_every_slot_that_holds_no_token(length: str, no_leaks: None) -> None:
    g = Geometry(2, 4, 2, 64, 5, 37, 5)
    rng = np.random.default_rng(len(length))
    n = eval(length, {"W": g.window})
    for position in (0, 1, g.window // 2, g.window - 1):
        keys, values = rng.standard_normal((2, 2, 2, g.window, 64)).astype(np.float32)
        unused = (position - 1 - np.arange(g.window)) % g.window >= n
        keys[:, :, unused] = values[:, :, unused] = np.nan
        ring = pf.load_dflash2_ring(keys, values, [n, n], [position, position])
        twin = reference.DFlash2Ring(to_bfloat16(keys), to_bfloat16(values), (n, n), (position, position))
        block = g.block(rng)
        packed, expected = pf.dflash2_pack(ring, *block), reference.dflash2_pack(twin, *block)
        for ours, theirs in zip(packed, expected, strict=True):
            same_bits(ours, theirs)
        mask = pf.dflash2_mask(ring, g.rows, g.heads)
        same_bits(mask, reference.dflash2_mask(twin, g.rows, g.heads))
        context = np.asarray(pf.dflash2_attention(*packed, mask), np.float64)
        theirs = reference.dflash2_attention(*expected, mask, rounding=False)
        np.testing.assert_allclose(context, theirs, atol=2.0**-11 * np.abs(theirs).max() + 1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_rounds__are_the_definition_and_windowed_attention(seed: int, no_leaks: None) -> None:
    rng = np.random.default_rng(seed)
    g = random_geometry(rng)
    ring, twin, sequences = ring_of(g), ring_of(g, reference), Sequences(g)
    for _ in range(10):
        block = g.block(rng)
        packed, mask = pf.dflash2_pack(ring, *block), pf.dflash2_mask(ring, g.rows, g.heads)
        for ours, theirs in zip(packed, reference.dflash2_pack(twin, *block), strict=True):
            same_bits(ours, theirs)
        same_bits(mask, reference.dflash2_mask(twin, g.rows, g.heads))
        context = np.asarray(pf.dflash2_attention(*packed, mask), np.float64)
        expected = sequences.attention(*block, to_bfloat16)
        np.testing.assert_allclose(context, expected, atol=2.0**-11 * np.abs(expected).max() + 1e-6)
        k, v = g.context(rng)
        counts = rng.integers(0, g.commit + 1, g.lanes)
        ring, old = pf.dflash2_commit(ring, k, v, counts), ring
        before = [np.asarray(x).copy() for x in (twin.keys(), twin.values())]
        twin = reference.dflash2_commit(twin, k, v, counts)
        same_bits(ring.keys(), twin.keys())
        same_bits(ring.values(), twin.values())
        same_bits(old.keys(), before[0])
        same_bits(old.values(), before[1])
        assert (ring.lengths, ring.write_positions) == (twin.lengths, twin.write_positions)
        sequences.commit(k, v, counts)


@pytest.mark.parametrize(("head_dim", "rows", "columns"), [(64, 1, 5), (128, 3, 130), (256, 16, 70)])
def test_attention__is_the_definition_at_any_alignment_and_reads_nothing_masked(
    head_dim: int, rows: int, columns: int, no_leaks: None
) -> None:
    rng = np.random.default_rng(columns)
    shapes = {"q": (2, 4, rows, head_dim), "keys": (2, 2, columns, head_dim), "values": (2, 2, columns, head_dim)}
    given = {name: to_bfloat16(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    given["mask"] = to_bfloat16(np.zeros((2, 4, rows, columns), np.float32))
    hidden = rng.random(columns) < 0.6
    hidden[0] = False
    given["mask"][..., hidden] = -np.inf
    given["mask"][1, :, -1] = -np.inf  # a row that sees nothing is zero
    expected = reference.dflash2_attention(*given.values(), rounding=False)
    assert not expected.reshape(2, rows, -1)[1, -1].any()
    given["keys"][:, :, hidden] = given["values"][:, :, hidden] = np.nan
    for padding in (0, 1):  # numbers before the first: 2 bytes
        arrays = []
        for x in given.values():
            flat = pf.array(np.concatenate([np.zeros(padding, pf.bfloat16), x.reshape(-1)]))
            arrays.append(pf.Array(flat.device, flat.buffer, x.shape, flat.format, flat._offset + 2 * padding))
        y = np.asarray(pf.dflash2_attention(*arrays), np.float64)
        np.testing.assert_allclose(y, expected, atol=2.0**-11 * np.abs(expected).max() + 1e-6)


def test_rounding__to_nearest_even_in_pack_and_commit() -> None:
    numbers = np.array([bits for bits, _ in ROUNDING], np.uint32).view(np.float32)
    x = np.zeros((1, 2, 1, 64), np.float32)
    x[0, 0, 0, : len(numbers)] = numbers
    ring = pf.init_dflash2_ring(1, 4, 1, 64)
    expected = [bits for _, bits in ROUNDING]
    for packed in pf.dflash2_pack(ring, x, x, x):
        np.testing.assert_array_equal(np.asarray(packed).view(np.uint16)[0, 0, 0, : len(numbers)], expected)
    ring = pf.dflash2_commit(ring, x, x, [1])
    np.testing.assert_array_equal(np.asarray(ring.keys()).view(np.uint16)[0, 0, 0, : len(numbers)], expected)


def test_commit__copies_the_pages_its_slots_lie_on_and_shares_the_rest() -> None:
    device = pf.Device(threads=1, arena_bytes=64 * 65536)
    ring = pf.init_dflash2_ring(2, 100, 8, 128, device=device)  # 16 slots a page, 13 pages
    assert ring.slots_per_page == 16
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 16, 8, 128)).astype(np.float32)
    for _ in range(7):
        ring = pf.dflash2_commit(ring, k, v, [16, 16])
    assert (ring.pages, device.arena_stats()["used_pages"]) == (13, 13)
    before = device.arena_stats()
    after = pf.dflash2_commit(ring, k, v, [2, 0])  # slots 12 and 13 of lane 0
    stats = device.arena_stats()
    assert stats["used_pages"] == 14
    assert stats["copied_pages"] - before["copied_pages"] == 1
    same = pf.dflash2_commit(ring, k, v, [0, 0])
    assert device.arena_stats() == stats
    assert same.lengths == ring.lengths
    after.close(), same.close(), ring.close()
    assert device.arena_stats()["used_pages"] == 0


def test_commit__out_of_pages_leaves_everything_as_it_was() -> None:
    device = pf.Device(threads=1, arena_bytes=3 * 65536)
    ring = pf.init_dflash2_ring(1, 64, 8, 128, device=device)
    x = np.ones((1, 16, 8, 128), np.float32)
    kept = [ring := pf.dflash2_commit(ring, x, x, [16]) for _ in range(3)]
    before = device.arena_stats()
    with pytest.raises(pf.OutOfPages, match=r"\[dflash2_commit\] out of pages: needed 1 more"):
        pf.dflash2_commit(ring, x, x, [1])
    assert device.arena_stats() == before
    assert kept[-1].lengths == (48,)


def test_rounds__ten_thousand_with_random_acceptance_leak_nothing(no_leaks: None) -> None:
    device = pf.Device(threads=1, arena_bytes=32 * 65536)
    ring = pf.init_dflash2_ring(2, 40, 8, 128, device=device)
    rng = np.random.default_rng(1)
    k, v = (pf.array(x, device=device) for x in rng.standard_normal((2, 2, 8, 8, 128)).astype(np.float32))
    total = np.zeros(2, int)
    for _ in range(10_000):
        counts = rng.integers(0, 9, 2)
        before = device.arena_stats()["allocated_pages"]
        ring, total = pf.dflash2_commit(ring, k, v, counts), total + counts
        start = total - counts
        touched = {(40 * lane + (start[lane] + i) % 40) // 16 for lane in (0, 1) for i in range(counts[lane])}
        assert device.arena_stats()["allocated_pages"] - before == len(touched)
    assert ring.lengths == tuple(total)
    assert device.arena_stats()["used_pages"] == 5
    ring.close()
    assert device.arena_stats()["used_pages"] == 0
    del k, v, ring
    device.close()


def refusals() -> list[tuple[str, Any]]:
    ring = pf.init_dflash2_ring(2, 9, 2, 64)

    def f32(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    q, k = f32(2, 4, 4, 64), f32(2, 4, 2, 64)
    b = lambda x: x.astype(pf.bfloat16)  # noqa: E731
    wide, mask = b(f32(2, 2, 12, 64)), b(f32(2, 4, 4, 12))
    x16, x9 = np.zeros((4, 32), np.float16), f32(2, 9)
    return [
        (r"lanes: expected 1…4, got 0", lambda: pf.init_dflash2_ring(0, 9, 2, 64)),
        (r"lanes: expected 1…4, got 5", lambda: pf.init_dflash2_ring(5, 9, 2, 64)),
        (r"head_dim: expected 64, 128 or 256, got 80", lambda: pf.init_dflash2_ring(1, 9, 2, 80)),
        (r"key_value_heads: expected 1…256 .* got 257", lambda: pf.init_dflash2_ring(1, 9, 257, 64)),
        (r"window: expected 3…", lambda: pf.init_dflash2_ring(1, 2, 1, 64)),
        (r"window: expected a whole number", lambda: pf.init_dflash2_ring(1, -1, 1, 64)),
        (r"rows: expected 2…16, less than the window of 9, got 1", lambda: pf.dflash2_mask(ring, 1, 4)),
        (r"rows: expected 2…16, less than the window of 9, got 9", lambda: pf.dflash2_mask(ring, 9, 4)),
        (r"heads: expected a multiple of key_value_heads=2, got 3", lambda: pf.dflash2_mask(ring, 4, 3)),
        (r"rows: .* got 1", lambda: pf.dflash2_pack(ring, q[:, :1], k, k)),
        (r"rows: .* got 17", lambda: pf.dflash2_pack(ring, f32(2, 17, 4, 64), k, k)),
        (r"q: expected \[2, 4, 4, 64\] .* got \[1, 4, 4, 64\]", lambda: pf.dflash2_pack(ring, q[:1], k, k)),
        (r"k: expected \[2, 4, 2, 64\] .* got \[2, 3, 2, 64\]", lambda: pf.dflash2_pack(ring, q, k[:, :3], k)),
        (r"v: expected F32, got BF16", lambda: pf.dflash2_pack(ring, q, k, b(k))),
        (r"k: expected 1…16 tokens a lane, .* got 9", lambda: pf.dflash2_commit(ring, f32(2, 9, 2, 64), k, [1, 1])),
        (r"k: expected 1…16 tokens a lane, .* got 0", lambda: pf.dflash2_commit(ring, k[:, :0], k[:, :0], [0, 0])),
        (r"v: expected \[2, 4, 2, 64\]", lambda: pf.dflash2_commit(ring, k, k[:, :3], [1, 1])),
        (r"counts: expected at most 4, .* got 5 for lane 1", lambda: pf.dflash2_commit(ring, k, k, [0, 5])),
        (r"counts: expected 2 whole numbers", lambda: pf.dflash2_commit(ring, k, k, [1])),
        (r"counts: expected 2 whole numbers", lambda: pf.dflash2_commit(ring, k, k, [1, -1])),
        (r"mask_rows\] lanes: .* got 5", lambda: pf.dflash2_mask_rows(f32(10, 3), b(f32(3)), 5, 2)),
        (r"mask_rows\] rows: .* got 17", lambda: pf.dflash2_mask_rows(f32(17, 3), b(f32(3)), 1, 17)),
        (r"mask_embedding: expected BF16, got F32", lambda: pf.dflash2_mask_rows(f32(2, 3), f32(3), 1, 2)),
        (r"hidden: expected \[4, 3\]", lambda: pf.dflash2_mask_rows(f32(2, 3), b(f32(3)), 2, 2)),
        (r"keys: expected BF16, got F32", lambda: pf.dflash2_attention(b(q), f32(2, 2, 12, 64), wide, mask)),
        (r"mask: expected \[2, 4, 4, 12\]", lambda: pf.dflash2_attention(b(q), wide, wide, mask[:, :1])),
        (r"side: expected 0 .* got 2", lambda: pf.dflash2_conv(x16, f32(2, 2, 32), f32(4, 8), side=2, rows=4)),
        (r"rows: expected a divisor of the 4", lambda: pf.dflash2_conv(x16, f32(2, 2, 32), f32(4, 8), side=0, rows=3)),
        (r"base_kernel: expected \[2, 2, 32\]", lambda: pf.dflash2_conv(x16, f32(2, 2, 16), f32(4, 8), side=0, rows=4)),
        (r"dynamic: expected 2 \* 2 taps", lambda: pf.dflash2_conv(x16, f32(2, 2, 32), f32(4, 12), side=0, rows=4)),
        (r"x: expected 3 heads of 16", lambda: pf.dflash2_heads(f32(2, 32), None, f32(2, 8, 2), heads=3, epsilon=0)),
        (r"uniforms: needed", lambda: pf.dflash2_select(x9, f32(2, 3), [1], f32(9, 3), f32(9, 3), k=2, temperature=1)),
        (r"k: expected", lambda: pf.dflash2_select(f32(2, 9), f32(2, 3), [1], f32(9, 3), f32(9, 3), k=10)),
        (r"expected 0…8, got 9", lambda: pf.dflash2_select(f32(2, 9), f32(2, 3), [9], f32(9, 3), f32(9, 3), k=2)),
    ]  # fmt: skip


def test_refusals__name_the_rule_that_is_broken() -> None:
    for message, call in refusals():
        with pytest.raises(pf.InvalidArgument, match=message):
            call()
    ring = pf.init_dflash2_ring(1, 9, 1, 64)
    ring.close()
    with pytest.raises(pf.StateError, match="closed"):
        pf.dflash2_mask(ring, 2, 1)


# ---- What a draft layer does beside


@pytest.mark.parametrize(("blocks", "rows", "width", "groups", "taps"), [
    (1, 2, 32, 2, 2), (4, 8, 576, 36, 2), (2, 5, 48, 1, 3), (3, 1, 20, 4, 2), (1, 16, 96, 6, 8),
])  # fmt: skip
def test_conv__is_the_definition(blocks: int, rows: int, width: int, groups: int, taps: int, no_leaks: None) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((blocks * rows, width)).astype(np.float16)
    base = rng.standard_normal((2, taps, width)).astype(np.float32)
    dynamic = rng.standard_normal((blocks * rows, 2 * taps * groups)).astype(np.float32)
    for side in (0, 1):
        y = pf.dflash2_conv(x, base, dynamic, side=side, rows=rows)
        expected = reference.dflash2_conv(x, base, dynamic, side=side, rows=rows)
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=1e-5, rtol=2.0**-10)
        alone = [pf.dflash2_conv(x[i : i + rows], base, dynamic[i : i + rows], side=side, rows=rows)
                 for i in range(0, len(x), rows)]  # fmt: skip
        np.testing.assert_array_equal(y, np.concatenate([np.asarray(a) for a in alone]))
    identity = np.zeros_like(base)
    identity[:, 0] = 1
    np.testing.assert_array_equal(pf.dflash2_conv(x, identity, 0 * dynamic, side=1, rows=rows), x)


@pytest.mark.parametrize(("heads", "dim", "norm"), [(3, 64, np.float32), (1, 256, np.float16), (8, 128, None)])
def test_heads__is_the_definition(heads: int, dim: int, norm: Any, no_leaks: None) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((7, heads * dim)).astype(np.float32)
    turn = rng.standard_normal((7, dim // 2)) * 100
    angles = np.stack([np.cos(turn), np.sin(turn)], axis=-1).astype(np.float32)
    weight = None if norm is None else (1 + 0.2 * rng.standard_normal(dim)).astype(norm)
    y = pf.dflash2_heads(x, weight, angles, heads=heads, epsilon=1e-6)
    expected = reference.dflash2_heads(x, weight, angles, heads=heads, epsilon=1e-6)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("k", [1, 2, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_select__is_the_definition(k: int, temperature: float, no_leaks: None) -> None:
    rng = np.random.default_rng(k)
    lanes, steps, vocabulary, rank = 3, 7, 61, 24
    logits = rng.standard_normal((lanes * steps, vocabulary)).astype(np.float32)
    projected = rng.standard_normal((lanes * steps, rank)).astype(np.float32)
    books = rng.standard_normal((2, vocabulary, rank)).astype(pf.bfloat16)
    uniforms = rng.random((lanes, steps)).astype(np.float32)
    options = {"k": k, "temperature": temperature, "uniforms": uniforms}
    ours = pf.dflash2_select(logits, projected, [5, 60, 0], *books, **options)
    expected = reference.dflash2_select(logits, projected, [5, 60, 0], *books, **options)
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_array_equal(ours[1], expected[1])
    np.testing.assert_allclose(ours[2], expected[2], atol=1e-4)
    if k == 1 or not temperature:
        plain = pf.dflash2_select(logits, projected, [5, 60, 0], books[0], 0 * books[1], k=k)[0]
        np.testing.assert_array_equal(np.asarray(plain).reshape(-1), logits.argmax(axis=1))


def test_select__draws_follow_the_probabilities_it_gives() -> None:
    """Uniforms over a fine grid: each candidate is taken for as much of it as its probability says."""
    rng = np.random.default_rng(0)
    logits, projected = rng.standard_normal((1, 9)).astype(np.float32), rng.standard_normal((1, 3)).astype(np.float32)
    books = rng.standard_normal((2, 9, 3)).astype(np.float32)
    drawn = np.zeros(9)
    for u in (np.arange(2000) + 0.5) / 2000:
        tokens, ids, q = pf.dflash2_select(
            logits, projected, [1], *books, k=4, temperature=1.5, uniforms=np.full((1, 1), u, np.float32)
        )
        drawn[tokens.item()] += 1 / 2000
    np.testing.assert_allclose(drawn[np.asarray(ids)[0, 0]], np.asarray(q)[0, 0], atol=1e-3)


def test_instruction_sets_and_threads__give_the_same_bits() -> None:
    g = Geometry(3, 6, 2, 128, 7, 41, 7)
    results = []
    for name, threads in (("", 1), ("", 3), ("portable", 2), ("avx2", 2)):
        try:
            device = pf.Device(instruction_set=name, threads=threads, arena_bytes=1 << 22)
        except pf.DeviceError:
            continue
        rng = np.random.default_rng(5)
        ring = pf.init_dflash2_ring(g.lanes, g.window, g.key_value_heads, g.head_dim, device=device)
        for counts in ([7, 0, 3], [7, 7, 7], [1, 6, 7]):
            ring = pf.dflash2_commit(ring, *g.context(rng), counts)
        packed = pf.dflash2_pack(ring, *g.block(rng))
        context = pf.dflash2_attention(*packed, pf.dflash2_mask(ring, g.rows, g.heads))
        base, dynamic = (rng.standard_normal(s).astype(np.float32) for s in ((2, 2, 768), (21, 4 * 48)))
        mixed = pf.dflash2_conv(context, base, dynamic, side=0, rows=7)
        angles = rng.standard_normal((21, 64, 2)).astype(np.float32)
        x = pf.array(rng.standard_normal((21, 768)).astype(np.float32), device=device)
        turned = pf.dflash2_heads(x, np.ones(128, np.float32), angles, heads=6, epsilon=1e-6)
        books = rng.standard_normal((2, 768, 32)).astype(np.float32)
        hidden = rng.standard_normal((21, 32)).astype(np.float32)
        uniforms = rng.random((3, 7)).astype(np.float32)
        chosen = pf.dflash2_select(x, hidden, [1, 2, 3], *books, k=8, temperature=0.9, uniforms=uniforms)
        results.append([np.asarray(a).tobytes() for a in (*packed, context, mixed, turned, *chosen)])
    assert len(results) >= 3
    assert all(result == results[0] for result in results)
