"""Log-likelihood of many continuations of one context: the context is run once, its state is used again by each.

States are immutable, so sharing one copies nothing, and a score has the same bits whatever it is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum._check import whole_number
from pyferrum.checkpoint import Tokenizer
from pyferrum.errors import InvalidArgument
from pyferrum.generate import Prompt, continues, prompt_text, prompt_tokens, token_ids
from pyferrum.models.model import Model
from pyferrum.models.model_state import ModelState
from pyferrum.ops import argmax, cross_entropy
from pyferrum.sampling import check_finite

ROWS = 512
"""Tokens that go through the layers, and rows of logits that are held, at a time."""


@dataclass(frozen=True)
class Score:
    """What a model gives one continuation."""

    logprob: float
    """ln p(continuation | context): the sum of `token_logprobs`, added in float64."""
    token_logprobs: np.ndarray[Any, np.dtype[np.float32]]
    """ln p of each token given everything before it, float32 [tokens]."""
    is_greedy: bool
    """Whether each token is the most probable one at its place."""
    tokens: tuple[int, ...]
    """The tokens that were scored."""

    @property
    def token_count(self) -> int:
        """How many tokens were scored."""
        return len(self.tokens)


def score(
    model: Model,
    prompt: Prompt,
    continuations: Sequence[str | Sequence[int]],
    *,
    state: ModelState | None = None,
    batch_size: int | None = None,
) -> list[Score]:
    """Score continuations of one prompt.

    A text is encoded together with the prompt's text and split at the prompt's length (see `encode_pair`), so its
    tokens are those that it has in running text. With a prompt of token ids it is encoded alone.

    Args:
        model: the model.
        prompt: text, chat messages ({"role", "content"}), or token ids. If it has no tokens, BOS stands in for it.
        continuations: texts, or token ids; at least one token each.
        state: what came before the prompt; None for nothing. It stays as it is. A text goes on in it, without the space
            that SentencePiece begins texts with: behind a special token, give `tokenizer.encode(text, add_bos=False)`.
        batch_size: continuations that run together; None: as many as make about 512 tokens. No bit depends on it.

    Returns:
        A Score for each continuation, in their order.

    Raises:
        InvalidArgument: an empty continuation, one that does not fit in the model's context, no prompt at all with a
            model that has no BOS, or one whose logits are not finite.
        OutOfPages: the arena is full. `state` is as it was.
    """
    if isinstance(continuations, str):
        raise InvalidArgument("continuations: expected a list of texts or of token ids, got one text")
    before = continues(state)
    text, ids = prompt_text(model, prompt), prompt_tokens(model, prompt, continued=before)
    groups: dict[tuple[int, ...], list[int]] = {}
    scored: list[list[int]] = []
    for index, continuation in enumerate(continuations):
        if not isinstance(continuation, str):
            context, tokens = ids, token_ids(continuation, f"continuations[{index}]")
        elif text is None:
            goes_on = model.tokenizer.ends_in_text(ids) if ids else before
            context, tokens = ids, model.tokenizer.encode(continuation, add_bos=False, continued=goes_on)
        else:
            add_bos, goes_on = False if before else None, before and isinstance(prompt, str)
            context, tokens = encode_pair(model.tokenizer, text, continuation, add_bos=add_bos, continued=goes_on)
        if not context:
            context = _stand_in(model, before)
        if not tokens:
            raise InvalidArgument(f"continuations[{index}]: expected at least one token, got none")
        room = model.config.attention.maximum_context_tokens - len(context) - (state.length if state else 0)
        if len(tokens) - 1 > room:  # nothing follows the last token, so it is not fed
            raise InvalidArgument(
                f"continuations[{index}]: expected at most {max(room + 1, 0)} tokens, what the model's context leaves, "
                f"got {len(tokens)}"
            )
        groups.setdefault(tuple(context), []).append(index)
        scored.append(tokens)
    results: dict[int, Score] = {}
    for shared, indices in groups.items():
        batch = score_tokens(model, shared, [scored[i] for i in indices], state=state, batch_size=batch_size)
        results.update(zip(indices, batch, strict=True))
    return [results[index] for index in range(len(scored))]


def score_tokens(
    model: Model,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    *,
    state: ModelState | None = None,
    batch_size: int | None = None,
) -> list[Score]:
    """`score` for token ids that fit: at least one of context, and at least one in each continuation."""
    if batch_size is not None:
        whole_number(batch_size, "batch_size", 1)
    if not continuations:
        return []
    losses: list[list[Any]] = [[] for _ in continuations]
    greedy = [True] * len(continuations)
    shared = model.init_state() if state is None else state
    if len(continuations) == 1:  # the end of the context and the continuation go in one pass
        if len(context) > 1:
            shared, _ = model.forward(shared, context[:-1], last_only=True)
        fed = [np.asarray([context[-1], *continuations[0][:-1]])]
        targets = [np.asarray(continuations[0])]
    else:
        shared, logits = model.forward(shared, context, last_only=True)
        _first_tokens(np.asarray(logits), [tokens[0] for tokens in continuations], losses, greedy)
        fed = [np.asarray(tokens[:-1]) for tokens in continuations]
        targets = [np.asarray(tokens[1:]) for tokens in continuations]
    for batch in _batches([len(rows) for rows in fed], batch_size):
        _extend(model, shared, batch, fed, targets, losses, greedy)
    results = []
    for tokens, parts, is_greedy in zip(continuations, losses, greedy, strict=True):
        logprobs = -np.concatenate(parts)
        check_finite(logprobs)
        results.append(Score(float(logprobs.sum(dtype=np.float64)), logprobs, is_greedy, tuple(map(int, tokens))))
    return results


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, *, add_bos: bool | None = None, continued: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it, as they are in the whole text.

    White space at the end of the context goes to the continuation, for words are encoded with the space before them.
    Both together are encoded as one text and split at the context's length. Where a token of the whole lies across the
    seam, there is no such split: then the continuation is encoded alone, so that exactly its own text is scored.

    Args:
        tokenizer: the model's.
        context: may be empty; then it has no tokens, or BOS alone.
        continuation: the text to score.
        add_bos: BOS in front; None for the tokenizer's setting. Never a second one.
        continued: the context goes on behind another text.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    head = tokenizer.encode(kept, add_bos=add_bos, continued=continued)
    whole = tokenizer.encode(kept + continuation, add_bos=add_bos, continued=continued)
    if whole[: len(head)] == head and (len(whole) > len(head) or not continuation):
        return head, whole[len(head) :]
    goes_on = tokenizer.ends_in_text(head) if head else continued
    return head, tokenizer.encode(continuation, add_bos=False, continued=goes_on)


def _stand_in(model: Model, continued: bool) -> list[int]:
    bos = None if continued else model.tokenizer.bos_token_id
    if bos is None:
        reason = "the state needs a token to go on from" if continued else "the model has no BOS to stand in"
        raise InvalidArgument(f"prompt: expected at least one token, for {reason}; got none")
    return [bos]


def _first_tokens(last: np.ndarray[Any, Any], firsts: list[int], losses: list[list[Any]], greedy: list[bool]) -> None:
    """Add losses and greediness of what comes right behind the context: all from its one row of logits."""
    best = int(np.asarray(argmax(last))[0])
    for start in range(0, len(firsts), 64):
        targets = np.asarray(firsts[start : start + 64], np.int64)
        found = np.asarray(cross_entropy(np.repeat(last, len(targets), axis=0), targets))
        for index, target in enumerate(targets, start):
            losses[index].append(found[index - start][None])
            greedy[index] = int(target) == best


def _batches(rows: Sequence[int], batch_size: int | None) -> Iterator[list[int]]:
    """Indices of what has rows to run, in batches."""
    batch: list[int] = []
    total = 0
    for index, count in enumerate(rows):
        if count == 0:
            continue
        full = total + count > ROWS if batch_size is None else len(batch) == batch_size
        if batch and full:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += count
    if batch:
        yield batch


def _extend(
    model: Model,
    shared: ModelState,
    batch: list[int],
    fed: Sequence[np.ndarray[Any, Any]],
    targets: Sequence[np.ndarray[Any, Any]],
    losses: list[list[Any]],
    greedy: list[bool],
) -> None:
    """Add losses and greediness of `targets` for a batch that forks one state, in passes of bounded size."""
    states = dict.fromkeys(batch, shared)
    for start in range(0, max(len(fed[i]) for i in batch), ROWS):
        active = [i for i in batch if start < len(fed[i])]
        piece = slice(start, start + ROWS)
        new, logits = model.forward([states[i] for i in active], [fed[i][piece] for i in active])
        for i, state, rows in zip(active, new, logits, strict=True):
            states[i] = state
            losses[i].append(np.asarray(cross_entropy(rows, targets[i][piece])))
            greedy[i] = greedy[i] and bool(np.array_equal(np.asarray(argmax(rows)), targets[i][piece]))
