"""Scores of a model on text. A result says how it was measured, so that two numbers can be compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pyferrum.errors import InvalidArgument
from pyferrum.evaluate.compare import Comparison, compare
from pyferrum.evaluate.journal import Journal
from pyferrum.evaluate.methods import METHODS, Bos, Document, Window, plan
from pyferrum.evaluate.provenance import device_facts, model_facts, model_sha256, tokens_sha256, versions
from pyferrum.evaluate.results import Evaluation, read_result, summary
from pyferrum.evaluate.tasks import evaluate_tasks
from pyferrum.evaluate.work import Scored, Unit, run_units
from pyferrum.generate import token_ids
from pyferrum.models.model import Model

__all__ = [
    "METHODS",
    "Bos",
    "Comparison",
    "Evaluation",
    "compare",
    "evaluate",
    "evaluate_tasks",
    "model_sha256",
    "perplexity",
    "read_result",
    "token_nlls",
]

Tokens = Sequence[int] | np.ndarray[Any, Any]


def evaluate(
    model: Model,
    texts: str | Tokens | Sequence[str] | Sequence[Tokens],
    *,
    method: str = "stream",
    window: int = 512,
    stride: int | None = None,
    bos: Bos = "auto",
    executor: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    progress: bool | None = False,
) -> Evaluation:
    """Perplexity of texts, by a named method, here or on many machines.

    The text is cut into windows, as `pyferrum.evaluate.methods` says, and the windows are scored one by one. What comes
    out has the same bits wherever they are scored and in whatever order.

    Args:
        model: the model.
        texts: one document or several, as text or as token ids.
        method: stream, rolling (lm-evaluation-harness), half-window (llama.cpp) or strided (Hugging Face).
        window: tokens fed at a time.
        stride: tokens between the beginnings of strided windows; None for half a window.
        bos: a token in front unless the text begins with it, None for none. "auto": with rolling the model's BOS if it
            has one; with the others only if the tokenizer's setting says so.
        executor: any `concurrent.futures.Executor`, or a `dask.distributed.Client`. Its workers load the model once
            each, from the same path, and check that it is the same. None scores here.
        checkpoint: a file that keeps what has been scored. If it is there, the evaluation goes on from it.
        progress: a progress bar; None shows it on a terminal only.

    Returns:
        An Evaluation.

    Raises:
        InvalidArgument: nothing to score, a window beyond the model's context, a checkpoint of something else, or a
            model whose logits are not finite.
        CheckpointError: a worker found another model or another build of the library.
    """
    settings = plan(model, method, window, stride, bos)
    documents = _documents(model, texts)
    windows = list(settings.windows(documents))
    if not windows:
        count = sum(len(document.tokens) for document in documents)
        raise InvalidArgument(
            f"texts: expected something to score by {settings.method} ({settings.definition}), got {count} tokens"
        )
    how: dict[str, Any] = {
        "method": settings.method,
        "definition": settings.definition,
        "window": settings.window,
        "stride": settings.stride,
        "bos": settings.bos,
        "documents": len(documents),
        "text_tokens": sum(len(document.tokens) for document in documents),
        "text_sha256": tokens_sha256(document.tokens for document in documents),
        "residual_stream": str(model.dtype),
        "model": model_facts(model),
    }
    start = time.perf_counter()
    scored, fresh = _scores(model, windows, how, executor, checkpoint, progress)
    seconds = time.perf_counter() - start
    ordered = [scored[number] for number in range(len(windows))]
    nlls = np.concatenate([part.nlls[0] for part in ordered])
    places = [place for w in windows for place in w.places]
    words, nbytes = (_total(documents, places, name) for name in ("words", "nbytes"))
    devices = {tuple(sorted(part.device.items())): None for part in ordered}
    return Evaluation(
        **summary(nlls, words, nbytes),
        **how,
        scored_tokens=len(nlls),
        scored_words=words,
        scored_bytes=nbytes,
        scored_sha256=tokens_sha256((*place, documents[place[0]].tokens[place[1]]) for place in places),
        devices=tuple(dict(facts) for facts in sorted(devices)),
        versions=versions(),
        token_nlls=nlls,
        seconds=seconds,
        tokens_per_second=fresh / seconds,
    )


def perplexity(
    model: Model,
    text: str | Tokens | Sequence[str] | Sequence[Tokens],
    window: int = 512,
    *,
    bos: Bos = "auto",
    progress: bool | None = False,
) -> Evaluation:
    """Perplexity by the stream method: `evaluate(model, text, method="stream", …)`."""
    return evaluate(model, text, method="stream", window=window, bos=bos, progress=progress)


def token_nlls(
    model: Model, tokens: Tokens, window: int = 512, *, bos: Bos = "auto", progress: bool | None = False
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Negative log-likelihood of each token given those before it in its window, in nats, by the stream method.

    Returns:
        float32 [len(tokens)] with a BOS that the text does not bring itself, else [len(tokens) - 1].

    Raises:
        InvalidArgument: nothing to score, or a window of no tokens or beyond the model's context.
    """
    settings = plan(model, "stream", window, None, bos)
    windows = list(settings.windows([Document(tuple(token_ids(tokens, "tokens")), None, None)]))
    if not windows:
        least = 2 if settings.bos is None or list(tokens[:1]) == [settings.bos] else 1
        raise InvalidArgument(f"tokens: expected at least {least} to score, got {len(tokens)}")
    scored, _ = _scores(model, windows, {}, None, None, progress)
    return np.concatenate([scored[number].nlls[0] for number in range(len(windows))])


