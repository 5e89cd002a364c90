"""Four meanings of perplexity: how a text is cut, what each token is scored behind, and which tokens are scored.

Every method comes down to windows: tokens to feed, and tokens behind them to score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pyferrum.errors import InvalidArgument
from pyferrum.models.model import Model

Bos = int | Literal["auto"] | None
METHODS = ("stream", "rolling", "half-window", "strided")
"""stream: all documents joined and cut into disjoint windows; each is fed `window` tokens and scores the `window` that
    follow each of them. (mlx_lm.perplexity cuts alike, but skips the first token of every window.)
rolling: lm-evaluation-harness's. Each document by itself behind BOS, in disjoint windows; the last window is filled up
    with tokens before it, as context.
half-window: llama.cpp's. Each document is cut into chunks of `window` tokens, each with BOS as its first token if the
    model wants one; behind the middle of a chunk tokens are scored. A last chunk that is not full is left out.
strided: Hugging Face's. Windows of `window` tokens begin every `stride` tokens, and score what none has scored before.
"""


_NOWHERE = (-1, -1)


@dataclass(frozen=True)
class Document:
    """A text as tokens, without BOS."""

    tokens: tuple[int, ...]
    nbytes: tuple[int, ...] | None
    """UTF-8 bytes of the text that each token completes; None where only tokens are known."""
    words: tuple[int, ...] | None
    """Words, split at white space, that begin in each token's text."""


@dataclass(frozen=True)
class Window:
    """Something to feed and something behind it to score."""

    context: tuple[int, ...]
    scored: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    """(document, position) of each scored token. A BOS that is put in front has no place and is never scored; one that
    a joined document brings is scored like any token."""


@dataclass(frozen=True)
class Plan:
    """A method with its settings, for one model."""

    method: str
    definition: str
    """What is fed and what is scored, in words."""
    window: int
    stride: int | None
    bos: int | None

    def windows(self, documents: Sequence[Document]) -> Iterator[Window]:
        """Every window, in the order of the text. No token is in two of them."""
        texts = [[((d, i), token) for i, token in enumerate(document.tokens)] for d, document in enumerate(documents)]
        if self.method == "stream":
            texts = [[entry for text in texts for entry in text]]
        for text in texts:
            tokens, places = [token for _, token in text], [place for place, _ in text]
            if self.bos is not None and tokens[:1] != [self.bos]:
                tokens, places = [self.bos, *tokens], [_NOWHERE, *places]
            for begin, split, end in _CUTS[self.method](len(tokens), self.window, self.stride or 0):
                context = tokens[begin:split]
                if self.method == "half-window" and self.bos is not None:
                    context[0] = self.bos
                yield Window(tuple(context), tuple(tokens[split:end]), tuple(places[split:end]))


def plan(model: Model, method: str, window: int, stride: int | None, bos: Bos) -> Plan:
    """Check the settings of a method and put it into words.

    Args:
        model: its context bounds the window; "auto" takes its tokenizer's BOS.
        method: one of METHODS.
        window: tokens fed at a time; for half-window and strided the last token of a window is not fed.
        stride: tokens between the beginnings of strided windows; None for half a window.
        bos: a token in front, unless the text begins with it; None for none. "auto": for rolling the model's BOS if it
            has one, as lm-evaluation-harness does; for the others only if the tokenizer's setting says so.
    """
    most = model.config.attention.maximum_context_tokens
    if method not in METHODS:
        raise InvalidArgument(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if not 1 <= window <= most:
        raise InvalidArgument(f"window: expected 1…{most}, the model's context, got {window}")
    if method != "strided" and stride is not None:
        raise InvalidArgument(f"stride: expected None for the method {method!r}, got {stride}")
    if method == "strided":
        stride = window // 2 if stride is None else stride
        if not 1 <= stride < window:
            raise InvalidArgument(f"stride: expected 1…{window - 1}, below the window, got {stride}")
    if bos == "auto":
        tokenizer = model.tokenizer
        bos = tokenizer.bos_token_id if tokenizer.add_bos or method == "rolling" else None
    definition = {
        "stream": f"disjoint windows of {window} tokens, one token of context",
        "rolling": f"each document in disjoint windows of {window} tokens, one of context, the last one filled up",
        "half-window": f"chunks of {window} tokens, scored behind their first {window // 2 + 1}, the rest left out",
        "strided": f"windows of {window} tokens every {stride}, each scoring what none before it has",
    }[method]
    return Plan(method, f"{definition}, {'no BOS' if bos is None else 'BOS'}", window, stride, bos)


# (begin, split, end) of each window in a sequence of `length` tokens, BOS included: begin…split is context.


def _stream(length: int, window: int, _: int) -> Iterator[tuple[int, int, int]]:
    for start in range(0, length - 1, window):
        yield start, start + 1, min(start + window + 1, length)


def _rolling(length: int, window: int, _: int) -> Iterator[tuple[int, int, int]]:
    ends = [*range(1, length, window), length]
    for split, end in pairwise(ends):
        yield max(end - window - 1, 0), split, end


def _half_window(length: int, window: int, _: int) -> Iterator[tuple[int, int, int]]:
    if window > 2:
        for start in range(0, length - window + 1, window):
            yield start, start + window // 2 + 1, start + window


def _strided(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    split = 1
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        if end > split:
            yield begin, split, end
            split = end


_CUTS = {"stream": _stream, "rolling": _rolling, "half-window": _half_window, "strided": _strided}
