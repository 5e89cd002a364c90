"""Scores of continuations: the right tokens, the same bits alone and in company, and one run of the context."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.checkpoint import Tokenizer
from pyferrum.score import ROWS, encode_pair
from tests import tiny

PROMPT = "The keeper writes the height of the water"
CONTINUATIONS = [" down", " in a book, twice a day", " .", ".", " and goes home"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("tiny")))


def from_scratch(model: pf.Model, context: list[int], tokens: list[int]) -> tuple[np.ndarray, bool]:
    """The same score in one pass over the whole."""
    _, logits = model.forward(model.init_state(), [*context, *tokens][:-1])
    rows = logits[len(context) - 1 :]
    return -np.asarray(pf.cross_entropy(rows, tokens)), np.asarray(pf.argmax(rows)).tolist() == tokens


def test_score__is_what_one_pass_over_the_whole_gives(small: pf.Model) -> None:
    results = pf.score(small, PROMPT, CONTINUATIONS)
    for continuation, result in zip(CONTINUATIONS, results, strict=True):
        logprobs, greedy = from_scratch(small, tiny.ids(PROMPT, bos=True), tiny.ids(continuation))
        assert result.tokens == tuple(tiny.ids(continuation)) and result.token_count == len(continuation)
        assert result.token_logprobs.dtype == np.float32
        np.testing.assert_array_equal(result.token_logprobs, logprobs)
        assert (result.logprob, result.is_greedy) == (float(logprobs.sum(dtype=np.float64)), greedy)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_score__has_the_same_bits_in_any_batch(small: pf.Model, dtype: str) -> None:
    model = pf.load(small.path, dtype=dtype)
    long = "x" * 60
    texts = [*CONTINUATIONS, long, long[::-1] + "!"]
    alone = [pf.score(model, PROMPT, [text])[0] for text in texts]
    for batch_size in (None, 1, 4, 7):
        for text, one, other in zip(texts, alone, pf.score(model, PROMPT, texts, batch_size=batch_size), strict=True):
            assert one.token_logprobs.tobytes() == other.token_logprobs.tobytes(), text
            assert (one.logprob, one.is_greedy, one.tokens) == (other.logprob, other.is_greedy, other.tokens)


def test_score__knows_the_greedy_continuation(small: pf.Model) -> None:
    context = tiny.ids(PROMPT, bos=True)
    greedy = [step.token for step in pf.generate(small, context, max_tokens=6, ignore_eos=True)]
    changed = [*greedy[:5], (greedy[5] + 1) % tiny.VOCABULARY]
    first = [(greedy[0] + 1) % tiny.VOCABULARY, *greedy[1:]]
    results = pf.score(small, context, [greedy, greedy[:1], changed, first])
    assert [result.is_greedy for result in results] == [True, True, False, False]
    probabilities = np.concatenate([step.logprobs[[step.token]] for step in pf.generate(small, context, max_tokens=1)])
    assert results[1].token_logprobs == pytest.approx(probabilities, abs=1e-5)


def test_score__takes_continuations_longer_than_a_pass(small: pf.Model) -> None:
    long = np.random.default_rng(0).integers(2, tiny.VOCABULARY, ROWS + 77).tolist()
    results = pf.score(small, PROMPT, [long, long[:9], long[: ROWS + 1]], batch_size=3)
    for tokens, result in zip((long, long[:9], long[: ROWS + 1]), results, strict=True):
        np.testing.assert_array_equal(result.token_logprobs, from_scratch(small, tiny.ids(PROMPT, bos=True), tokens)[0])


def test_score__goes_on_from_a_state(small: pf.Model) -> None:
    head, tail = tiny.ids(PROMPT[:20], bos=True), PROMPT[20:]
    state, _ = small.forward(small.init_state(), head)
    whole = pf.score(small, PROMPT, CONTINUATIONS)
    for prompt in (tail, tiny.ids(tail)):
        parts = pf.score(small, prompt, CONTINUATIONS, state=state)
        assert [p.token_logprobs.tobytes() for p in parts] == [w.token_logprobs.tobytes() for w in whole]
    assert state.length == len(head)


def test_score__chat_messages_are_rendered(small: pf.Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rendered = small.tokenizer.apply_chat_template(messages)
    assert rendered.startswith("<s>")
    (chat,), (text,) = pf.score(small, messages, ["Hi"]), pf.score(small, rendered, ["Hi"])
    assert chat.logprob == text.logprob
    assert chat.logprob == pf.score(small, small.tokenizer.encode(rendered), [tiny.ids("Hi")])[0].logprob


def test_score__runs_the_context_once_and_keeps_nothing(small: pf.Model, no_leaks: None) -> None:
    used = pf.arena_stats()["used_pages"]
    with_one = pages_for(small, CONTINUATIONS[:1])
    with_all = pages_for(small, CONTINUATIONS)
    # A fork copies one partly filled page in each layer, and the context's pages are there once.
    assert with_all <= with_one + len(CONTINUATIONS) * small.config.layers
    assert pf.arena_stats()["used_pages"] == used


def pages_for(model: pf.Model, texts: list[str]) -> int:
    before = pf.arena_stats()["allocated_pages"]
    pf.score(model, "word " * 300, texts)
    return pf.arena_stats()["allocated_pages"] - before


def test_score__is_20_times_faster_than_from_scratch(model: pf.Model) -> None:
    """200 continuations of one context of 500 tokens. From scratch, four of them stand for all."""
    words = model.tokenizer.encode(Path(pf.__file__).with_name("data").joinpath("tidewatch.txt").read_text())
    context, rest = words[:500], words[500:]
    continuations = [rest[i : i + 4] for i in range(200)]
    scratch = []

    def one(tokens: list[int]) -> float:
        start = time.perf_counter()
        state, _ = model.forward(model.init_state(), context, last_only=True)
        np.asarray(model.forward(state, tokens[:-1])[1])
        scratch.append(time.perf_counter() - start)
        return scratch[-1]

    one(continuations[0])
    one(continuations[1])
    start = time.perf_counter()
    results = pf.score(model, context, continuations)
    shared = time.perf_counter() - start
    one(continuations[2])
    one(continuations[3])
    assert len(results) == 200 and all(result.token_count == 4 for result in results)
    assert 200 * float(np.median(scratch)) / shared >= 20


# ---- Where the text is split


def merging_tokenizer(folder: Path) -> Tokenizer:
    """The tiny tokenizer with a merge of "a" and "b", and of space and "b"."""
    tiny.write_tiny(folder, tokenizer={"add_bos_token": False})
    file = folder / "tokenizer.json"
    backend = json.loads(file.read_text())
    backend["model"]["vocab"] |= {"ab": 97, "Ġb": 98}
    backend["model"]["merges"] = [["a", "b"], ["Ġ", "b"]]
    file.write_text(json.dumps(backend))
    return Tokenizer.from_files(folder)


def test_encode_pair__splits_the_whole_at_the_contexts_length(tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#4012 (G6): trailing spaces move; a token across the seam is not lost."""
    tokenizer = merging_tokenizer(tmp_path)
    a, b, c, ab, space_b = *tiny.ids("abc"), 97, 98
    assert encode_pair(tokenizer, "a", "c") == ([a], [c])
    assert encode_pair(tokenizer, "c ", "b") == ([c], [space_b]), "the space goes with the word"
    assert encode_pair(tokenizer, "a ", "b") == ([a], [space_b])
    assert tokenizer.encode("ab") == [ab]
    assert encode_pair(tokenizer, "a", "b") == ([a], [b]), "nothing of the continuation is in the whole's rest"
    assert encode_pair(tokenizer, "ca", "bc") == ([c, a], [b, c]), "the split would lose the b"
    assert encode_pair(tokenizer, "", "ab") == ([], [ab])
    assert encode_pair(tokenizer, "a", "b", add_bos=True) == ([tiny.BOS, a], [b])
    assert encode_pair(tokenizer, "<s>a", "c", add_bos=True) == ([tiny.BOS, a], [c])


