"""Sampled speculative decoding follows the target's distribution, and each lane its own key."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.models.draft import Proposal
from pyferrum.sampling import Sampling
from pyferrum.speculative import _Decoding
from tests import tiny
from tests.drafts import Chain, ChainDrafter, Itself, drafter_for


@pytest.mark.parametrize("block", [2, 6, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target__is_accepted_in_full(target: pf.Model, temperature: float, block: int) -> None:
    steps = pf.speculative_generate(
        target, Itself(target), tiny.ids("me"), temp=temperature, max_tokens=60, block=block, key=3,
        ignore_eos=True,
    )  # fmt: skip
    assert all(s.accepted == s.drafted for s in steps)


@pytest.mark.parametrize(
    ("candidates", "probabilities"),
    [(range(4), [0.2, 0.7, 0.1, 0.0]), ([1, 0, 1, 2, 1], [0.3, 0.2, 0.1, 0.1, 0.3])],
    ids=["each once", "one three times"],
)
def test_accept__the_worked_example(candidates: Any, probabilities: list[float]) -> None:
    """p = (.5, .3, .2), q = (.2, .7, .1): accepted 0.6 of the time, and the residual is (.75, 0, .25) (FACTS C.6)."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.7, 0.1, 0.0])
    decoding = _Decoding.__new__(_Decoding)
    sampling: Any = SimpleNamespace(temp=1.0, probabilities=lambda row: row)
    decoding.sampling = sampling
    draws = 20_000
    lane: Any = SimpleNamespace(key=pf.random.key(1))
    counts, refused, accepted = np.zeros(4), np.zeros(4), 0
    for token in np.random.default_rng(0).choice(4, draws, p=q):
        draft = Proposal([int(token)], np.array(candidates)[None], np.array(probabilities)[None])
        n, bonus = decoding._accept(lane, draft, np.array([p, p]))
        accepted += n
        counts[token if n else bonus] += 1
        refused[bonus] += not n
    assert abs(accepted / draws - 0.6) < 5 * np.sqrt(0.24 / draws)
    np.testing.assert_allclose(refused / refused.sum(), [0.75, 0, 0.25, 0], atol=0.03)
    np.testing.assert_allclose(counts / draws, p, atol=0.02)


@pytest.mark.parametrize(("draws", "temperature", "top_k"), [(200_000, 1.0, 0), (60_000, 1.4, 4)])
def test_sampled__draws_follow_the_target(draws: int, temperature: float, top_k: int) -> None:
    """χ² of what the whole loop emits, over a target of six tokens that knows the one before: six marginals of six.

    The draft model is another chain, which never proposes two of the tokens; so drafts stand, fall in every place and
    are drawn anew. Two lanes, blocks of six rows.
    """
    target: Any = Chain(seed=1)
    last, counts, accepted = [0, 1], np.zeros((6, 6)), Counter[int]()
    for step in pf.speculative_generate_batch(
        target, ChainDrafter(seed=2), [[0], [1]], block=6, max_tokens=draws // 2, temp=temperature, top_k=top_k,
        key=7, ignore_eos=True,
    ):  # fmt: skip
        counts[last[step.lane], step.token] += 1
        last[step.lane] = step.token
        accepted[step.accepted] += 1
    assert counts.sum() == draws and set(accepted) == set(range(6))
    p = np.array([Sampling(temperature, top_k).probabilities(row) for row in target.rows])
    assert counts[p == 0].sum() == 0
    expected = counts.sum(axis=1, keepdims=True) * p
    chi2 = ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum()
    freedom = (p > 0).sum() - 6
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("second", [False, True])
def test_sampled__no_key_is_used_twice(
    target: pf.Model, tmp_path: Path, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the drafts, of their acceptance, of what replaces them, and of what the keys are split from."""
    used: Counter[pf.random.Key] = Counter()
    generator = pf.random._generator

    def watched(key: pf.random.Key) -> np.random.Generator:
        used[key] += 1
        return generator(key)

    monkeypatch.setattr(pf.random, "_generator", watched)
    drafter = drafter_for(target, tmp_path, second)
    prompts = [tiny.ids(text) for text in ("a", "second", "a")]
    steps = pf.speculative_generate_batch(
        target, drafter, prompts, temp=1.5, max_tokens=30, key=3, block=5, ignore_eos=True
    )
    last = [[], [], []]
    for step in steps:
        last[step.lane].append(step.token)
    assert last[0] != last[2]  # the same prompt, but keys of its own
    assert len(used) > 100 and set(used.values()) == {1}


def test_sampled__second_token_follows_the_target(target: pf.Model, tmp_path: Path) -> None:
    """The whole loop: the first drafted position over many keys, against the target's own marginal."""
    drafter = drafter_for(target, tmp_path, True)
    prompt = tiny.ids("x")
    sampling = Sampling(1.0, top_k=4)
    state, logits = target.forward(target.init_state(), prompt, last_only=True)
    first = sampling.probabilities(np.asarray(logits)[0])
    expected = np.zeros(target.config.vocabulary)
    for token in np.flatnonzero(first):
        _, logits = target.forward(state, [int(token)], last_only=True)
        expected += first[token] * sampling.probabilities(np.asarray(logits)[0])
    draws = 800
    counts = np.zeros_like(expected)
    for key in range(draws):
        steps = pf.speculative_generate(
            target, drafter, prompt, temp=1.0, top_k=4, max_tokens=2, block=2, key=key, ignore_eos=True
        )
        counts[[s.token for s in steps][1]] += 1
    kept = expected > 0.01
    assert counts[expected == 0].sum() == 0
    chi2 = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert chi2 < kept.sum() + 5 * np.sqrt(2 * kept.sum())


@pytest.mark.parametrize("kind", ["DFlash", "DFlash 2", "itself"])
def test_sampled__a_lane_says_the_same_whatever_is_beside_it(target: pf.Model, tmp_path: Path, kind: str) -> None:
    """Lanes end at other times than their neighbours; a drafter of the whole block sees the rows its lane has alone."""
    drafter: Any = Itself(target) if kind == "itself" else drafter_for(target, tmp_path, kind == "DFlash 2")
    prompts = [tiny.ids(text) for text in ("one", "a second prompt", "3", "the fourth of them")]
    options: dict[str, Any] = {"temp": 1.2, "max_tokens": 30, "key": 5, "block": 6, "ignore_eos": True}

    def run(count: int, **change: Any) -> list[list[int]]:
        lanes: list[list[int]] = [[] for _ in range(count)]
        for step in pf.speculative_generate_batch(target, drafter, prompts[:count], **options | change):
            lanes[step.lane].append(step.token)
        return lanes

    four = run(4)
    assert [run(1), run(2), run(3)] == [four[:1], four[:2], four[:3]]
    assert [s.token for s in pf.speculative_generate(target, drafter, prompts[0], **options)] == four[0]
    ending = run(4, ignore_eos=False, max_tokens=80)
    assert len({len(lane) for lane in ending}) > 1
    assert [run(n, ignore_eos=False, max_tokens=80)[-1] for n in (1, 2, 3)] == ending[:3]


def test_sampled__same_key_same_text(target: pf.Model, tmp_path: Path) -> None:
    drafter = drafter_for(target, tmp_path, True)

    def run(key: int) -> list[int]:
        steps = pf.speculative_generate(
            target, drafter, tiny.ids("y"), temp=1.0, max_tokens=30, key=key, ignore_eos=True
        )
        return [s.token for s in steps]

    assert run(4) == run(4)
    assert run(4) != run(5)
