"""Greedy speculative decoding gives what plain decoding gives, token for token; what is refused, and the command line.

SmolLM2 here is a sample; `python -m tests.lossless` runs it over 20 prompts of 200 tokens and every block size.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.cli import main
from pyferrum.models.draft import Proposal
from pyferrum.speculative import plain_tps
from tests import families, lossless, tiny
from tests.drafts import Itself, Scripted, drafter_for

PROMPTS, TOKENS, BLOCKS = 3, 24, (2, 5, 16)


def check(steps: list[pf.SpeculativeResponse], expected: lossless.Steps) -> None:
    """Responses made within `lossless.digests`."""
    assert [(s.token, s.logprobs) for s in steps] == expected
    assert [s.generation_tokens for s in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].finish_reason == "length"


# ---- Greedy: plain output, bit for bit


@pytest.fixture(scope="module")
def plain(model: pf.Model) -> list[tuple[list[int], lossless.Steps]]:
    return [(prompt, lossless.plain(model, prompt, TOKENS)) for prompt in lossless.prompts(model, PROMPTS)]


@pytest.mark.parametrize("kind", lossless.DRAFTERS)
def test_greedy__is_plain_greedy_for_any_drafter_and_block(
    model: pf.Model, plain: list[tuple[list[int], lossless.Steps]], kind: str, tmp_path: Path
) -> None:
    drafter = lossless.drafter_for(kind, model, tmp_path)
    for prompt, expected in plain:
        for block in BLOCKS:
            chunk = (512, 1, 4, 7)[block % 4]
            first, histogram = lossless.compare(model, drafter, prompt, expected, block, chunk)
            assert first is None
            assert lossless.expected_counts(kind, histogram, block, TOKENS)


def test_greedy__every_block_size_and_chunking_on_a_small_model(target: pf.Model, tmp_path: Path) -> None:
    drafts = [drafter_for(target, tmp_path / str(i), i == 1, windows=(24, None)[:2]) for i in range(2)]
    prompt = tiny.ids("A prompt of some length, cut in any way.")
    expected = lossless.plain(target, prompt, 50)
    for chunk in range(1, len(prompt) + 1):
        for drafter in drafts:
            block = 2 + (chunk + 7 * (drafter is drafts[0])) % 15
            assert lossless.compare(target, drafter, prompt, expected, block, chunk)[0] is None


@pytest.mark.parametrize("name", ["qwen3", "qwen2_window"])
def test_greedy__of_other_families(name: str, tmp_path: Path) -> None:
    """With norms of heads, and with windows that a draft goes beyond."""
    target = pf.load(families.write_folder(tmp_path / name, name))
    drafts = [drafter_for(target, tmp_path / str(i), i == 1) for i in range(2)]
    prompt = tiny.ids("A prompt longer than a window.")
    expected = lossless.plain(target, prompt, 40)
    for drafter, block, chunk in itertools.product([*drafts, "right", "wrong"], (3, 12), (512, 7)):
        assert lossless.compare(target, drafter, prompt, expected, block, chunk)[0] is None


def test_lossless__finds_one_bit_of_one_logit(target: pf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: a last bit of the logits changed in the verifying call, no token changed."""
    prompt = tiny.ids("one bit")
    expected = lossless.plain(target, prompt, 20)
    assert lossless.compare(target, "right", prompt, expected, 5, 512)[0] is None
    forward = type(target).forward

    def changed(self: pf.Model, state: Any, tokens: Any, **options: Any) -> Any:
        new, logits = forward(self, state, tokens, **options)
        if isinstance(logits, list):
            logits = [np.array(rows) for rows in logits]
            logits[0].view(np.uint32)[3, 7] ^= 1
        return new, logits

    monkeypatch.setattr(type(target), "forward", changed)
    assert lossless.compare(target, "right", prompt, expected, 5, 512)[0] == 4


def test_greedy__lanes_are_what_they_are_alone(target: pf.Model, tmp_path: Path) -> None:
    drafter = drafter_for(target, tmp_path, True)
    texts = ["one", "a second prompt", "3", "the fourth of them is the longest"]
    together: list[list[pf.SpeculativeResponse]] = [[] for _ in texts]
    options: dict[str, Any] = {"max_tokens": 40, "block": 6, "ignore_eos": True}
    with lossless.digests():
        for step in pf.speculative_generate_batch(target, drafter, [tiny.ids(t) for t in texts], **options):
            together[step.lane].append(step)
    for text, steps in zip(texts, together, strict=True):
        check(steps, lossless.plain(target, tiny.ids(text), 40))


