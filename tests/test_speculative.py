"""Speculative decoding gives what plain decoding gives: token for token, or in distribution.

PYFERRUM_FULL=1 runs SmolLM2 over 20 prompts of 200 tokens, every block size; without it a sample of that.
"""

from __future__ import annotations

import dataclasses
import json
import os
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.cli import main
from pyferrum.models.draft import Proposal
from pyferrum.sampling import Sampling
from pyferrum.speculative import _Decoding
from tests import tiny
from tests.drafts import Itself, Scripted, settings, write_draft

FULL = os.environ.get("PYFERRUM_FULL") == "1"
PROMPTS, TOKENS = (20, 200) if FULL else (3, 24)
BLOCKS = tuple(range(2, 17)) if FULL else (2, 5, 16)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def prompts(model: pf.Model) -> list[list[int]]:
    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
    tokens = model.tokenizer.encode(text, add_bos=False)
    return [tokens[i * 70 : i * 70 + 9 + 2 * i] for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def plain(model: pf.Model, prompts: list[list[int]]) -> list[list[Any]]:
    """What decoding one token at a time gives: (token, log-probabilities)."""
    return [[(s.token, s.logprobs) for s in pf.generate(model, p, max_tokens=TOKENS, ignore_eos=True)] for p in prompts]


def drafter_for(model: pf.Model, folder: Path, second: bool, **options: Any) -> pf.DraftModel:
    config = settings(model.config.hidden_size, second=second, **options)
    return pf.load_draft(write_draft(folder, model, config=config), model)


def check(steps: list[pf.SpeculativeResponse], expected: list[Any]) -> None:
    assert [s.token for s in steps] == [token for token, _ in expected]
    for step, (_, logprobs) in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(step.logprobs, logprobs)
    assert [s.generation_tokens for s in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].finish_reason == "length"


# ---- Greedy: plain output, bit for bit


@pytest.mark.parametrize("kind", ["random, DFlash", "random, DFlash 2", "right", "wrong"])
def test_greedy__is_plain_greedy_for_any_drafter_and_block(
    model: pf.Model, prompts: list[list[int]], plain: list[list[Any]], kind: str, tmp_path: Path
) -> None:
    draft = drafter_for(model, tmp_path, "2" in kind, target_layer_ids=[3, 20]) if "random" in kind else None
    for prompt, expected in zip(prompts, plain, strict=True):
        known = [token for token, _ in expected]
        drafter = draft or Scripted([known], [len(prompt)], wrong=int(kind == "wrong"))
        for block in BLOCKS:
            chunk = (512, 1, 4, 7)[block % 4]
            steps = list(
                pf.speculative_generate(
                    model, drafter, prompt, block=block, max_tokens=TOKENS, ignore_eos=True, chunk=chunk
                )
            )
            check(steps, expected)
            if kind == "right":
                assert all(s.accepted == s.drafted for s in steps)
            if kind == "wrong":
                assert not any(s.accepted for s in steps)
                assert set(steps[-1].histogram) <= {0}


def test_greedy__every_block_size_and_chunking_on_a_small_model(target: pf.Model, tmp_path: Path) -> None:
    drafts = [drafter_for(target, tmp_path / str(i), i == 1, windows=(24, None)[:2]) for i in range(2)]
    prompt = tiny.ids("A prompt of some length, cut in any way.")
    expected = [(s.token, s.logprobs) for s in pf.generate(target, prompt, max_tokens=70, ignore_eos=True)]
    for block in range(2, 17):
        for drafter in drafts:
            steps = pf.speculative_generate(
                target, drafter, prompt, block=block, max_tokens=70, ignore_eos=True, chunk=block * 3 % 41 + 1
            )
            check(list(steps), expected)


def test_greedy__lanes_are_what_they_are_alone(target: pf.Model, tmp_path: Path) -> None:
    drafter = drafter_for(target, tmp_path, True)
    texts = ["one", "a second prompt", "3", "the fourth of them is the longest"]
    together: list[list[pf.SpeculativeResponse]] = [[] for _ in texts]
    options: dict[str, Any] = {"max_tokens": 40, "block": 6, "ignore_eos": True}
    for step in pf.speculative_generate_batch(target, drafter, [tiny.ids(t) for t in texts], **options):
        together[step.lane].append(step)
    for text, steps in zip(texts, together, strict=True):
        plain = list(pf.generate(target, tiny.ids(text), max_tokens=40, ignore_eos=True))
        check(steps, [(s.token, s.logprobs) for s in plain])


def test_states__of_every_step_continue_as_the_sequence_did(target: pf.Model) -> None:
    prompt = tiny.ids("Where it was")
    expected = [s.token for s in pf.generate(target, prompt, max_tokens=30, ignore_eos=True)]
    drafter = Scripted([expected], [len(prompt)])
    steps = list(pf.speculative_generate(target, drafter, prompt, max_tokens=20, block=7, ignore_eos=True))
    for count, step in enumerate(steps):
        assert step.state.length == len(prompt) + count
        _, logits = target.forward(step.state, [step.token], last_only=True)
        assert int(np.asarray(logits).argmax()) == expected[count + 1]


def test_end__inside_a_block_stops_there(target: pf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens accepted behind an end are not emitted, and the limit counts tokens, not rounds (issues of H.1 #17)."""
    prompt = tiny.ids("Stop")
    known = [s.token for s in pf.generate(target, prompt, max_tokens=40, ignore_eos=True)]
    drafter = Scripted([known], [len(prompt)])
    first = next(i for i in range(3, 40) if known[i] not in known[:i])
    monkeypatch.setattr(target.tokenizer, "eos_token_ids", frozenset({known[first]}), raising=False)
    plain = list(pf.generate(target, prompt, max_tokens=40))
    for block in range(2, 17):
        steps = list(pf.speculative_generate(target, drafter, prompt, max_tokens=40, block=block))
        assert [s.token for s in steps] == known[: first + 1] == [s.token for s in plain]
        assert steps[-1].finish_reason == "stop"
        assert "".join(s.text for s in steps) == "".join(s.text for s in plain)
        for limit in (1, 2, 3):
            short = list(pf.speculative_generate(target, drafter, prompt, max_tokens=limit, block=block))
            assert [s.token for s in short] == known[:limit]


@dataclasses.dataclass
class Watched:
    """A draft model that keeps what the loop gave it: the context of every proposal, and its anchor."""

    model: pf.DraftModel
    seen: list[tuple[Any, int]] = dataclasses.field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def propose(self, state: Any, anchors: Any, rows: int, *rest: Any) -> list[Proposal]:
        self.seen.append((state, anchors[0]))
        own = self.model.propose(state, anchors, rows, *rest)[0]
        right = self.script.propose((state.lengths[0],), anchors, rows, *rest)[0].tokens  # type: ignore[attr-defined]
        # Right for a while, then its own: every number of accepted drafts comes up.
        tokens = [*right[: len(self.seen) % rows], *own.tokens[len(self.seen) % rows :]]
        return [Proposal(tokens, np.array(tokens)[:, None], np.ones((len(tokens), 1)))]


@pytest.mark.parametrize("second", [False, True])
def test_context__of_every_round_is_a_fresh_drafter_over_the_accepted_tokens(
    target: pf.Model, tmp_path: Path, second: bool
) -> None:
    """Nothing of a rejected draft stays (z-lab/dflash#15), and the taps are those of the tokens before the anchor."""
    model = drafter_for(target, tmp_path, second, windows=(24, None))
    prompt = tiny.ids("From the beginning")
    known = [s.token for s in pf.generate(target, prompt, max_tokens=80, ignore_eos=True)]
    watched = Watched(model)
    watched.script = Scripted([known], [len(prompt)])  # type: ignore[attr-defined]
    steps = list(pf.speculative_generate(target, watched, prompt, block=6, max_tokens=80, ignore_eos=True, chunk=5))
    assert [s.token for s in steps] == known
    assert set(steps[-1].histogram) == set(range(6))
    whole = [*prompt, *known]
    for state, anchor in watched.seen:
        length = state.lengths[0]
        assert whole[length] == anchor
        taps: dict[int, Any] = {0: None, 1: None}
        target.forward(target.init_state(), whole[:length], taps=taps)
        features = np.concatenate([np.asarray(taps[0]), np.asarray(taps[1])], axis=1)
        fresh = model.extend(model.init_state(1), [whole[:length]], [features])
        ours, expected = (np.asarray(model.scores(s, [anchor], 6)[1]) for s in (state, fresh))
        np.testing.assert_array_equal(ours, expected)


# ---- Sampling


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target__is_accepted_in_full(target: pf.Model, temperature: float) -> None:
    steps = pf.speculative_generate(
        target, Itself(target), tiny.ids("me"), temperature=temperature, max_tokens=60, block=6, key=3, ignore_eos=True
    )
    assert all(s.accepted == s.drafted for s in steps)


def test_accept__the_worked_example_and_the_marginals() -> None:
    """p = (.5, .3, .2), q = (.2, .7, .1): accepted 0.6 of the time; what comes out follows p (FACTS C.6)."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.7, 0.1, 0.0])
    after = np.array([0.1, 0.2, 0.3, 0.4])
    decoding = _Decoding.__new__(_Decoding)
    sampling: Any = SimpleNamespace(temp=1.0, probabilities=lambda row: row)
    decoding.sampling = sampling
    draws = 200_000 if FULL else 40_000
    lane: Any = SimpleNamespace(key=pf.random.key(1))
    rng = np.random.default_rng(0)
    candidates = np.arange(4)[None]
    scores = np.array([p, after])
    counts, behind, accepted = np.zeros(4), np.zeros(4), 0
    seen = set()
    for token in rng.choice(4, draws, p=q):
        assert lane.key not in seen
        seen.add(lane.key)
        n, bonus = decoding._accept(lane, Proposal([int(token)], candidates, q[None]), scores)
        accepted += n
        counts[token if n else bonus] += 1
        behind[bonus] += n
    assert abs(accepted / draws - 0.6) < 5 * np.sqrt(0.24 / draws)
    for observed, expected in ((counts[:3], p[:3]), (behind, after)):
        chi2 = ((observed - observed.sum() * expected) ** 2 / (observed.sum() * expected)).sum()
        assert chi2 < 21  # 3 degrees of freedom: one in 9,000
    assert counts[3] == 0


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
    draws = 4000 if FULL else 800
    counts = np.zeros_like(expected)
    for key in range(draws):
        steps = pf.speculative_generate(
            target, drafter, prompt, temperature=1.0, top_k=4, max_tokens=2, block=2, key=key, ignore_eos=True
        )
        counts[[s.token for s in steps][1]] += 1
    kept = expected > 0.01
    assert counts[expected == 0].sum() == 0
    chi2 = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert chi2 < kept.sum() + 5 * np.sqrt(2 * kept.sum())


def test_sampled__same_key_same_text(target: pf.Model, tmp_path: Path) -> None:
    drafter = drafter_for(target, tmp_path, True)

    def run(key: int) -> list[int]:
        steps = pf.speculative_generate(
            target, drafter, tiny.ids("y"), temperature=1.0, max_tokens=30, key=key, ignore_eos=True
        )
        return [s.token for s in steps]

    assert run(4) == run(4)
    assert run(4) != run(5)


# ---- Leaks, refusals, the command line


def test_rounds__leave_no_page_and_no_handle(target: pf.Model, tmp_path: Path, no_leaks: None) -> None:
    drafter = drafter_for(target, tmp_path, True)
    used = pf.arena_stats()["used_pages"]
    for _ in pf.speculative_generate(target, drafter, tiny.ids("round"), max_tokens=300, ignore_eos=True):
        pages = pf.arena_stats()["used_pages"]
    assert pages - used < 16
    del _, drafter
    assert pf.arena_stats()["used_pages"] == used


def test_refusals__come_before_anything_runs(target: pf.Model) -> None:
    drafter = Itself(target)
    for options, message in (
        ({"block": 1}, "block: expected 2…16, got 1"),
        ({"block": 17}, "block: expected 2…16, got 17"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temp"),
        ({"chunk": 0}, "chunk"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.speculative_generate(target, drafter, [5], **options)
    with pytest.raises(pf.InvalidArgument, match="prompt: expected at least one token"):
        pf.speculative_generate(target, drafter, [])
    with pytest.raises(pf.InvalidArgument, match="prompts: expected 1…4 of them, got 5"):
        pf.speculative_generate_batch(target, drafter, [[5]] * 5)


def test_cli__drafts_and_says_how_it_went(target: pf.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_draft(tmp_path, target, config=settings(tiny.HIDDEN, second=True))
    arguments = ["run", "--model", str(target.path), "--prompt", "hello", "--max-tokens", "30", "--json"]
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--draft-model", str(tmp_path), "--num-draft-tokens", "3"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["text"] == plain["text"]
    assert sum(drafted["accepted_histogram"].values()) > 0
    assert main([*arguments[:-1], "--draft-model", str(tmp_path)]) == 0
    assert "drafts accepted in each" in capsys.readouterr().err
