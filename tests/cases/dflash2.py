"""The table of DFlash 2 geometries, and the model they are held against: whole sequences at absolute positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Geometry:
    """Shapes of one ring and of the blocks over it."""

    lanes: int
    heads: int
    key_value_heads: int
    head_dim: int
    rows: int
    window: int
    commit: int
    """Rows of a commit."""

    @property
    def columns(self) -> int:
        """Packed columns."""
        return self.window - 1 + self.rows

    def block(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Random q, k, v of a block, float32."""
        shape = (self.lanes, self.rows, self.key_value_heads, self.head_dim)
        q = rng.standard_normal((self.lanes, self.rows, self.heads, self.head_dim))
        return tuple(x.astype(np.float32) for x in (q, rng.standard_normal(shape), rng.standard_normal(shape)))  # type: ignore[return-value]

    def context(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Random keys and values to commit, float32."""
        shape = (self.lanes, self.commit, self.key_value_heads, self.head_dim)
        keys, values = rng.standard_normal((2, *shape)).astype(np.float32)
        return keys, values


def random_geometry(rng: np.random.Generator, head_dims: tuple[int, ...] = (64, 128, 256)) -> Geometry:
    """A valid geometry with a small window, so that rings wrap often."""
    rows = int(rng.integers(2, 17))
    kv_heads = int(rng.integers(1, 4))
    return Geometry(
        lanes=int(rng.integers(1, 5)),
        heads=kv_heads * int(rng.integers(1, 4)),
        key_value_heads=kv_heads,
        head_dim=int(rng.choice(head_dims)),
        rows=rows,
        window=int(rng.integers(rows + 1, rows + 30)),
        commit=int(rng.integers(1, rows + 1)),
    )


@dataclass
class Sequences:
    """Every token ever committed, lane by lane: what a ring must be indistinguishable from."""

    geometry: Geometry
    keys: list[list[np.ndarray]] = field(default_factory=list)
    values: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [[] for _ in range(self.geometry.lanes)]
        self.values = [[] for _ in range(self.geometry.lanes)]

    def commit(self, k: np.ndarray, v: np.ndarray, counts: Any) -> None:
        """Append the first counts[b] tokens of each lane."""
        for lane, count in enumerate(counts):
            self.keys[lane] += list(k[lane, :count])
            self.values[lane] += list(v[lane, :count])

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, narrow: Any) -> np.ndarray:
        """Windowed attention of a block behind the sequences, one query at a time, float64 [B * R, H * D].

        A context token at position t is seen from position p if p - t < window; the block sees all of itself.
        `narrow` is the rounding of stored numbers.
        """
        g = self.geometry
        q, k, v = (narrow(x).astype(np.float64) for x in (q, k, v))
        out = np.zeros((g.lanes, g.rows, g.heads, g.head_dim))
        for lane in range(g.lanes):
            length = len(self.keys[lane])
            past_k = narrow(np.array(self.keys[lane], np.float32).reshape(length, g.key_value_heads, g.head_dim))
            past_v = narrow(np.array(self.values[lane], np.float32).reshape(length, g.key_value_heads, g.head_dim))
            for r in range(g.rows):
                seen = length + r - np.arange(length) < g.window
                for h in range(g.heads):
                    head = h // (g.heads // g.key_value_heads)
                    keys = np.concatenate([past_k[seen, head].astype(np.float64), k[lane, :, head]])
                    values = np.concatenate([past_v[seen, head].astype(np.float64), v[lane, :, head]])
                    scores = keys @ q[lane, r, h] / np.sqrt(g.head_dim)
                    weights = np.exp(scores - scores.max())
                    out[lane, r, h] = weights @ values / weights.sum()
        return out.reshape(g.lanes * g.rows, -1)


ROUNDING = [
    (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x7F7FFFFF, 0x7F80), (0xFF800000, 0xFF80),
    (0x7F800001, 0x7FC0), (0x00018000, 0x0002), (0x80000000, 0x8000),
]  # fmt: skip
"""float32 bits and the bfloat16 bits they round to (FACTS B.7)."""
