"""The table of attention cases: every device runs all of them against `pyferrum.reference`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import pyferrum as pf
from tests.cases.weights import random_weight


@dataclass(frozen=True)
class Case:
    """A layer, and how its sequences grow: chunks[i] are the calls' token counts of sequence i."""

    name: str
    head_dim: int = 64
    query_heads: int = 4
    key_value_heads: int = 2
    hidden: int = 96
    chunks: tuple[tuple[int, ...], ...] = ((7, 1, 5),)
    qk_norm: bool = False
    biases: bool = False
    formats: tuple[str, str, str, str] = ("F16", "F16", "F16", "F16")
    dtype: str = "float32"
    norm_dtype: str = "float32"
    options: dict[str, object] = field(default_factory=dict)

    def config(self) -> pf.AttentionConfig:
        """The layer's configuration."""
        return pf.AttentionConfig(
            hidden_size=self.hidden,
            query_heads=self.query_heads,
            key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            **{"maximum_context_tokens": 4096} | self.options,
        )

    def weights(self, rng: np.random.Generator) -> pf.AttentionWeights:
        """Random weights of the case's formats."""
        config = self.config()
        query, kv, hidden = config.query_projection_features, config.kv_features, self.hidden
        shapes = ((query, hidden), (kv, hidden), (kv, hidden), (hidden, self.query_heads * self.head_dim))
        q, k, v, o = (random_weight(rng, f, s) for f, s in zip(self.formats, shapes, strict=True))

        def norm(length: int) -> np.ndarray:
            return (1 + 0.2 * rng.standard_normal(length)).astype(self.norm_dtype)

        def bias(length: int) -> np.ndarray | None:
            return (0.5 * rng.standard_normal(length)).astype(np.float32) if self.biases else None

        return pf.AttentionWeights(
            norm(hidden),
            q,
            k,
            v,
            o,
            norm(self.head_dim) if self.qk_norm else None,
            norm(self.head_dim) if self.qk_norm else None,
            bias(query),
            bias(kv),
            bias(kv),
            bias(hidden),
        )


def _page(key_value_heads: int, head_dim: int) -> int:
    return 65536 // (4 * key_value_heads * head_dim)


def _around(page: int) -> tuple[tuple[int, ...], ...]:
    """Chunks that end just before, on and after the first two page boundaries."""
    return ((page - 1, 1, 1, page - 2, 1, 1, 3),)


CASES = [
    *(
        Case(f"head_dim {d}", head_dim=d, qk_norm=d % 3 == 0, options={"rope_interleaved": d % 16 == 0})
        for d in (2, 40, 64, 72, 80, 96, 112, 128, 192, 256)
    ),
    *(
        Case(f"groups {q}:{k}", query_heads=q, key_value_heads=k, head_dim=32, chunks=((3, 40, 1),))
        for q, k in ((1, 1), (2, 1), (3, 1), (4, 1), (6, 2), (8, 1), (5, 5), (40, 1))
    ),
    Case("partial rope, half-split", head_dim=128, options={"rope_dim": 32}),
    Case("partial rope, interleaved", head_dim=80, options={"rope_dim": 64, "rope_interleaved": True}),
    Case("yarn", options={"rope_scaling": pf.rope.YarnScaling(4.0, 1024)}),
    Case("llama3 rope", options={"rope_scaling": pf.rope.Llama3Scaling(8.0), "rope_theta": 5e5}),
    Case(
        "frequency factors",
        options={"rope_scaling": pf.rope.FrequencyFactors(tuple(np.linspace(1, 8, 32))), "rope_interleaved": True},
    ),
    Case("gate", options={"output_gate": True}),
    Case("gate, qk norm, interleaved", qk_norm=True, options={"output_gate": True, "rope_interleaved": True}),
    Case("gate, head_dim 40", head_dim=40, options={"output_gate": True}),
    Case("qk norm, float16 norms", qk_norm=True, norm_dtype="float16"),
    Case("biases", biases=True),
    Case("window 5", chunks=((3, 9, 1, 30),), options={"sliding_window": 5}),
    Case("window 1", chunks=((3, 9, 1),), options={"sliding_window": 1}),
    Case("window over spans", key_value_heads=4, chunks=((700, 1, 90),), options={"sliding_window": 300}),
    Case("softcap", options={"softcap": 2.5}),
    Case("softcap, window, gate", options={"softcap": 3.0, "sliding_window": 6, "output_gate": True}),
    Case("scale", options={"scale": 0.3}),
    Case("float16 stream", dtype="float16"),
    Case("float16 stream, gate", dtype="float16", qk_norm=True, options={"output_gate": True}),
    Case("hidden 20", hidden=20, head_dim=20, chunks=((5, 1), (2, 3))),
    Case("pages of 85 tokens", key_value_heads=3, query_heads=3, chunks=_around(_page(3, 64))),
    Case("pages of 16 tokens", key_value_heads=4, head_dim=256, chunks=_around(16)),
    Case("pages of 21 tokens", key_value_heads=3, query_heads=3, head_dim=256, chunks=_around(21)),
    Case("pages of 512 tokens", key_value_heads=1, query_heads=2, head_dim=32, chunks=_around(512)),
    Case("pages of one token", key_value_heads=64, query_heads=64, head_dim=256, hidden=64, chunks=((1, 2, 1),)),
    Case("a long context", key_value_heads=1, query_heads=3, chunks=((2000, 1, 17),)),
    Case("two sequences", chunks=((9, 1, 4), (1, 7, 1))),
    Case("three sequences", head_dim=40, chunks=((130, 1, 2), (1, 1, 1), (33, 64, 5)), qk_norm=True),
    *(
        Case(f"weights {f}", hidden=256, formats=(f, f, f, f), chunks=((1, 6, 2),))
        for f in ("F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    ),
    Case("mixed weights", hidden=256, formats=("Q4_K", "BF16", "Q6_K", "Q8_0"), chunks=((5, 1),), biases=True),
]
