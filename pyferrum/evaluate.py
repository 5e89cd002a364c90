"""Scores of a model on text. A result says how it was measured, so that two numbers can be compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from tqdm.auto import tqdm

from pyferrum.errors import InvalidArgument
from pyferrum.models.model import Model
from pyferrum.ops import cross_entropy

Bos = int | Literal["auto"] | None


def token_nlls(
    model: Model,
    tokens: Sequence[int] | np.ndarray[Any, Any],
    window: int = 512,
    *,
    bos: Bos = "auto",
    progress: bool | None = False,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Negative log-likelihood of each token given those before it in its window, in nats.

    The text, behind `bos` if there is one, is cut into disjoint windows: each is fed `window` tokens to score the
    `window` tokens that follow each of them. So every token but the first is scored once, the first one too if there
    is a BOS; a window's first score has one token of context.

    Args:
        model: the model.
        tokens: the text.
        window: tokens fed at a time.
        bos: a token to put in front unless the text begins with it, None for none, "auto" for the tokenizer's own
            setting.
        progress: a progress bar; None shows it on a terminal only.

    Returns:
        float32 [len(tokens)] with a BOS, else [len(tokens) - 1].

    Raises:
        InvalidArgument: nothing to score, or a window of no tokens or beyond the model's context.
    """
    most = model.config.attention.maximum_context_tokens
    if not 1 <= window <= most:
        raise InvalidArgument(f"window: expected 1…{most}, the model's context, got {window}")
    prefix = _prefix(model, bos)
    if len(tokens) and prefix == [int(tokens[0])]:
        prefix = []  # the text brings its own
    sequence = np.asarray([*prefix, *tokens], np.int64)
    if len(sequence) < 2:
        raise InvalidArgument(f"tokens: expected at least {2 - len(prefix)} to score, got {len(tokens)}")
    losses = []
    disable = None if progress is None else not progress
    with tqdm(total=len(sequence) - 1, unit="tok", disable=disable, leave=False) as bar:
        for start in range(0, len(sequence) - 1, window):
            fed = sequence[start : min(start + window, len(sequence) - 1)]
            _, logits = model.forward(model.init_state(), fed)
            losses.append(np.asarray(cross_entropy(logits, sequence[start + 1 : start + 1 + len(fed)])))
            bar.update(len(fed))
    return np.concatenate(losses)


def _prefix(model: Model, bos: Bos) -> list[int]:
    if bos == "auto":
        tokenizer = model.tokenizer
        return [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    return [] if bos is None else [bos]


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and how it was measured."""

    perplexity: float
    """exp of the mean NLL."""
    mean_nll: float
    """Nats per scored token."""
    standard_error: float
    """Of the mean NLL, as if tokens were independent."""
    scored_tokens: int
    method: str
    """How the text was cut."""
    window: int
    bos: int | None
    stream: str
    """dtype of the residual stream."""
    seconds: float
    tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def perplexity(
    model: Model,
    text: str | Sequence[int] | np.ndarray[Any, Any],
    window: int = 512,
    *,
    bos: Bos = "auto",
    progress: bool | None = False,
) -> Perplexity:
    """Perplexity of a text or of token ids, by disjoint windows (see `token_nlls`, whose arguments it takes)."""
    tokens = model.tokenizer.encode(text, add_bos=False) if isinstance(text, str) else text
    prefix = _prefix(model, bos)
    start = time.perf_counter()
    nlls = token_nlls(model, tokens, window, bos=prefix[0] if prefix else None, progress=progress)
    seconds = time.perf_counter() - start
    mean = float(np.mean(nlls, dtype=np.float64))
    spread = float(np.std(nlls, dtype=np.float64)) / max(len(nlls) - 1, 1) ** 0.5
    return Perplexity(
        perplexity=float(np.exp(mean)),
        mean_nll=mean,
        standard_error=spread,
        scored_tokens=len(nlls),
        method=f"disjoint windows of {window} tokens, one token of context, " + ("BOS" if prefix else "no BOS"),
        window=window,
        bos=prefix[0] if prefix else None,
        stream=str(model.dtype),
        seconds=seconds,
        tokens_per_second=len(nlls) / seconds,
    )
