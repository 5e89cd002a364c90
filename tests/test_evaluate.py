"""Scores: what is fed, what is scored, and that a result says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum.evaluate import perplexity, token_nlls


def by_hand(model: pf.Model, fed: list[int], scored: list[int]) -> np.ndarray:
    _, logits = model.forward(model.init_state(), fed)
    return np.asarray(pf.cross_entropy(logits, scored))


def test_token_nlls__windows_score_every_token_once(model: pf.Model) -> None:
    tokens = model.tokenizer.encode("Tides rise and fall twice a day, and the keeper writes them down.")
    n = len(tokens)
    one = token_nlls(model, tokens, window=512, bos=None)
    np.testing.assert_array_equal(one, by_hand(model, tokens[:-1], tokens[1:]))
    cut = token_nlls(model, tokens, window=5, bos=None)
    parts = [by_hand(model, tokens[i : min(i + 5, n - 1)], tokens[i + 1 : i + 6]) for i in range(0, n - 1, 5)]
    np.testing.assert_array_equal(cut, np.concatenate(parts))
    assert len(one) == len(cut) == n - 1
    with_bos = token_nlls(model, tokens, window=512, bos=1)
    assert len(with_bos) == n
    np.testing.assert_array_equal(with_bos, by_hand(model, [1, *tokens[:-1]], tokens))


def test_token_nlls__window_sizes_around_the_length(model: pf.Model) -> None:
    tokens = list(range(100, 110))
    for window in (1, 2, 8, 9, 10, 11):
        assert token_nlls(model, tokens, window, bos=None).shape == (9,)


def test_token_nlls__auto_bos_is_the_tokenizers_setting(model: pf.Model) -> None:
    assert not model.tokenizer.add_bos
    np.testing.assert_array_equal(token_nlls(model, [5, 6, 7]), token_nlls(model, [5, 6, 7], bos=None))


def test_token_nlls__refuses_what_cannot_be_scored(model: pf.Model) -> None:
    with pytest.raises(pf.InvalidArgument, match="at least 2 to score, got 1"):
        token_nlls(model, [5], bos=None)
    with pytest.raises(pf.InvalidArgument, match="at least 1 to score, got 0"):
        token_nlls(model, [], bos=1)
    for window in (0, 8193):
        with pytest.raises(pf.InvalidArgument, match="window: expected 1…8192"):
            token_nlls(model, [5, 6], window)


def test_perplexity__is_the_exponential_of_the_mean_and_names_its_method(model: pf.Model) -> None:
    text = "The gauge stands in a stone well beside the quay."
    result = perplexity(model, text, window=4, bos=1)
    nlls = token_nlls(model, model.tokenizer.encode(text), 4, bos=1)
    assert result.perplexity == pytest.approx(float(np.exp(nlls.mean(dtype=np.float64))), rel=1e-12)
    assert result.scored_tokens == len(nlls)
    assert result.method == "disjoint windows of 4 tokens, one token of context, BOS"
    fields: dict[str, Any] = result.to_dict()
    assert fields["bos"] == 1 and fields["window"] == 4 and fields["stream"] == "float32"
