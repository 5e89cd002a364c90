"""What states cost: pages allocated and copied, as the arena counts them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.checkpoint.safetensors import save_safetensors

CONFIG = pf.AttentionConfig(64, 3, 3, 64, maximum_context_tokens=8192)
PAGE = 85  # tokens


@pytest.fixture
def device() -> pf.Device:
    return pf.Device(threads=1, arena_bytes=400 * 65536)


def tokens(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, count, 3, 64)).astype(np.float16)
    return keys, values


def grown(device: pf.Device, count: int) -> pf.KVState:
    return pf.init_state(CONFIG, device=device).append(*tokens(count))


def spent(device: pf.Device, before: dict[str, int]) -> tuple[int, int]:
    """(pages allocated, of which copied) since `before`."""
    after = device.arena_stats()
    return tuple(after[name] - before[name] for name in ("allocated_pages", "copied_pages"))  # type: ignore[return-value]


def test_decode__copies_no_page(device: pf.Device) -> None:
    state = pf.init_state(CONFIG, device=device)
    for i in range(2000):
        state = state.append(*tokens(1, i))
    stats = device.arena_stats()
    assert (stats["allocated_pages"], stats["copied_pages"], stats["used_pages"]) == (24, 0, 24)


def test_fork__costs_one_page_on_the_branch_that_appends_second(device: pf.Device) -> None:
    state = grown(device, 4000)
    before = device.arena_stats()
    fork = state.truncate(4000)
    assert device.arena_stats() == before
    first = fork.append(*tokens(1, 1))
    assert spent(device, before) == (0, 0)
    second = state.append(*tokens(1, 2))
    assert spent(device, before) == (1, 1)
    for branch, seed in ((first, 1), (second, 2)):
        np.testing.assert_array_equal(branch.keys(0, 4000), state.keys())
        np.testing.assert_array_equal(branch.keys(4000), tokens(1, seed)[0])


def test_fork__at_a_page_boundary_copies_nothing(device: pf.Device) -> None:
    state = grown(device, 2 * PAGE)
    a = state.append(*tokens(1, 1))
    before = device.arena_stats()
    b = state.append(*tokens(1, 2))
    assert spent(device, before) == (1, 0)
    assert (a.pages, b.pages) == (3, 3)


def test_truncate__and_append_copies_while_the_longer_state_lives(device: pf.Device) -> None:
    long = grown(device, 100)
    short = long.truncate(50)
    before = device.arena_stats()
    short.append(*tokens(3)).close()
    assert spent(device, before) == (1, 1)
    np.testing.assert_array_equal(long.keys(), tokens(100)[0])


def test_mark__falls_back_when_the_longer_states_die(device: pf.Device) -> None:
    long = grown(device, 100)
    short = long.truncate(50)
    assert device.arena_stats()["used_pages"] == 2
    long.close()
    assert device.arena_stats()["used_pages"] == 1
    before = device.arena_stats()
    short.append(*tokens(10))
    assert spent(device, before) == (0, 0)


def test_mark__repeated_rejection_does_not_copy_for_ever(device: pf.Device) -> None:
    state = grown(device, 20)
    before = device.arena_stats()
    for seed in range(50):
        draft = state.append(*tokens(4, seed))
        state = draft.truncate(state.length + 1)
        draft.close()
        device.arena_stats()  # waits: a mark falls back once the device is past the calls of the dead states
    assert spent(device, before) == (0, 0)


def test_mark__falls_to_the_longest_of_several_branches(device: pf.Device) -> None:
    """Two lists share a page; the mark stays at the longer of what each of them shows."""
    root = grown(device, PAGE)
    a, b = root.append(*tokens(5, 1)), root.append(*tokens(5, 2))
    short_a, short_b = a.truncate(10), b.truncate(20)
    for state in (root, a, b):
        state.close()
    assert device.arena_stats()["used_pages"] == 1
    before = device.arena_stats()
    longer_a = short_a.append(*tokens(1, 3))
    assert spent(device, before) == (1, 1)  # short_b shows slot 10
    longer_b = short_b.append(*tokens(1, 4))
    assert spent(device, before) == (1, 1)
    for state, kept, seed in ((longer_a, 10, 3), (longer_b, 20, 4)):
        np.testing.assert_array_equal(state.keys(0, kept), tokens(PAGE)[0][:kept])
        np.testing.assert_array_equal(state.keys(kept), tokens(1, seed)[0])


def test_tree__a_thousand_branches_hold_one_copy_of_the_prompt(device: pf.Device) -> None:
    root = grown(device, 40 * PAGE)
    branches = []
    for seed in range(300):
        branches.append(root.append(*tokens(2, seed)))
    stats = device.arena_stats()
    assert stats["used_pages"] == 40 + 300
    assert stats["copied_pages"] == 0
    del branches
    assert device.arena_stats()["used_pages"] == 40


def test_out_of_pages__leaves_everything_as_it_was() -> None:
    device = pf.Device(threads=1, arena_bytes=4 * 65536)
    state = grown(device, 3 * PAGE + 2)
    before = device.arena_stats()
    with pytest.raises(pf.OutOfPages, match=r"needed 1 more of 65536 bytes, 4 in use, 0 free"):
        state.append(*tokens(PAGE))
    assert device.arena_stats() == before
    np.testing.assert_array_equal(state.keys(), tokens(3 * PAGE + 2)[0])
    shorter = state.truncate(PAGE)
    state.close()
    assert shorter.append(*tokens(PAGE)).length == 2 * PAGE


def test_out_of_pages__in_a_batch_holds_nothing() -> None:
    """One sequence of a packed call would fit, both do not: neither is extended."""
    device = pf.Device(threads=1, arena_bytes=3 * 65536)
    rng = np.random.default_rng(0)
    config = pf.AttentionConfig(32, 1, 1, 64, maximum_context_tokens=2048)
    weights = pf.AttentionWeights(
        np.ones(32, np.float16), *(rng.standard_normal((64, 32)).astype(np.float16) for _ in range(3)),
        rng.standard_normal((32, 64)).astype(np.float16),
    )  # fmt: skip
    states = [pf.init_state(config, device=device) for _ in range(2)]
    x = pf.array(np.ones((1024, 32), np.float32), device=device)
    before = device.arena_stats()
    with pytest.raises(pf.OutOfPages, match="needed 4 more"):
        pf.causal_attention(states, pf.Ragged(x, [512, 512]), weights)
    assert device.arena_stats() == before
    assert [state.length for state in states] == [0, 0]
    longer, _ = pf.causal_attention(states[0], x[:512], weights)
    assert longer.length == 512


def test_save__round_trips_bits_and_configuration(device: pf.Device, tmp_path: Path) -> None:
    scaling = pf.rope.FrequencyFactors(tuple(float(i) for i in range(1, 33)))
    config = pf.AttentionConfig(64, 3, 3, 64, rope_scaling=scaling, sliding_window=7, maximum_context_tokens=100)
    state = pf.init_state(config, device=device).append(*tokens(90))
    state.save(tmp_path / "state.safetensors")
    loaded = pf.load_state(tmp_path / "state.safetensors", device=device)
    assert loaded.config == config
    np.testing.assert_array_equal(loaded.keys(), state.keys())
    np.testing.assert_array_equal(loaded.values(), state.values())


def test_load_state__damaged_files_are_checkpoint_errors(device: pf.Device, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    grown(device, 10).save(path)
    whole = path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "other.safetensors").write_bytes(
        whole.replace(b'"head_dim', b'"heed_dim').replace(b"head_dim\\", b"heed_dim\\")
    )
    tensors = {"keys": np.zeros((2, 1, 16), np.float16), "values": np.zeros((2, 1, 16), np.float16)}
    configs = {
        "text": '"abc"',
        "null": "null",
        "number": "5",
        "deep": "[" * 100_000,
        "scaling": '{"rope_scaling": "x"}',
    }
    for name, config in configs.items():
        metadata = {"pyferrum": "kv_state", "config": config}
        save_safetensors(tmp_path / f"{name}.safetensors", tensors, metadata)
    header = json.dumps({"__metadata__": None, "keys": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "unnamed.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("cut", "other", "unnamed", *configs):
        with pytest.raises(pf.CheckpointError, match=name):
            pf.load_state(tmp_path / f"{name}.safetensors", device=device)


def test_page_ids__say_what_relatives_share(no_leaks: None) -> None:
    """A fork shares every page; an append to it copies exactly the page that it fills in part."""
    config = pf.AttentionConfig(64, 8, 8, 128, maximum_context_tokens=1000)  # 16 tokens to a page
    token = np.ones((40, 8, 128), np.float16)
    empty = pf.init_state(config)
    start = empty.append(token, token)
    ids = start.page_ids
    assert (ids.dtype, ids.shape, len(set(ids.tolist())), empty.page_ids.shape) == (np.uint64, (3,), 3, (0,))
    fork = start.truncate(40)
    np.testing.assert_array_equal(fork.page_ids, ids)
    np.testing.assert_array_equal(start.truncate(17).page_ids, ids[:2])
    longer = start.append(token[:1], token[:1])  # in place
    np.testing.assert_array_equal(longer.page_ids, ids)
    branch = fork.append(token[:9], token[:9])
    np.testing.assert_array_equal(branch.page_ids[:2], ids[:2])
    assert len(branch.page_ids) == 4 and not set(branch.page_ids[2:].tolist()) & set(ids.tolist())
    start.close()
    with pytest.raises(pf.StateError, match="closed"):
        _ = start.page_ids
