"""The definitions of the DFlash 2 functions against a model that knows no ring: whole sequences, absolute positions."""

from __future__ import annotations

import numpy as np
import pytest

from pyferrum import reference
from pyferrum.reference.dflash2 import to_bfloat16
from tests.cases.dflash2 import ROUNDING, Sequences, random_geometry


@pytest.mark.parametrize("seed", range(20))
def test_attention_over_a_ring__is_windowed_attention_at_absolute_positions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    geometry = random_geometry(rng, (2, 4))
    ring = reference.init_dflash2_ring(geometry.lanes, geometry.window, geometry.key_value_heads, geometry.head_dim)
    sequences = Sequences(geometry)
    for _ in range(14):
        q, k, v = geometry.block(rng)
        packed = reference.dflash2_pack(ring, q, k, v)
        mask = reference.dflash2_mask(ring, geometry.rows, geometry.heads)
        assert packed[1].shape == (geometry.lanes, geometry.key_value_heads, geometry.columns, geometry.head_dim)
        ours = reference.dflash2_attention(*packed, mask, rounding=False)
        np.testing.assert_allclose(ours, sequences.attention(q, k, v, to_bfloat16), atol=1e-9)
        k, v = geometry.context(rng)
        counts = rng.integers(0, geometry.commit + 1, geometry.lanes)
        ring = reference.dflash2_commit(ring, k, v, counts)
        sequences.commit(k, v, counts)
        assert all(p == n % geometry.window for p, n in zip(ring.write_positions, ring.lengths, strict=True))


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_attention__masked_columns_are_no_part_of_a_row(junk: float) -> None:
    """Row 0 sees all but the last column, row 1 the first two, row 2 none; what the others hold is not looked at."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, n, 8)) for heads, n in ((4, 3), (2, 5), (2, 5)))
    mask = np.zeros((1, 4, 3, 5))
    mask[:, :, 0, 4:] = mask[:, :, 1, 2:] = mask[:, :, 2] = -np.inf
    clean = reference.dflash2_attention(q, k, v, mask, rounding=False).reshape(3, 4, 8)
    scores = np.einsum("hrd,hcd->hrc", q[0], np.repeat(k[0], 2, axis=0)) / np.sqrt(8)
    for row, columns in ((0, 4), (1, 2)):
        weights = np.exp(scores[:, row, :columns])
        weights /= weights.sum(axis=1, keepdims=True)
        expected = np.einsum("hc,hcd->hd", weights, np.repeat(v[0, :, :columns], 2, axis=0))
        np.testing.assert_allclose(clean[row], expected, rtol=1e-12)
    np.testing.assert_array_equal(clean[2], 0)
    k[:, :, 4], v[:, :, 4], k[:, :, 2:4, 0], v[:, :, 2:4, 0] = junk, junk, junk, junk
    dirty = reference.dflash2_attention(q, k, v, mask, rounding=False).reshape(3, 4, 8)
    np.testing.assert_array_equal(dirty[1:], clean[1:])
    k[:, :, 2:4, 0], v[:, :, 2:4, 0] = 0, 0
    assert np.isfinite(reference.dflash2_attention(q, k, v, mask)).all()


def test_rounding__vectors() -> None:
    given = np.array([bits for bits, _ in ROUNDING], np.uint32).view(np.float32)
    np.testing.assert_array_equal(to_bfloat16(given).view(np.uint16), [bits for _, bits in ROUNDING])


def test_conv__by_hand() -> None:
    """Two blocks of three rows of a ramp, two channels of one group each."""
    x = np.arange(1.0, 13).reshape(6, 2)
    base = np.zeros((2, 2, 2))
    base[0, 0] = 1
    dynamic = np.zeros((6, 8))
    np.testing.assert_array_equal(reference.dflash2_conv(x, base, dynamic, side=0, rows=3), x)
    base[0] = [[0, 0], [1, 1]]  # tap 1 alone: the row before, and nothing before a block's first
    shifted = [[0, 0], [1, 2], [3, 4], [0, 0], [7, 8], [9, 10]]
    np.testing.assert_array_equal(reference.dflash2_conv(x, base, dynamic, side=0, rows=3), shifted)
    dynamic = dynamic.reshape(6, 2, 2, 2)
    dynamic[2, 1, 1, 0] = 5  # row 2, side 1, tap 1, the first group
    y = reference.dflash2_conv(x, np.zeros((2, 2, 2)), dynamic.reshape(6, 8), side=1, rows=3)
    expected = np.zeros((6, 2))
    expected[2, 0] = 5 * 3
    np.testing.assert_array_equal(y, expected)


def test_select__walks_over_the_chosen_predecessor() -> None:
    """Rank 1: token 3 follows the anchor 0; then 1 follows 3, though 2 has the larger logit."""
    logits = np.array([[0, 0, 1, 2], [0, 1, 2, 0]], np.float32)
    predecessor, successor = np.array([[0.0], [0], [0], [1]]), np.array([[0.0], [5], [0], [0]])
    projected = np.ones((2, 1))
    tokens, ids, q = reference.dflash2_select(logits, projected, [0], predecessor, successor, k=2)
    np.testing.assert_array_equal(tokens, [[3, 1]])
    np.testing.assert_array_equal(ids, [[[3, 2], [2, 1]]])
    np.testing.assert_array_equal(q, [[[1, 0], [0, 1]]])
    for codebooks in ((predecessor, 0 * successor), (0 * predecessor, successor)):
        tokens, _, _ = reference.dflash2_select(logits, projected, [0], *codebooks, k=2)
        np.testing.assert_array_equal(tokens, [[3, 2]])  # a zero codebook is plain top-1
    tokens, _, _ = reference.dflash2_select(logits, projected, [0], predecessor, successor, k=1)
    np.testing.assert_array_equal(tokens, [[3, 2]])  # so is one candidate
    # Sampled: softmax((values + pair) / T) over the candidates, and the index at which its sum passes the uniform.
    uniforms = [[0.1, 0.999]]
    tokens, _, q = reference.dflash2_select(
        logits, projected, [0], predecessor, successor, k=2, temperature=2.0, uniforms=uniforms
    )
    first = np.exp([1.0, 0.5]) / np.exp([1.0, 0.5]).sum()
    second = np.exp([1.0, 3.0]) / np.exp([1.0, 3.0]).sum()
    np.testing.assert_allclose(q[0], [first, second])
    np.testing.assert_array_equal(tokens, [[3, 1]])
