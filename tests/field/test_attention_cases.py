"""Attention and paged state: what users of other engines ran into (CASES.md A and B), as tests."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, reference
from tests import tiny

TOKENS_PER_PAGE = 65536 // tiny.LAYER.bytes_per_token
PAGES_OF_4 = pf.AttentionConfig(32, 16, 16, 256, maximum_context_tokens=64)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def run(state: pf.KVState, x: np.ndarray, weights: pf.AttentionWeights, cuts: tuple[int, ...]) -> tuple[Any, Any]:
    """The state after x, given in chunks that end at `cuts` and at its end, and all y's."""
    ys = []
    for begin, end in pairwise((0, *cuts, len(x))):
        state, y = pf.causal_attention(state, x[begin:end], weights)
        ys.append(np.asarray(y))
    return state, np.concatenate(ys)


def random_kv(config: pf.AttentionConfig, tokens: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    shape = (2, tokens, config.key_value_heads, config.head_dim)
    keys, values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return keys, values


# ---- A: numerics


@pytest.mark.parametrize("keep", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize(
    ("head_dim", "heads", "options"),
    [(64, 2, {}), (40, 1, {"softcap": 5.0}), (256, 16, {}), (128, 4, {"sliding_window": 3}), (16, 1, {"scale": 2.0})],
)
@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_unused_slots__may_hold_anything(keep: bool, head_dim: int, heads: int, options: dict, tokens: int) -> None:
    """Dao-AILab/flash-attention#1745, #2374; vllm-project/vllm#936; deepbeepmeep/Wan2GP#1628; ROCm/aiter#5401 (A4).

    Slots past the length are never read, not even multiplied by zero: NaN and infinities in the keys and values of
    the rest of the page give the bits that zeros give. `in place`: the call writes over some of them; `copied`: the
    longer state lives, so the page's prefix is copied into a page that was freed full of the same junk.
    """
    config = pf.AttentionConfig(32, heads, heads, head_dim, maximum_context_tokens=4096, **options)
    weights, x, kv = tiny.layer(config), tiny.rows(tokens), random_kv(config, 5)
    per_page = 65536 // config.bytes_per_token
    # Fill the tail page, the pages behind it that the call may take, and pages that will be taken for copies.
    junk_tokens = per_page * (2 + tokens // per_page) - 5
    results = set()
    for junk in (0, np.nan, np.inf, -np.inf):
        device = pf.Device(threads=1, poison=False)
        on_device = pf.AttentionWeights(*(pf.array(np.asarray(w), device=device) for w in weights))
        state = pf.init_state(config, device=device).append(*kv)
        filler = np.full((junk_tokens, heads, head_dim), junk, np.float16)
        recycled = pf.init_state(config, device=device).append(filler, filler)
        longer = state.append(filler, filler)
        short = longer.truncate(5)
        del state
        recycled.close()
        if not keep:
            longer.close()
        copies = device.arena_stats()["copied_pages"]
        new, y = pf.causal_attention(short, pf.array(x, device=device), on_device)
        assert device.arena_stats()["copied_pages"] - copies == (keep and 5 % per_page > 0)
        assert np.isfinite(np.asarray(y)).all()
        results.add((bits(y), bits(new.keys()), bits(new.values())))
    assert len(results) == 1


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 88, 96, 112, 128, 192, 256])
def test_head_dims__all_up_to_256_are_right(head_dim: int) -> None:
    """vllm-project/vllm#16808; ggml-org/llama.cpp#20375; Dao-AILab/flash-attention#28; AITemplate#53 (A5).

    The last one is facebookincubator/AITemplate#53. No head dim is outside a compiled set: right values.
    """
    config = pf.AttentionConfig(32, 4, 2, head_dim)
    weights, x = tiny.layer(config), tiny.rows(9)
    state, y = run(pf.init_state(config), x, weights, (7,))
    expected_state, expected = reference.causal_attention(reference.init_state(config), x, weights)
    # Two float16 roundings that may fall on the other side, of a branch of this size.
    np.testing.assert_allclose(y, expected, rtol=0, atol=2.0**-9 * np.abs(expected - x).max())
    np.testing.assert_allclose(state.keys(), expected_state.keys, rtol=0, atol=2.0**-10 * np.abs(expected).max())


def test_head_dims__beyond_are_refused_before_anything_is_allocated(tmp_path: Path, no_leaks: None) -> None:
    """vllm-project/vllm#16808 (A5): the limit is named; keys and values of different widths (192/128) are refused."""
    before = pf.arena_stats()
    for head_dim in (0, 257, 320, 512, 576):
        with pytest.raises(pf.InvalidArgument, match=rf"head_dim: expected 1…256, got {head_dim}"):
            pf.init_state(pf.AttentionConfig(32, 4, 2, head_dim, rope_dim=2))
    writer = gguf.GGUFWriter(tmp_path / "mla.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_key_length(192)
    writer.add_value_length(128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(pf.UnsupportedError, match=r"mla\.gguf: values of another width than keys"):
        pf.load(tmp_path / "mla.gguf")
    assert pf.arena_stats() == before


def test_offsets__beyond_4_gib_are_exact_in_a_plan() -> None:
    """vllm-project/vllm#50427, #47671, #1514; flashinfer-ai/flashinfer#3136; syv-ai/qwen38-27b-rtx3090#86 (A8).

    Page, token and region offsets are 64-bit: 64 sequences of 262,144 tokens, 790 GB of scratch, planned and not run.
    """
    config = pf.AttentionConfig(2560, 16, 4, 256, output_gate=True, maximum_context_tokens=262144)
    n, tokens = 64, 262144
    plan = pf.plan_attention(config, [tokens] * n)
    names = ("normalized", "query_raw", "key_raw", "value_raw", "query", "context", "projected")
    widths = dict(zip(names, (2560, 8192, 1024, 1024, 4096, 4096, 2560), strict=True))
    regions, at = {}, 0
    for name, width in widths.items():
        regions[name] = at
        at += 2 * width * tokens * n
    assert dict(plan.scratch_regions) == regions
    assert plan.scratch_bytes == at == 47104 * tokens * n
    assert (plan.pages, plan.page_table_bytes) == (16384 * n, 8 * 16384 * n)
    prepares = [launch for launch in plan.launches if "prepare" in launch.kernel]
    assert len(prepares) == n
    for launch in prepares:
        i = launch.participant
        scratch = [b.offset for b in launch.bindings if b.resource == "scratch"]
        expected = [regions[r] + 2 * widths[r] * tokens * i for r in ("query_raw", "key_raw", "value_raw", "query")]
        assert scratch == expected
        assert [b.offset for b in launch.bindings if b.resource == "page_table"] == [8 * 16384 * i]


def test_pages__past_the_first_4_gib_are_their_own(no_leaks: None) -> None:
    """vllm-project/vllm#50427; flashinfer-ai/flashinfer#3136 (A8): a lazily committed arena, with pages at its top.

    66,000 pages of one token each; the highest hold what was written there, and the lowest still what they held.
    """
    config = pf.AttentionConfig(8, 1, 1, 4)
    with pf.Device(threads=1, arena_bytes=5 << 30, poison=False) as device:
        empty = pf.init_state(config, device=device)
        rows = [pf.array(np.full((1, 1, 4), i, np.float16), device=device) for i in range(50)]
        states = [empty.append(rows[i % 50], rows[(i + 1) % 50]) for i in range(66_000)]
        stats = device.arena_stats()
        assert stats["used_pages"] * stats["page_bytes"] > 1 << 32
        for i in (0, 1, 2, 255, 256, 32767, 32768, 65535, 65536, 65537, 65999):
            assert (states[i].keys().tolist(), states[i].values().tolist()) == (
                [[[i % 50] * 4]],
                [[[(i + 1) % 50] * 4]],
            )
        states.clear()
        assert device.arena_stats()["used_pages"] == 0


# ---- B: paged state


@pytest.mark.parametrize("window", [1, 4, 5])
def test_window__counts_the_query_itself_and_ignores_chunks(window: int) -> None:
    """ml-explore/mlx-lm#390; lablup/mlxcel#413 (B4): query i sees exactly keys i-window+1…i, however it is cut."""
    config = replace(tiny.LAYER, sliding_window=window)
    weights, x = tiny.layer(config), tiny.rows(10)
    _, whole = run(pf.init_state(config), x, weights, ())
    for cuts in ((7,), tuple(range(1, 10)), (3, 4), (1, 9)):
        assert bits(run(pf.init_state(config), x, weights, cuts)[1]) == bits(whole)
    for changed in range(10):
        other = x.copy()
        other[changed] = tiny.rows(1, seed=9)
        moved = np.flatnonzero((run(pf.init_state(config), other, weights, ())[1] != whole).any(axis=1))
        assert moved.tolist() == list(range(changed, min(changed + window, 10)))


def test_forks__with_a_shared_prefix_are_as_if_alone(no_leaks: None) -> None:
    """vllm-project/vllm#7018; ggml-org/llama.cpp#12253, #14847 (B5): pages of 4 tokens, a fork at 5, one branch freed.

    Each branch has the bits of its unforked run, alone or in one call with a sequence that shares nothing; freeing a
    branch and writing over its pages leaves the other's bytes; counters return to where they were.
    """
    device = pf.Device(threads=1, poison=True)
    weights = tiny.layer(PAGES_OF_4, device)
    prefix, x, y, z = (tiny.rows(n, seed) for n, seed in ((5, 1), (6, 2), (6, 3), (6, 4)))

    def alone(rows: np.ndarray) -> tuple[pf.KVState, bytes]:
        state, out = run(pf.init_state(PAGES_OF_4, device=device), rows, weights, (5,))
        return state, bits(out)[-6 * 32 * 4 :]

    def contents(state: pf.KVState) -> tuple[bytes, bytes]:
        return bits(state.keys()), bits(state.values())

    start = device.arena_stats()["used_pages"]
    expected = [(contents(state), out) for state, out in map(alone, (np.concatenate([prefix, r]) for r in (x, y)))]
    gc.collect()
    assert device.arena_stats()["used_pages"] == start
    fork, _ = run(pf.init_state(PAGES_OF_4, device=device), prefix, weights, ())
    shared, stranger = contents(fork), pf.init_state(PAGES_OF_4, device=device)
    for form in ("one by one", "loop", "packed"):
        copies, pages = device.arena_stats()["copied_pages"], device.arena_stats()["used_pages"]
        if form == "one by one":
            (a, ya), (b, yb) = pf.causal_attention(fork, x, weights), pf.causal_attention(fork, y, weights)
            c, _ = pf.causal_attention(stranger, z, weights)
        elif form == "loop":
            (c, a, b), (_, ya, yb) = pf.causal_attention([stranger, fork, fork], [z, x, y], weights)
        else:
            ragged = pf.Ragged(np.concatenate([z, x, y]), [6, 6, 6])
            (c, a, b), out = pf.causal_attention([stranger, fork, fork], ragged, weights)
            ya, yb = out[6:12], out[12:]
        assert [(contents(a), bits(ya)), (contents(b), bits(yb))] == expected
        assert device.arena_stats()["copied_pages"] - copies == 1, (
            "one branch appends in place, the other copies a page"
        )
        a.close()
        c.close()
        junk = pf.init_state(PAGES_OF_4, device=device).append(*random_kv(PAGES_OF_4, 16))
        assert contents(b) == expected[1][0]
        assert contents(fork) == shared
        b.close()
        junk.close()
        assert device.arena_stats()["used_pages"] == pages
    fork.close()
    assert device.arena_stats()["used_pages"] == start


def test_out_of_pages__says_what_is_needed_and_changes_nothing(no_leaks: None) -> None:
    """ggml-org/llama.cpp#12695; vllm-project/vllm-metal#92 (B7): an append that needs 5 pages of 4."""
    device = pf.Device(threads=1, arena_bytes=4 * 65536 + 65535)
    weights, empty = tiny.layer(device=device), pf.init_state(tiny.LAYER, device=device)
    one, y = pf.causal_attention(empty, tiny.rows(3), weights)
    before, counts, keys = device.arena_stats(), _native.debug_counts(), np.asarray(one.keys()).tobytes()
    assert (before["limit_pages"], before["used_pages"], before["free_pages"]) == (4, 1, 3)
    kv = np.zeros((4 * TOKENS_PER_PAGE, 1, 16), np.float16)
    calls: list[Callable[[], Any]] = [
        lambda: pf.causal_attention(one, tiny.rows(4 * TOKENS_PER_PAGE - 2), weights),
        lambda: pf.causal_attention([one] * 5, [tiny.rows(1)] * 5, weights),
        lambda: pf.causal_attention([one] * 5, pf.Ragged(tiny.rows(5), [1] * 5), weights),
        lambda: one.append(kv, kv),
        lambda: pf.causal_attention([empty, one], [tiny.rows(1), tiny.rows(3 * TOKENS_PER_PAGE)], weights),
    ]
    for call in calls:
        with pytest.raises(pf.OutOfPages, match=r"needed 4 more.*, 1 in use, 3 free of a limit of 4"):
            call()
        assert device.arena_stats() == before
        assert _native.debug_counts() == counts
    assert np.asarray(one.keys()).tobytes() == keys
    two, again = pf.causal_attention(empty, tiny.rows(3 * TOKENS_PER_PAGE), weights)
    assert device.arena_stats()["free_pages"] == 0
    np.testing.assert_array_equal(again[:3], y)
    with pytest.raises(pf.OutOfPages, match=r"needed 1 more.*, 4 in use, 0 free"):
        pf.causal_attention(empty, tiny.rows(1), weights)
    two.close()
    three, third = pf.causal_attention(empty, tiny.rows(3), weights)
    np.testing.assert_array_equal(third, y)
    assert device.arena_stats()["used_pages"] == 2
    assert three.length == 3


def test_steps__hold_on_to_nothing(no_leaks: None) -> None:
    """ml-explore/mlx-lm#1662, #1332; Blaizzy/mlx-lm#25 (B10): 2,000 one-token steps with a window of 8.

    Handles are constant, pages are those of the tokens and no page is copied; memory does not rise.
    """
    config = replace(tiny.LAYER, sliding_window=8)
    weights, x = tiny.layer(config), pf.array(tiny.rows(1))
    state, _ = pf.causal_attention(pf.init_state(config), x, weights)
    before, resident = pf.arena_stats(), 0
    counts = _native.debug_counts()
    for step in range(2, 2001):
        state, _ = pf.causal_attention(state, x, weights)
        if step == 500:
            resident = tiny.resident_bytes()
    after = pf.arena_stats()
    assert _native.debug_counts() == counts
    assert (state.length, state.pages) == (2000, -(-2000 // TOKENS_PER_PAGE))
    assert after["used_pages"] - before["used_pages"] == state.pages - 1
    assert after["copied_pages"] == before["copied_pages"]
    assert tiny.resident_bytes() - resident < 2 << 20


def test_stored_prefix__gives_the_text_of_a_fresh_run(tmp_path: Path) -> None:
    """tenstorrent/vllm#415 (B11): a prompt from a stored state gives the bits, so the greedy text, of a first run."""
    model = pf.load(tiny.write_tiny(tmp_path))
    prompt = tiny.ids("The tide came in over the flat sand and took the boat with it", bos=True)

    def text(tokens: list[int], state: pf.ModelState | None = None) -> list[tuple[int, bytes]]:
        steps = pf.generate(model, tokens, max_tokens=24, state=state, ignore_eos=True)
        return [(step.token, bits(step.logprobs)) for step in steps]

    miss = text(prompt)
    whole, _ = model.forward(model.init_state(), prompt)
    for hit in (len(prompt) - 1, 40, 1):
        assert text(prompt[hit:], whole.truncate(hit)) == miss
        for index, layer in enumerate(whole.truncate(hit).layers):
            layer.save(tmp_path / f"{index}.safetensors")
        stored = pf.ModelState(tuple(pf.load_state(tmp_path / f"{i}.safetensors") for i in range(tiny.LAYERS)))
        assert stored.layers[0].config == model.config.attention
        assert text(prompt[hit:], stored) == miss
    assert text(prompt) == miss