def test_score__bos_stands_in_for_no_prompt(small: pf.Model, tmp_path: Path) -> None:
    quiet = pf.load(tiny.write_tiny(tmp_path / "a", tokenizer={"add_bos_token": False}))
    expected = from_scratch(small, [tiny.BOS], tiny.ids("tide"))[0]
    for model in (small, quiet):
        for prompt in ("", []):
            np.testing.assert_array_equal(pf.score(model, prompt, ["tide"])[0].token_logprobs, expected)
    without = pf.load(tiny.write_tiny(tmp_path / "b", tokenizer={"bos_token": None}))
    with pytest.raises(pf.InvalidArgument, match="prompt: expected at least one token, for the model has no BOS"):
        pf.score(without, "", ["tide"])


def test_score__refuses_what_cannot_be_scored(small: pf.Model) -> None:
    assert pf.score(small, PROMPT, []) == []
    with pytest.raises(pf.InvalidArgument, match=r"continuations\[1\]: expected at least one token, got none"):
        pf.score(small, PROMPT, ["a", ""])
    with pytest.raises(pf.InvalidArgument, match="continuations: expected a list"):
        pf.score(small, PROMPT, "abc")
    with pytest.raises(pf.InvalidArgument, match="batch_size: expected at least 1, got 0"):
        pf.score(small, PROMPT, ["a"], batch_size=0)
    with pytest.raises(pf.InvalidArgument, match=r"continuations\[0\]: expected at most 49 tokens, .* got 50"):
        pf.score(small, [5] * 2000, [[5] * 50])
    assert pf.score(small, [5] * 2000, [[5] * 49])[0].token_count == 49
    with pytest.raises(pf.InvalidArgument, match="tokens: expected 0…96"):
        pf.score(small, PROMPT, [[5, 500, 5]])
    state, _ = small.forward(small.init_state(), [5])
    with pytest.raises(pf.InvalidArgument, match="the state needs a token to go on from"):
        pf.score(small, "", ["a"], state=state)
