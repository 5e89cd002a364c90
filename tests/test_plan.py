"""Plans: the numbers of the specification, and that a plan is what a call runs."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native
from tests import tiny
from tests.cases.attention import CASES

# Qwen3.5-4B's full-attention layers.
QWEN = pf.AttentionConfig(
    hidden_size=2560,
    query_heads=16,
    key_value_heads=4,
    head_dim=256,
    rope_dim=64,
    maximum_context_tokens=262144,
    epsilon=1e-6,
    output_gate=True,
)


def test_shape__of_qwen_4b_fits_the_page_limit_exactly() -> None:
    plan = pf.plan_attention(QWEN, 3, packed=False)
    assert QWEN.query_projection_features == 8192
    assert plan.state_bytes_per_token == 4096
    assert plan.maximum_pages == 16384
    assert plan.scratch_bytes_per_token == 47104
    assert plan.scratch_bytes == 3 * 47104
    assert pf.plan_attention(QWEN, 17).pages == 2


@pytest.mark.parametrize(("n", "packed", "launches", "form"), [
    (1, False, 8, "scalar"),
    (1, True, 8, "scalar"),
    (4, False, 32, "participant_loop"),
    (4, True, 14, "packed"),
])  # fmt: skip
def test_launches__count_and_form(n: int, packed: bool, launches: int, form: str) -> None:
    plan = pf.plan_attention(QWEN, [2] * n, starts=5, packed=packed)
    assert (len(plan.launches), plan.form) == (launches, form)


FINGERPRINTS = [
    ([1], [0], "ea5b862d54cdf97e35550c7a0a794d4fac1700bbcefd56dbf1cbc35f33ec356d"),
    ([1], [16], "0ed887ec5cf284984fbe17fea34f104cf4ae90660f3c2912c6a5dacbbc3bf409"),
    ([3, 1], [0, 7], "e3f17167586f8b59aee72f1841118b420c0f9df6cd459604f0312d96073a23b1"),
]


@pytest.mark.parametrize(("lengths", "starts", "digest"), FINGERPRINTS)
def test_fingerprint__known_answers(lengths: list[int], starts: list[int], digest: str) -> None:
    assert pf.plan_attention(QWEN, lengths, starts=starts).fingerprint == digest


def test_fingerprint__preimages_of_every_length() -> None:
    """SHA-256's padding at every remainder of a block."""
    for n in range(1, 12):
        lengths, starts = list(range(1, n + 1)), list(range(n))
        preimage = b"ferrum.metal.causal-attention.reusable-topology.v1\0" + struct.pack("<QQ", n, sum(lengths))
        preimage += b"".join(struct.pack("<QQQ", t, s, s + t) for t, s in zip(lengths, starts, strict=True))
        assert pf.plan_attention(QWEN, lengths, starts=starts).fingerprint == hashlib.sha256(preimage).hexdigest()


def test_scratch__regions_lie_behind_each_other_in_aligned_rows() -> None:
    config = pf.AttentionConfig(20, 3, 1, 20, maximum_context_tokens=64)  # rows of 40 and 120 bytes
    plan = pf.plan_attention(config, [2, 5])
    rows = [48, 128, 48, 48, 128, 128, 48]
    assert plan.scratch_bytes_per_token == sum(rows)
    assert list(plan.scratch_regions.values()) == [7 * sum(rows[:i]) for i in range(7)]
    prepare = next(launch for launch in plan.launches if launch.kernel.startswith("causal_attention_prepare"))
    assert prepare.params["query_raw_stride"] * 2 == 128
    second = [launch for launch in plan.launches if launch.kernel == prepare.kernel][1]
    offsets = {binding.slot: binding.offset for binding in second.bindings if binding.resource == "scratch"}
    assert offsets[0] == plan.scratch_regions["query_raw"] + 2 * 128


def test_page_tables__cover_the_tokens_that_are_there_and_no_more() -> None:
    plan = pf.plan_attention(QWEN, [1, 16, 17], starts=[15, 16, 0])
    pages = [launch.params["page_count"] for launch in plan.launches if "prepare" in launch.kernel]
    assert pages == [1, 2, 2]
    assert plan.page_table_bytes == 3 * 16
    assert plan.pages == 5


def test_split__of_a_long_context_is_two_launches_over_spans_at_absolute_positions() -> None:
    for tokens, start, packed in (
        (1, 255, False),
        (1, 256, False),
        (16, 5000, False),
        (17, 5000, False),
        (1, 9000, True),
    ):
        plan = pf.plan_attention(QWEN, [tokens, 1] if packed else tokens, starts=start, packed=packed)
        kernels = [launch.kernel.removeprefix("causal_attention_") for launch in plan.launches]
        spans = (start + tokens + 255) // 256
        if tokens > 16:
            assert "tiles_f16" in kernels and plan.partials_bytes == 0
        elif spans == 1:
            assert "decode_f16" in kernels and plan.partials_bytes == 0
        else:
            split = [launch for launch in plan.launches if "split" in launch.kernel]
            assert split[0].grid == (spans, 16, tokens)
            assert split[0].params["span_tokens"] == 256 and split[0].params["first_span"] == 0
            assert kernels.count("combine_f16") == len(split) == (2 if packed else 1)
            assert plan.partials_bytes == 4 * 16 * tokens * spans * (256 + 16) * len(split)
    windowed = pf.AttentionConfig(64, 4, 4, 64, maximum_context_tokens=8192, sliding_window=300)
    split = pf.plan_attention(windowed, 1, starts=2000).launches[5]
    # Pages of 64 tokens, spans of 256: keys 1701…2000 lie in spans 6 and 7.
    assert (split.params["first_span"], split.params["spans"]) == (6, 2)


