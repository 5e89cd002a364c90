"""Beam search against complete enumeration, and what it leaves behind."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.sampling import log_softmax
from tests import tiny

VOCABULARY = 6
"""BOS, EOS and four characters."""
PROMPT = [0, 3, 5, 2, 4]


def small(folder: Path, *, head: float = 1.0, device: pf.Device | None = None) -> pf.Model:
    """A random model of six tokens; its output matrix is multiplied by `head`."""
    weights = tiny.tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.ascontiguousarray(weights[name][:VOCABULARY])
    weights["lm_head.weight"] *= np.float16(head)
    return pf.load(tiny.write_tiny(folder, weights=weights, config={"vocab_size": VOCABULARY}), device=device)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return small(tmp_path_factory.mktemp("six"), head=0.25)


def rows(model: pf.Model, length: int) -> dict[tuple[int, ...], np.ndarray]:
    """Logits behind the prompt and every sequence of fewer than `length` tokens, each computed from nothing."""
    prefixes = [p for n in range(length) for p in itertools.product(range(VOCABULARY), repeat=n)]
    return {
        p: np.asarray(model.forward(model.init_state(), [*PROMPT, *p], last_only=True)[1])[0].astype(np.float64)
        for p in prefixes
    }


def all_sequences(model: pf.Model, length: int, penalty: float, *, ends: bool) -> list[tuple[float, tuple[int, ...]]]:
    """Score and tokens of everything that can be said in `length` tokens, the best first."""
    logits = rows(model, length)
    found = []
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        said = tokens[: tokens.index(tiny.EOS) + 1] if ends and tiny.EOS in tokens else tokens
        total = 0.0
        for i, token in enumerate(said):
            row = logits[said[:i]]
            total += row[token] - np.logaddexp.reduce(row)
        found.append((total / len(said) ** penalty, said))
    return sorted(set(found), key=lambda pair: -pair[0])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_beam_search__wide_enough_is_complete(six: pf.Model, penalty: float, ends: bool) -> None:
    beams = VOCABULARY**2
    found = pf.beam_search(six, PROMPT, beams=beams, max_tokens=3, length_penalty=penalty, ignore_eos=not ends)
    expected = all_sequences(six, 3, penalty, ends=ends)[:beams]
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([beam.score for beam in found], [score for score, _ in expected], rtol=1e-12)
    for beam in found:
        assert beam.finish_reason == ("stop" if ends and beam.tokens[-1] == tiny.EOS else "length")
        assert beam.score == beam.log_probability / len(beam.tokens) ** penalty
    assert not ends or len({len(beam.tokens) for beam in found}) > 1


def test_beam_search__narrow_is_the_rule_by_hand(six: pf.Model) -> None:
    """Two beams, three steps, kept and dropped as documented, over logits computed from nothing."""
    logits = rows(six, 3)
    kept: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(3):
        pool = [(total, said) for total, said in kept if said[-1:] == (tiny.EOS,)]
        for total, said in kept:
            if said[-1:] != (tiny.EOS,):
                row = logits[said] - np.logaddexp.reduce(logits[said])
                pool += [(total + row[token], (*said, token)) for token in range(VOCABULARY)]
        kept = sorted(pool, key=lambda pair: -pair[0])[:2]
    assert [beam.tokens for beam in pf.beam_search(six, PROMPT, beams=2, max_tokens=3)] == [said for _, said in kept]


@pytest.mark.invariance
def test_beam_search__a_beam_is_what_it_would_be_alone(six: pf.Model) -> None:
    """A beam's log-probabilities and state, bit for bit, from a sequence that never forked and had no company."""
    for beam in pf.beam_search(six, PROMPT, beams=5, max_tokens=4, ignore_eos=True):
        state, logits = six.forward(six.init_state(), [*PROMPT, *beam.tokens[:-1]])
        scores = [log_softmax(row) for row in np.asarray(logits)[len(PROMPT) - 1 :]]
        assert [np.float32(x) for x in beam.logprobs] == [
            row[token] for row, token in zip(scores, beam.tokens, strict=True)
        ]
        assert beam.state.length == state.length
        for mine, alone in zip(beam.state.layers, state.layers, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.keys()), np.asarray(alone.keys()))
            np.testing.assert_array_equal(np.asarray(mine.values()), np.asarray(alone.values()))


def test_beam_search__one_beam_is_greedy(model: pf.Model) -> None:
    prompt = [{"role": "user", "content": "Say hi."}]
    steps = list(pf.generate(model, prompt, max_tokens=12))
    (beam,) = pf.beam_search(model, prompt, beams=1, max_tokens=12)
    assert list(beam.tokens) == [step.token for step in steps]
    assert beam.finish_reason == steps[-1].finish_reason
    assert beam.state.length == steps[-1].state.length


