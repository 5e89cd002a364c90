"""Text and evaluation: one BOS, the right one, and scores that depend on the text alone (CASES.md G), as tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import _native, cli, reference
from pyferrum.evaluate import perplexity, token_nlls
from tests import tiny
from tests.conftest import settled_counts

TEXT = "The harbour fills by six, and the boats lie still."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
NO_BOS_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("tiny")))


def loaded(folder: Path, **settings: Any) -> pf.Model:
    """The tiny model with other tokenizer settings."""
    return pf.load(tiny.write_tiny(folder, tokenizer=settings))


def log_probabilities(model: pf.Model, fed: Sequence[int]) -> np.ndarray:
    """log p(next token | fed[: i + 1]) for every i, float64, from one forward pass and no helper of ours."""
    logits = np.asarray(model.forward(model.init_state(), fed)[1]).astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def continued(model: pf.Model, prompt: Any, state: pf.ModelState | None = None) -> list[tuple[int, bytes]]:
    """What a greedy continuation shows of the tokens it was fed."""
    steps = pf.generate(model, prompt, max_tokens=4, state=state, ignore_eos=True)
    return [(step.token, step.logprobs.tobytes()) for step in steps]


# ---- BOS


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [tiny.TEMPLATE, NO_BOS_TEMPLATE], ids=["template has BOS", "template has none"])
def test_bos__is_there_once_in_chat(template: str, add_bos: bool, tmp_path: Path) -> None:
    """abetlen/llama-cpp-python#1501, #1561, #1439; InfiniTensor/InfiniLM#388 (G1): the template's or ours, not both."""
    model = loaded(tmp_path, chat_template=template, add_bos_token=add_bos)
    ids = model.tokenizer.encode_chat(MESSAGES)
    wanted = add_bos or template is tiny.TEMPLATE
    assert ids.count(tiny.BOS) == wanted
    assert (ids[0] == tiny.BOS) == wanted
    assert ids[int(wanted) :][:12] == tiny.ids("[system]Be brief.")[:12]
    assert continued(model, MESSAGES) == continued(model, ids)
    assert next(pf.generate(model, MESSAGES)).prompt_tokens == len(ids)


def test_bos__is_there_once_in_a_completion(tiny_model: pf.Model, tmp_path: Path) -> None:
    """abetlen/llama-cpp-python#1501 (G1): text that begins with BOS already gets no second one."""
    expected = continued(tiny_model, tiny.ids(TEXT, bos=True))
    assert continued(tiny_model, TEXT) == expected
    assert continued(tiny_model, "<s>" + TEXT) == expected
    without = loaded(tmp_path, add_bos_token=False)
    assert continued(without, TEXT) == continued(without, tiny.ids(TEXT))
    assert continued(without, "<s>" + TEXT) == expected


def test_bos__is_not_put_into_the_middle_of_a_continued_sequence(tiny_model: pf.Model) -> None:
    """abetlen/llama-cpp-python#1501 (G1): `state=` has the BOS already; the next piece of text must not bring another.

    A text in two calls is the text in one.
    """
    head, tail = TEXT[:20], TEXT[20:]
    state, _ = tiny_model.forward(tiny_model.init_state(), tiny.ids(head, bos=True))
    assert continued(tiny_model, tail, state) == continued(tiny_model, TEXT)


@pytest.mark.parametrize("form", ["text", "ids"])
def test_bos__is_there_once_in_a_log_likelihood(form: str, tiny_model: pf.Model) -> None:
    """EleutherAI/lm-evaluation-harness#3333 (G1): what `encode` gives has its BOS; scoring must not add one before it.

    The text's own tokens score the same with a BOS written out as with one asked for by the setting.
    """
    expected = token_nlls(tiny_model, tiny.ids(TEXT))
    if form == "ids":
        nlls = token_nlls(tiny_model, tiny_model.tokenizer.encode(TEXT))
        np.testing.assert_array_equal(nlls[-len(TEXT) :], expected)
    else:
        written, asked = perplexity(tiny_model, "<s>" + TEXT), perplexity(tiny_model, TEXT)
        assert (written.mean_nll, written.scored_tokens) == (asked.mean_nll, len(TEXT))


def test_bos__follows_the_setting_and_shows_in_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """abetlen/llama-cpp-python#1537; EleutherAI/lm-evaluation-harness#1465 (G2): by the tokenizer, or by a flag."""
    with_bos = loaded(tmp_path / "a", add_bos_token=True)
    without = loaded(tmp_path / "b", add_bos_token=False)
    ours = -log_probabilities(with_bos, tiny.ids(TEXT, bos=True)[:-1])[np.arange(len(TEXT)), tiny.ids(TEXT)]
    bare = -log_probabilities(with_bos, tiny.ids(TEXT)[:-1])[np.arange(len(TEXT) - 1), tiny.ids(TEXT)[1:]]
    assert abs(ours.mean() - bare.mean()) > 0.01, "a model that does not care for BOS would show nothing"
    (tmp_path / "text").write_text(TEXT)
    for model, flag, option, nlls in (
        (with_bos, "auto", "auto", ours),
        (without, "auto", "auto", bare),
        (with_bos, None, "never", bare),
        (without, tiny.BOS, "always", ours),
    ):
        result = perplexity(model, TEXT, bos=flag)
        shown = tiny.BOS if nlls is ours else None
        assert (result.bos, result.scored_tokens) == (shown, len(nlls))
        assert result.definition.endswith(", BOS" if nlls is ours else ", no BOS")
        assert result.mean_nll == pytest.approx(nlls.mean(), abs=1e-5)
        assert result.perplexity == pytest.approx(np.exp(nlls.mean()), rel=1e-5)
        arguments = ["--model", str(model.path), "--text", str(tmp_path / "text"), "--bos", option, "--json"]
        assert cli.main(["eval", *arguments]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["bos"], printed["definition"], printed["mean_nll"]) == (
            shown,
            result.definition,
            result.mean_nll,
        )