def test_docs__their_loop_is_plain_decoding(target: pf.Model, tmp_path: Path) -> None:
    """The code of docs/dflash2.md, as it stands there."""
    text = (tiny.ROOT / "docs/dflash2.md").read_text()
    loop = text.split("## The loop")[1].split("\n\n`")[0].split("\nRolling back")[0]
    drafter = drafter_for(target, tmp_path, True)
    prompt = tiny.ids("As it is written")

    def common_prefix(drafts: list[int], best: np.ndarray) -> int:
        return next((i for i, d in enumerate(drafts) if d != best[i]), len(drafts))

    names: dict[str, Any] = {
        "model": target, "drafter": drafter, "prompt": prompt, "rows": 6, "key": pf.random.key(0), "taps": {0: 0, 1: 0},
        "argmax": lambda logits: np.asarray(logits).argmax(axis=1).squeeze(), "common_prefix": common_prefix,
        "features": lambda taps: np.concatenate([np.asarray(taps[0]), np.asarray(taps[1])], axis=1),
    }  # fmt: skip
    exec("def loop():\n" + loop, names)
    ours = [int(token) for token in itertools.islice(names["loop"](), 60)]
    assert ours == [token for token, _ in lossless.plain(target, prompt, 60)]


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

    def propose(self, state: Any, anchors: Any, rows: list[int], *rest: Any) -> list[Proposal]:
        self.seen.append((state, anchors[0]))
        own = self.model.propose(state, anchors, rows, *rest)[0]
        right = self.script.propose((state.lengths[0],), anchors, rows, *rest)[0].tokens  # type: ignore[attr-defined]
        # Right for a while, then its own: every number of accepted drafts comes up.
        tokens = [*right[: len(self.seen) % rows[0]], *own.tokens[len(self.seen) % rows[0] :]]
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
        ({"block": 2.5}, "block: expected a whole number, got 2.5"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temp": -1.0}, "temp"),
        ({"chunk": 0}, "chunk"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.speculative_generate(target, drafter, [5], **options)
    with pytest.raises(pf.InvalidArgument, match="prompt: expected at least one token"):
        pf.speculative_generate(target, drafter, [])
    with pytest.raises(pf.InvalidArgument, match="prompts: expected a list of 1…4 of them, got 5"):
        pf.speculative_generate_batch(target, drafter, [[5]] * 5)
    with pytest.raises(pf.InvalidArgument, match="prompts: expected a list of 1…4 of them, got str"):
        pf.speculative_generate_batch(target, drafter, "abc")
    with pytest.raises(pf.InvalidArgument, match=r"drafter: expected a Drafter, .* got NoneType"):
        pf.speculative_generate(target, None, [5])  # type: ignore[arg-type]


class Claims(Itself):
    """Proposes something else than the drafter it is made of."""

    def __init__(self, target: pf.Model, change: Any) -> None:
        super().__init__(target)
        self.change = change

    def propose(self, *arguments: Any) -> list[Proposal]:
        return [self.change(proposal) for proposal in super().propose(*arguments)]


def test_proposals__that_cannot_be_are_refused(target: pf.Model) -> None:
    """A draft that was not drawn as it says would change what comes out."""
    for temperature, change, message in (
        (0.0, lambda d: d._replace(tokens=[10**6] * len(d.tokens)), "drafter: expected 3 tokens of 0…96 for lane 0"),
        (0.0, lambda d: d._replace(tokens=d.tokens[1:]), "drafter: expected 3 tokens"),
        (1.0, lambda d: d._replace(probabilities=np.zeros_like(d.probabilities)), "drafter: expected probabilities"),
        (1.0, lambda d: d._replace(probabilities=2 * d.probabilities), "drafter: expected probabilities"),
        (1.0, lambda d: d._replace(probabilities=d.probabilities[:, :1]), "drafter: expected candidates of 0…96"),
        (1.0, lambda d: d._replace(candidates=d.candidates - 1), "drafter: expected candidates of 0…96 for lane 0"),
        (1.0, lambda d: d._replace(tokens=[(t + 1) % 97 for t in d.tokens], candidates=np.array(d.tokens)[:, None],
                                   probabilities=np.ones((len(d.tokens), 1))), "drafter: expected probabilities"),
    ):  # fmt: skip
        steps = pf.speculative_generate(target, Claims(target, change), [5], temp=temperature, block=4)
        with pytest.raises(pf.InvalidArgument, match=message):
            list(steps)


def test_end__of_the_context_stops_there(tmp_path: Path) -> None:
    small = pf.load(tiny.write_tiny(tmp_path, config={"max_position_embeddings": 16}))
    steps = list(pf.speculative_generate(small, Itself(small), [5, 6, 7], max_tokens=100, block=4, ignore_eos=True))
    alone = list(pf.generate(small, [5, 6, 7], max_tokens=100, ignore_eos=True))
    assert [s.token for s in steps] == [s.token for s in alone]
    assert (steps[-1].finish_reason, steps[-1].state.length) == ("length", 16)
    # A drafter that runs a model is not asked for a lane that is full, nor past the end of one that is nearly so.
    for temperature in (0.0, 1.0):
        lanes: list[list[pf.SpeculativeResponse]] = [[], []]
        for step in pf.speculative_generate_batch(
            small, Itself(small), [[5] * 12, [5, 6, 7]], temp=temperature, max_tokens=100, ignore_eos=True
        ):
            lanes[step.lane].append(step)
        assert [lane[-1].state.length for lane in lanes] == [16, 16]
    assert {step.drafted for step in lanes[1]} > {7}


def test_cli__drafts_and_says_how_it_went(target: pf.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter_for(target, tmp_path, True)
    arguments = ["run", "--model", str(target.path), "--prompt", "hello", "--max-tokens", "30", "--json"]
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--draft-model", str(tmp_path), "--num-draft-tokens", "3"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["text"] == plain["text"]
    assert sum(drafted["accepted_histogram"].values()) > 0
    assert drafted["plain_tps"] > 0 and "plain_tps" not in plain
    # The first of the 30 tokens came with the prompt.
    speedup = drafted["generation_tps"] * 29 / 30 / drafted["plain_tps"]
    assert drafted["speedup"] == pytest.approx(speedup, rel=1e-12)
    assert main([*arguments[:-1], "--draft-model", str(tmp_path), "--top-k", "5", "--temp", "1"]) == 0
    err = capsys.readouterr().err
    assert "drafts accepted in each" in err and "plain decoding" in err and "times that" in err
    assert main([*arguments[:-1], "--draft-model", str(tmp_path), "--max-tokens", "1"]) == 0
    assert "plain decoding" not in capsys.readouterr().err


def test_plain_tps__decodes_what_the_run_did_and_leaves_it_alone(
    target: pf.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.ids("How fast")
    steps = list(pf.generate(target, prompt, max_tokens=10, ignore_eos=True))
    # A clock that says how many passes there have been, of which the first one warms up.
    passes, forward = [0.0], type(target).forward

    def counted(self: pf.Model, *arguments: Any, **options: Any) -> Any:
        passes[0] += 1 if passes[0] else 1000
        return forward(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(target), "forward", counted)
        patch.setattr("time.perf_counter", lambda: passes[0])
        assert plain_tps(target, steps[5].state, steps[5].token, tokens=3) == 1
    assert [s.token for s in pf.generate(target, prompt, max_tokens=10, ignore_eos=True)] == [s.token for s in steps]
    room = dataclasses.replace(
        target.config, attention=dataclasses.replace(target.config.attention, maximum_context_tokens=len(prompt) + 6)
    )
    short = pf.Model(room, target.params, target.tokenizer, path=target.path, device=target.device)
    state, _ = short.forward(short.init_state(), [*prompt, *(s.token for s in steps[:5])])
    assert plain_tps(short, state, steps[5].token) > 0  # room for one
    full, _ = short.forward(state, [steps[5].token])
    with pytest.raises(pf.InvalidArgument, match="max_tokens: expected at least 1, got 0"):
        plain_tps(short, full, 5)