def _scores(
    model: Model,
    windows: Sequence[Window],
    how: dict[str, Any],
    executor: Any,
    checkpoint: str | PathLike[str] | None,
    progress: bool | None,
) -> tuple[dict[int, Scored], int]:
    """Scores of every window by its number, and how many tokens were scored now."""
    scored: dict[int, Scored] = {}
    fresh = 0
    total = sum(len(window.scored) for window in windows)
    with ExitStack() as stack:
        journal = None
        if checkpoint is not None:
            # Bits may change with the build, so a resumed evaluation has to be of the same one.
            measures = {**how, "windows": len(windows), "build": device_facts(model)["build"]}
            journal = stack.enter_context(Journal(checkpoint, measures))
            scored |= journal.done
            for number, part in scored.items():
                lengths = [len(windows[number].scored)] if number in range(len(windows)) else []
                if [len(row) for row in part.nlls] != lengths:
                    raise InvalidArgument(f"checkpoint: {checkpoint} is damaged: window {number} has other scores")
        units = [(i, Unit(w.context, (w.scored,))) for i, w in enumerate(windows) if i not in scored]
        disable = None if progress is None else not progress
        done = total - sum(len(windows[i].scored) for i, _ in units)
        bar = stack.enter_context(tqdm(total=total, initial=done, unit="tok", disable=disable, leave=False))
        for number, result in run_units(model, units, executor):
            if journal is not None:
                journal.append(number, result)
            scored[number] = result
            fresh += len(windows[number].scored)
            bar.update(len(windows[number].scored))
    return scored, fresh


def _documents(model: Model, texts: Any) -> list[Document]:
    """Documents of text, token ids, or lists of either."""
    if isinstance(texts, str):
        return [_document(model, texts)]
    if isinstance(texts, (bytes, bytearray)) or not hasattr(texts, "__iter__"):
        raise InvalidArgument(f"text: expected text, token ids, or a list of either, got {type(texts).__name__}")
    entries = list(texts)
    if all(isinstance(entry, (int, np.integer)) for entry in entries):
        return [Document(tuple(int(token) for token in entries), None, None)]
    return [
        _document(model, entry) if isinstance(entry, str) else Document(tuple(token_ids(entry, "text")), None, None)
        for entry in entries
    ]


def _document(model: Model, text: str) -> Document:
    ends = [0, *model.tokenizer.ends(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]
    # A word belongs to the token in whose text it begins.
    words = [
        sum(not c.isspace() and (i == 0 or text[i - 1].isspace()) for i, c in enumerate(piece, begin))
        for begin, piece in zip(ends, pieces, strict=False)
    ]
    tokens = model.tokenizer.encode(text, add_bos=False)
    return Document(tuple(tokens), tuple(len(piece.encode()) for piece in pieces), tuple(words))


def _total(documents: Sequence[Document], places: Sequence[tuple[int, int]], name: str) -> int | None:
    counts = [getattr(document, name) for document in documents]
    if any(count is None for count in counts):
        return None
    return sum(counts[document][position] for document, position in places)