def test_prefix__is_bos_and_never_eos(tiny_model: pf.Model, tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#1586, #2382 (G3): conditioned on BOS if there is one; else on nothing."""
    tokens = tiny.ids(TEXT)
    first = [-log_probabilities(tiny_model, [prefix])[0, tokens[0]] for prefix in (tiny.BOS, tiny.EOS)]
    assert abs(first[0] - first[1]) > 0.1
    assert token_nlls(tiny_model, tokens)[0] == pytest.approx(first[0], abs=1e-5)
    model = loaded(tmp_path, bos_token=None, add_bos_token=True)
    result = perplexity(model, TEXT)
    assert (result.bos, result.scored_tokens) == (None, len(TEXT) - 1)
    np.testing.assert_array_equal(token_nlls(model, tokens), token_nlls(tiny_model, tokens, bos=None))


@pytest.mark.parametrize("window", [1, 4, 49, 50, 51, 512])
def test_windows__score_every_token_once_as_the_method_says(window: int, tiny_model: pf.Model) -> None:
    """EleutherAI/lm-evaluation-harness#2382 (G3): the window policy is named, and is what is done.

    Disjoint windows: `window` tokens fed, each scoring the one behind it; the first begins with BOS.
    """
    sequence = tiny.ids(TEXT, bos=True)
    assert len(sequence) == 51
    expected = []
    for start in range(0, 50, window):
        fed = sequence[start : min(start + window, 50)]
        expected += [-row[t] for row, t in zip(log_probabilities(tiny_model, fed), sequence[start + 1 :], strict=False)]
    result = perplexity(tiny_model, TEXT, window)
    np.testing.assert_allclose(token_nlls(tiny_model, sequence[1:], window), expected, atol=1e-5)
    assert (result.scored_tokens, result.window) == (50, window)
    assert f"disjoint windows of {window} tokens" in result.definition
    assert result.mean_nll == pytest.approx(np.mean(expected), abs=1e-5)


def test_windows__a_uniform_model_scores_its_vocabulary(tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness:lm_eval/api/model.py (G5): perplexity 97 exactly, for any window."""
    weights = tiny.tensors()
    weights["lm_head.weight"][:] = 0
    model = pf.load(tiny.write_tiny(tmp_path, weights=weights))
    for window in (1, 3, 4, 512):
        result = perplexity(model, tiny.ids("0123456789"), window)
        assert (result.scored_tokens, result.perplexity) == (10, pytest.approx(97, rel=1e-6))


# ---- Scores depend on the text alone


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_batches__do_not_change_a_score(dtype: str, tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#704; Stability-AI#102; unslothai/unsloth#9708 (G7): x1, x4, x5, mixed lengths.

    (Stability-AI/lm-evaluation-harness#102.) Not within 1e-5 but to the last bit, in both streams.
    """
    model = pf.load(tiny.write_tiny(tmp_path), dtype=dtype)
    request = tiny.ids(TEXT, bos=True)
    _, alone = model.forward(model.init_state(), request)
    expected = np.asarray(alone).tobytes()
    others = [tiny.ids("a"), tiny.ids(TEXT[::-1] * 3, bos=True), tiny.ids("pot"), request]
    for batch in ([request], [request] * 4, [request] * 5, [*others, request], [request, *others[:2]]):
        _, logits = model.forward([model.init_state() for _ in batch], batch)
        for tokens, rows in zip(batch, logits, strict=True):
            assert len(rows) == len(tokens)
            if tokens is request:
                assert np.asarray(rows).tobytes() == expected
    _, chunked = model.forward([model.init_state() for _ in others], others, chunk=7)
    assert np.asarray(chunked[-1]).tobytes() == expected
    nlls = np.asarray(pf.cross_entropy(alone[:-1], request[1:]))
    np.testing.assert_allclose(nlls, reference.cross_entropy(np.asarray(alone)[:-1], request[1:]), rtol=1e-5)


def test_documents__are_scored_alike_in_any_order(tiny_model: pf.Model) -> None:
    """ggml-org/llama.cpp#7066 (G9, in a comment): no state is carried over, no row is off by one."""
    one, two = tiny.ids(TEXT), tiny.ids("Low water at noon.")
    first = [token_nlls(tiny_model, document).tobytes() for document in (one, two)]
    list(pf.generate(tiny_model, "in between", max_tokens=3))
    second = [token_nlls(tiny_model, document).tobytes() for document in (two, one)]
    assert first == second[::-1]
    for document in (one, two):
        table = log_probabilities(tiny_model, [tiny.BOS, *document[:-1]])
        np.testing.assert_allclose(
            token_nlls(tiny_model, document), -table[np.arange(len(document)), document], atol=1e-5
        )


def test_generation__two_hundred_times_holds_on_to_nothing(tiny_model: pf.Model) -> None:
    """abetlen/llama-cpp-python#924; ml-explore/mlx-examples#724 (H8): 200 generations of 20 tokens, memory flat."""
    used, counts, resident = 0, settled_counts(), 0
    texts = set()
    for number in range(200):
        texts.add("".join(step.text for step in pf.generate(tiny_model, TEXT[:9], max_tokens=20, ignore_eos=True)))
        if number == 20:
            used, counts, resident = pf.arena_stats()["used_pages"], _native.debug_counts(), tiny.resident_bytes()
    assert len(texts) == 1
    assert _native.debug_counts() == counts
    assert pf.arena_stats()["used_pages"] == used
    assert tiny.resident_bytes() - resident < 2 << 20
