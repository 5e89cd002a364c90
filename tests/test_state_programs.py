"""Random programs over states against a naive model: every living handle shows its own bits, always."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native

# Pages of 5, 8 and 85 tokens: whole tiles, a narrow tile only, and both.
LAYOUTS = [(13, 240), (8, 256), (3, 64)]
PROGRAMS = 1500


def random_tokens(rng: np.random.Generator, count: int, layout: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Random bits, NaN and infinity included, as float16 keys and values."""
    bits = rng.integers(0, 1 << 16, (2, count, *layout), dtype=np.uint16)
    return bits[0].view(np.float16), bits[1].view(np.float16)


def assert_shows(state: pf.KVState, keys: np.ndarray, values: np.ndarray) -> None:
    assert state.length == len(keys)
    np.testing.assert_array_equal(np.asarray(state.keys()).view(np.uint16), keys.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(state.values()).view(np.uint16), values.view(np.uint16))


class Program:
    """Living states, and what each of them has to show."""

    def __init__(self, rng: np.random.Generator, device: pf.Device, layout: tuple[int, int], folder: Path) -> None:
        self.rng, self.device, self.layout, self.folder = rng, device, layout, folder
        heads, dim = layout
        self.config = pf.AttentionConfig(64, heads, heads, dim, maximum_context_tokens=1000)
        empty = np.zeros((0, *layout), np.float16)
        self.living = [(pf.init_state(self.config, device=device), empty, empty)]
        self.page = self.living[0][0].tokens_per_page

    def step(self) -> None:
        index = int(self.rng.integers(len(self.living)))
        state, keys, values = self.living[index]
        match self.rng.choice(["append", "append", "decode", "truncate", "drop", "save", "alias"]):
            case "append":
                self.append(state, keys, values, int(self.rng.integers(1, 2 * self.page + 2)))
            case "decode":  # a run of single tokens whose intermediate states die at once
                for _ in range(int(self.rng.integers(1, 6))):
                    state, keys, values = self.append(state, keys, values, 1, keep=False)
                self.living.append((state, keys, values))
            case "truncate":
                length = int(self.rng.integers(0, state.length + 1))
                self.living.append((state.truncate(length), keys[:length], values[:length]))
            case "drop":
                if len(self.living) > 1:
                    self.living.pop(index)[0].close()
            case "save":
                if self.rng.random() < 0.1:
                    path = self.folder / "state.safetensors"
                    state.save(path)
                    self.living.append((pf.load_state(path, device=self.device), keys, values))
            case "alias":
                self.living.append((state.truncate(state.length), keys, values))
        if len(self.living) > 8:
            self.living.pop(int(self.rng.integers(len(self.living))))[0].close()

    def append(self, state, keys, values, count, keep=True):
        new_keys, new_values = random_tokens(self.rng, count, self.layout)
        before = self.device.arena_stats()
        try:
            longer = state.append(new_keys, new_values)
        except pf.OutOfPages:
            after = self.device.arena_stats()
            assert after == before
            while len(self.living) > 1:
                self.living.pop()[0].close()
            return state, keys, values
        result = (longer, np.concatenate([keys, new_keys]), np.concatenate([values, new_values]))
        if keep:
            self.living.append(result)
        return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states__random_programs_against_a_naive_model(layout: tuple[int, int], tmp_path: Path) -> None:
    for seed in range(PROGRAMS):
        rng = np.random.default_rng([seed, *layout])
        pages = None if seed % 3 else 24  # every third program runs out of pages now and then
        limit = {} if pages is None else {"arena_bytes": pages * 65536}
        if seed < 2 or seed % 50 == 0:
            devices = [pf.Device(threads=1), pf.Device(threads=1, arena_bytes=24 * 65536)]
        device = devices[bool(limit)]
        program = Program(rng, device, layout, tmp_path)
        for _ in range(int(rng.integers(4, 24))):
            program.step()
            assert_shows(*program.living[int(rng.integers(len(program.living)))])
        for living in program.living:
            assert_shows(*living)
        for state, _, _ in program.living:
            state.close()
        del program
        assert device.arena_stats()["used_pages"] == 0


def test_states__nothing_is_left_at_the_end(tmp_path: Path) -> None:
    gc.collect()
    before = _native.debug_counts()
    device = pf.Device(threads=1)
    program = Program(np.random.default_rng(0), device, LAYOUTS[2], tmp_path)
    for _ in range(200):
        program.step()
    del program
    assert device.arena_stats()["used_pages"] == 0
    device.close()
    gc.collect()
    assert _native.debug_counts() == before