def test_beam_search__same_arguments_same_beams(six: pf.Model) -> None:
    def found() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        return [(beam.tokens, beam.logprobs) for beam in pf.beam_search(six, PROMPT, beams=7, max_tokens=5)]

    assert found() == found()


def test_beam_search__equal_scores_go_by_rank_and_then_by_id(tmp_path: Path) -> None:
    """Every sequence of a model that knows nothing has the same probability."""
    uniform = small(tmp_path, head=0)
    found = pf.beam_search(uniform, PROMPT, beams=8, max_tokens=2, ignore_eos=True)
    assert [beam.tokens for beam in found] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0), (1, 1)]
    assert found[0].log_probability == pytest.approx(-2 * np.log(VOCABULARY), rel=1e-12)
    # EOS, finished after one token, is more probable than any two tokens; then those of the best beam that goes on.
    stopped = pf.beam_search(uniform, PROMPT, beams=3, max_tokens=2)
    assert [beam.tokens for beam in stopped] == [(tiny.EOS,), (0, 0), (0, 1)]
    # By the mean all are equal: the best beam's children before the finished one, which was second.
    by_mean = pf.beam_search(uniform, PROMPT, beams=8, max_tokens=2, length_penalty=1)
    assert [beam.tokens for beam in by_mean][5:] == [(0, 5), (tiny.EOS,), (2, 0)]


def test_beam_search__goes_on_from_a_state(six: pf.Model) -> None:
    shared, _ = six.forward(six.init_state(), PROMPT[:3], last_only=True)
    whole = pf.beam_search(six, PROMPT, beams=3, max_tokens=3)
    for _ in range(2):
        continued = pf.beam_search(six, PROMPT[3:], beams=3, max_tokens=3, state=shared)
        assert [(beam.tokens, beam.logprobs) for beam in continued] == [(beam.tokens, beam.logprobs) for beam in whole]
    assert shared.length == 3
    # Text behind a state gets no BOS, text behind nothing does.
    assert PROMPT[:1] + tiny.ids("!#") == [0, 3, 5]
    behind = pf.beam_search(six, ' "', beams=3, max_tokens=3, state=shared)
    assert [beam.logprobs for beam in behind] == [beam.logprobs for beam in whole]
    from_text = pf.beam_search(six, '!# "', beams=3, max_tokens=3)
    assert [beam.logprobs for beam in from_text] == [beam.logprobs for beam in whole]


def test_beam_search__beams_share_the_prompts_pages(six: pf.Model, no_leaks: None) -> None:
    """512 tokens fill a page. Of a prompt of 700, each of four beams copies the second page at most."""
    prompt = [2 + i % 4 for i in range(700)]
    start = pf.arena_stats()
    found = pf.beam_search(six, prompt, beams=4, max_tokens=6, ignore_eos=True)
    assert len(found) == 4
    held = pf.arena_stats()
    assert held["used_pages"] - start["used_pages"] <= tiny.LAYERS * (1 + 4)
    assert held["copied_pages"] > start["copied_pages"]
    del found
    assert pf.arena_stats()["used_pages"] == start["used_pages"]


def test_beam_search__failure_leaves_the_state_and_no_page(tmp_path: Path) -> None:
    """The arena has room for the prompt and not for its branches."""
    device = pf.Device(arena_bytes=(2 * tiny.LAYERS + 1) * 65536)
    narrow = small(tmp_path, device=device)
    prompt = [2 + i % 4 for i in range(700)]
    shared, _ = narrow.forward(narrow.init_state(), prompt, last_only=True)
    used, keys = device.arena_stats()["used_pages"], np.asarray(shared.layers[1].keys())
    with pytest.raises(pf.OutOfPages):
        pf.beam_search(narrow, [2], beams=4, max_tokens=6, state=shared, ignore_eos=True)
    assert device.arena_stats()["used_pages"] == used
    np.testing.assert_array_equal(np.asarray(shared.layers[1].keys()), keys)


def test_beam_search__refuses_bad_options_before_it_runs(six: pf.Model) -> None:
    for options, message in (
        ({"beams": 0}, "beams: expected 1…1024, got 0"),
        ({"beams": 1025}, "beams: expected 1…1024, got 1025"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"length_penalty": float("nan")}, "length_penalty: expected a finite number, got nan"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.beam_search(six, PROMPT, **options)
    with pytest.raises(pf.InvalidArgument, match="prompt"):
        pf.beam_search(six, [])
