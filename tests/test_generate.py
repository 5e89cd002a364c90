"""Generation and random keys."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.sampling import Sampling, log_softmax
from tests import tiny
from tests.drafts import Itself

PROMPT = "The capital of France is"


def test_generate__greedy_is_the_argmax_of_a_plain_loop(model: pf.Model) -> None:
    steps = list(pf.generate(model, PROMPT, max_tokens=12))
    tokens = model.tokenizer.encode(PROMPT)
    state, logits = model.forward(model.init_state(), tokens, last_only=True)
    for step in steps:
        row = np.asarray(logits)[0]
        assert step.token == int(row.argmax())
        np.testing.assert_array_equal(step.logprobs, log_softmax(row))
        state, logits = model.forward(state, [step.token])
    assert "Paris" in "".join(step.text for step in steps)


def test_generate__fields_and_finish(model: pf.Model) -> None:
    steps = list(pf.generate(model, PROMPT, max_tokens=3))
    assert [step.finish_reason for step in steps] == [None, None, "length"]
    assert [step.generation_tokens for step in steps] == [1, 2, 3]
    assert {step.prompt_tokens for step in steps} == {len(model.tokenizer.encode(PROMPT))}
    assert steps[-1].state.length == steps[-1].prompt_tokens + 2
    assert all(step.prompt_tps > 0 and step.generation_tps > 0 and step.peak_memory > 0.05 for step in steps)
    assert not any(step.from_draft for step in steps)


def test_generate__stops_at_the_end_of_a_turn(model: pf.Model) -> None:
    steps = list(pf.generate(model, [{"role": "user", "content": "Say hi."}], max_tokens=200))
    assert steps[-1].finish_reason == "stop"
    assert steps[-1].token in model.tokenizer.eos_token_ids
    assert "<|im_end|>" not in "".join(step.text for step in steps)


def test_generate__same_key_same_text_other_key_other_text(model: pf.Model) -> None:
    def run(key: object) -> list[int]:
        steps = pf.generate(model, PROMPT, max_tokens=20, temp=1.5, key=key, ignore_eos=True)
        return [step.token for step in steps]

    assert run(3) == run(pf.random.key(3))
    assert len({tuple(run(seed)) for seed in (1, 2, 3)}) == 3


def test_generate__a_state_can_be_continued_twice(model: pf.Model) -> None:
    shared, _ = model.forward(model.init_state(), model.tokenizer.encode(PROMPT), last_only=True)
    first = [step.token for step in pf.generate(model, " the city of", max_tokens=6, state=shared)]
    again = [step.token for step in pf.generate(model, " the city of", max_tokens=6, state=shared)]
    whole = [step.token for step in pf.generate(model, PROMPT + " the city of", max_tokens=6)]
    assert first == again == whole


def test_generate__refuses_bad_options_before_it_runs(model: pf.Model) -> None:
    for options, message in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"temp": -1.0}, "temp"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number, got 1.5"),
        ({"top_k": 2.5}, "top_k: expected a whole number, got 2.5"),
        ({"state": "a"}, "state: expected a ModelState, .* got str"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.generate(model, PROMPT, **options)
    with pytest.raises(pf.InvalidArgument, match="prompt"):
        pf.generate(model, [])
    for prompt in ("caf\udce9", [{"role": "user", "content": "caf\udce9"}]):
        with pytest.raises(pf.InvalidArgument, match="prompt: expected text that can be written in UTF-8"):
            pf.generate(model, prompt)


def test_sampling__keeps_what_each_option_says() -> None:
    logits = np.log([0.5, 0.2, 0.2, 0.06, 0.04])
    np.testing.assert_allclose(Sampling(1.0).probabilities(logits), [0.5, 0.2, 0.2, 0.06, 0.04])
    np.testing.assert_allclose(Sampling(1.0, top_k=2).probabilities(logits), [5 / 7, 2 / 7, 0, 0, 0])
    np.testing.assert_allclose(Sampling(1.0, top_p=0.6).probabilities(logits), [5 / 7, 2 / 7, 0, 0, 0])
    np.testing.assert_allclose(Sampling(1.0, top_p=0.45).probabilities(logits), [1, 0, 0, 0, 0])
    np.testing.assert_allclose(Sampling(1.0, min_p=0.3).probabilities(logits), [5 / 9, 2 / 9, 2 / 9, 0, 0])
    np.testing.assert_allclose(Sampling(0.5).probabilities(np.log([2.0, 1.0])), [0.8, 0.2])
    np.testing.assert_array_equal(Sampling(0.0).probabilities(np.array([1.0, 3.0, 3.0])), [0, 1, 0])


def test_random__keys_are_values_and_splits_are_independent() -> None:
    key = pf.random.key(7)
    assert pf.random.split(key) == pf.random.split(key)
    keys = list(itertools.chain(*(pf.random.split(pf.random.key(seed), 50) for seed in range(20))))
    assert len(set(keys)) == 1000
    draws = np.array([float(pf.random.uniform(k)) for k in keys])
    assert abs(draws.mean() - 0.5) < 0.04
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.1
    with pytest.raises(pf.InvalidArgument, match="seed"):
        pf.random.key(-1)


def test_random__categorical_follows_its_probabilities() -> None:
    p = np.array([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    draws = [pf.random.categorical(key, p) for key in pf.random.split(pf.random.key(0), 20000)]
    counts = np.bincount(draws, minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    np.testing.assert_allclose(counts / len(draws), p, atol=0.015)
    with pytest.raises(pf.InvalidArgument, match="probabilities"):
        pf.random.categorical(pf.random.key(0), [0.0, 0.0])


def test_prompt__of_ids_and_messages_mixed_is_refused(model: pf.Model) -> None:
    mixed: Any = [1, {"role": "user", "content": "hello"}, 2]
    with pytest.raises(pf.InvalidArgument, match="prompt: expected chat messages or token ids, got 1 messages and 2"):
        pf.generate(model, mixed)


def test_prompt__takes_text_messages_or_integers_and_nothing_else(model: pf.Model) -> None:
    one = {"role": "user", "content": "hello"}
    wrong: Any
    for wrong, message in (
        (b"abc", "prompt: expected text, a list of chat messages or token ids, got bytes: decode them"),
        (one, "prompt: expected text, .*, got dict: messages go in a list"),
        (None, "prompt: expected text, .*, got NoneType"),
        ([1.9, 2.2], "prompt: expected token ids, all of them integers, got \\[1.9, 2.2\\]"),
        (["a", "b"], "prompt: expected token ids, all of them integers"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.generate(model, wrong)
    for text in (b"abc", [b"abc"], [[1.5, 2.0]], None):
        with pytest.raises(pf.InvalidArgument, match="text: expected t"):
            pf.evaluate.perplexity(model, text)  # type: ignore[arg-type]
    with pytest.raises(pf.InvalidArgument, match="continuations\\[0\\]: expected token ids, got bytes"):
        pf.score(model, "a", [b"b"])  # type: ignore[list-item]
    with pytest.raises(pf.InvalidArgument, match=r"key: expected a Key, .* got 0.5"):
        next(pf.generate(model, [1], key=0.5))  # type: ignore[arg-type]
    assert [s.token for s in pf.generate(model, np.array([1, 2]), max_tokens=2)] == [
        s.token for s in pf.generate(model, [1, 2], max_tokens=2)
    ]


def test_generate__a_model_of_nan_is_refused(tmp_path: Path) -> None:
    weights = tiny.tensors()
    weights["model.norm.weight"][0] = np.nan
    model = pf.load(tiny.write_tiny(tmp_path, weights=weights))
    for call in (
        lambda: list(pf.generate(model, [5])),
        lambda: list(pf.generate(model, [5], temp=1.0)),
        lambda: list(pf.speculative_generate(model, Itself(model), [5])),
        lambda: pf.beam_search(model, [5]),
        lambda: pf.score(model, [5], [[6, 7]]),
        lambda: pf.evaluate.perplexity(model, "abc"),
    ):
        with pytest.raises(pf.InvalidArgument, match="logits: expected finite numbers from the model, got nan"):
            call()


def test_generate__ends_where_the_context_does(tmp_path: Path) -> None:
    """16 tokens in all: 3 of the prompt, 13 that were fed back, and one that nothing follows."""
    model = pf.load(tiny.write_tiny(tmp_path, config={"max_position_embeddings": 16}))
    steps = list(pf.generate(model, [5, 6, 7], max_tokens=100, ignore_eos=True))
    assert (len(steps), steps[-1].finish_reason, steps[-1].state.length) == (14, "length", 16)
    beams = pf.beam_search(model, [5, 6, 7], beams=3, max_tokens=100, ignore_eos=True)
    assert {(len(beam.tokens), beam.finish_reason, beam.state.length) for beam in beams} == {(14, "length", 16)}
    for message, call in (
        ("expected at most 16, .* got 17", lambda: list(pf.generate(model, [5] * 17))),
        ("expected at most 0, .* behind 16, got 1", lambda: model.forward(steps[-1].state, [5])),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            call()
    behind = pf.generate(model, [steps[4].token], state=steps[4].state, max_tokens=3, ignore_eos=True)
    assert [step.token for step in behind] == [step.token for step in steps[5:8]]