def test_linear__shape_follows_the_rows() -> None:
    for tokens, kernel in ((1, "vector"), (2, "rows"), (16, "rows"), (17, "tiles")):
        assert pf.plan_attention(QWEN, tokens).launches[1].kernel == f"linear_{kernel}_f16"


def test_barriers__only_independent_launches_overlap() -> None:
    plan = pf.plan_attention(QWEN, [2, 3])
    free = [launch.kernel for launch in plan.launches if not launch.barrier]
    assert free == [
        "linear_rows_f16",
        "linear_rows_f16",
        "causal_attention_prepare_f16",
        "causal_attention_decode_f16",
    ]


def test_kernels__plans_of_all_cases_name_known_kernels_and_bind_each_slot_once() -> None:
    known = set(_native.kernel_names())
    for case in CASES:
        weights = case.weights(np.random.default_rng(0))
        for packed in (True, False):
            plan = pf.plan_attention(case.config(), [1, 2], starts=3, weights=weights, dtype=case.dtype, packed=packed)
            for launch in plan.launches:
                assert launch.kernel in known
                slots = [binding.slot for binding in launch.bindings]
                assert len(slots) == len(set(slots))


def test_constants__say_what_the_weights_have() -> None:
    case = next(case for case in CASES if case.name == "gate, qk norm, interleaved")
    plan = pf.plan_attention(case.config(), 1, weights=case.weights(np.random.default_rng(0)))
    constants = {launch.kernel: set(launch.constants) for launch in plan.launches}
    assert constants["rms_norm_f32"] == {"norm_f32"}
    assert constants["causal_attention_prepare_f16"] == {
        "rope_interleaved", "query_norm", "query_norm_f32", "key_norm", "key_norm_f32",
    }  # fmt: skip
    assert constants["causal_attention_decode_f16"] == {"output_gate"}


def test_plan__runs_nothing_and_touches_no_page() -> None:
    device = pf.Device(threads=1)
    pf.plan_attention(QWEN, [500, 2], starts=[9000, 1], device=device)
    assert device.arena_stats()["slab_pages"] == 0


def test_plan__prints_every_launch() -> None:
    text = str(pf.plan_attention(QWEN, [1, 1], formats="Q4_K"))
    assert text.count("linear_rows_q4_k") == 4
    assert text.count("causal_attention_decode_f16") == 2


BAD = [
    ({"query_heads": 6}, "query_heads: expected a multiple of key_value_heads=4"),
    ({"head_dim": 257}, "head_dim: expected 1…256"),
    ({"head_dim": 0, "rope_dim": None}, "rope_dim"),
    ({"rope_dim": 63}, "rope_dim: expected an even number"),
    ({"rope_dim": 258}, "rope_dim: expected an even number"),
    ({"hidden_size": 0}, "hidden_size: expected 1…2\\^31 - 1"),
    ({"key_value_heads": 0}, "key_value_heads: expected at least 1"),
    ({"key_value_heads": 65, "query_heads": 65}, "key_value_heads: expected 1…64"),
    ({"maximum_context_tokens": 262145}, "maximum_context_tokens: expected at most 262144"),
    ({"maximum_context_tokens": 0}, "maximum_context_tokens: expected at least 1"),
    ({"epsilon": 0.0}, "epsilon: expected a positive number"),
    ({"epsilon": float("nan")}, "epsilon: expected a positive number"),
    ({"softcap": -1.0}, "softcap"),
    ({"sliding_window": 0}, "sliding_window"),
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"hidden_size": 2**33}, "hidden_size"),
    ({"query_heads": 2**31, "key_value_heads": 1}, "query_heads"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_config__every_rule_is_a_named_error(change: dict[str, object], message: str) -> None:
    fields = {name: getattr(QWEN, name) for name in QWEN.__dataclass_fields__} | change
    with pytest.raises(pf.InvalidArgument, match=message):
        pf.init_state(pf.AttentionConfig(**fields))


def test_config__sizes_are_checked_before_anything_of_them_is_made() -> None:
    """A head of half a billion dims is refused without a table of its frequencies."""
    for change in ({"head_dim": 2**29}, {"head_dim": 2**31, "rope_dim": 2**31}, {"head_dim": 64, "rope_dim": 2**30}):
        tracemalloc.start()
        with pytest.raises(pf.InvalidArgument, match=r"head_dim: expected 1…256|rope_dim: expected an even number"):
            pf.init_state(pf.AttentionConfig(32, 2, 1, **change))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_plan__refuses_what_the_call_refuses() -> None:
    for lengths, starts, message in (
        ([0], 0, "at least one token for sequence 0"),
        ([], 0, "at least one"),
        ([1], 262144, "maximum_context_tokens is 262144"),
        ([2**63], 0, "maximum_context_tokens"),
        ([1, 2], [1], "one per length"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.plan_attention(QWEN, lengths, starts=starts)
    with pytest.raises(pf.InvalidArgument, match="formats"):
        pf.plan_attention(QWEN, 1, formats="Q9_9")
    with pytest.raises(pf.InvalidArgument, match=r"weights.q_proj: rows of format Q4_K come in blocks of 256"):
        pf.plan_attention(pf.AttentionConfig(96, 1, 1, 32), 1, formats="Q4_K")


def test_plan__is_a_value() -> None:
    plan = pf.plan_attention(tiny.LAYER, [3, 1], starts=[5, 0], weights=tiny.layer())
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert same == plan and hash(same) == hash(plan)
    assert {plan, pf.plan_attention(tiny.LAYER, [3, 1], starts=[5, 0], weights=tiny.layer())} == {plan}
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["fingerprint"] == plan.fingerprint
    assert [launch["params"] for launch in written["launches"]] == [dict(launch.params) for launch in plan.launches]
