"""Beam search: the best few continuations side by side, each of them a state.

Nothing here but public functions: a beam that has several children is one state used several times, and a beam that is
dropped is a state nobody holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum._check import whole_number
from pyferrum.errors import InvalidArgument
from pyferrum.generate import Prompt, continues, prompt_tokens
from pyferrum.models.model import Model
from pyferrum.models.model_state import ModelState
from pyferrum.ops import top_k
from pyferrum.sampling import check_finite

MAX_BEAMS = 1024


@dataclass(frozen=True)
class Beam:
    """A continuation of a prompt."""

    tokens: tuple[int, ...]
    """The new ones; an end-of-sequence token is the last of them."""
    logprobs: tuple[float, ...]
    """Of each token given all before it, in nats, float64 from float32 logits."""
    score: float
    """log_probability / len(tokens) ** length_penalty: beams are ranked by it."""
    finish_reason: str
    """"stop" (an end-of-sequence token) or "length": `max_tokens`, or as many as the model's context holds."""
    state: ModelState
    """Everything up to, but not including, the last token."""

    @property
    def log_probability(self) -> float:
        """Of all tokens given the prompt, in nats."""
        return sum(self.logprobs)


def beam_search(
    model: Model,
    prompt: Prompt,
    *,
    beams: int = 4,
    max_tokens: int = 32,
    length_penalty: float = 0.0,
    state: ModelState | None = None,
    ignore_eos: bool = False,
) -> list[Beam]:
    """The `beams` best continuations of a prompt that a beam search finds.

    At every step, each unfinished beam is extended by every token, and the `beams` best of these and of the finished
    ones are kept. It ends when all that are kept are finished or have `max_tokens` tokens. One beam is greedy
    decoding; beams >= vocabulary ** (max_tokens - 1) is a complete search.

    The same arguments give the same beams, bit for bit: a beam's logits do not depend on the beams that run beside it.
    Of equal scores, the child of the better ranked beam comes first, then the larger logit, then the lower token id.

    Args:
        model: the model.
        prompt: text, chat messages ({"role", "content"}), or token ids; at least one token.
        beams: how many are kept, 1…1024. All unfinished ones run in one packed call.
        max_tokens: new tokens at most.
        length_penalty: exponent of the length that log-probabilities are divided by. 0 ranks by probability, which
            favours beams that end early; 1 by the mean over tokens.
        state: what came before the prompt; None for nothing. It stays as it is. A text goes on in it, without the space
            that SentencePiece begins texts with: behind a special token, give `tokenizer.encode(text, add_bos=False)`.
        ignore_eos: go on after an end-of-sequence token.

    Returns:
        At most `beams` of them, the best first.

    Raises:
        InvalidArgument: an option out of its range, a prompt that is empty or longer than the model's context, or a
            model whose logits are not finite.
        OutOfPages: the arena is full; no state has changed.
    """
    whole_number(beams, "beams", 1, MAX_BEAMS)
    whole_number(max_tokens, "max_tokens", 1)
    if not np.isfinite(length_penalty):
        raise InvalidArgument(f"length_penalty: expected a finite number, got {length_penalty}")
    tokens = prompt_tokens(model, prompt, continued=continues(state))
    if not tokens:
        raise InvalidArgument("prompt: expected at least one token, got none")
    ends = frozenset() if ignore_eos else model.tokenizer.eos_token_ids
    before = model.init_state() if state is None else state
    after, logits = model.forward(before, tokens, last_only=True)
    kept: list[Beam] = []
    growing = [(Beam((), (), 0.0, "length", before), after, logits)]
    for length in range(1, max_tokens + 1):
        kept = _best(kept, growing, beams, length**length_penalty, ends)
        unfinished = [beam for beam in kept if beam.finish_reason == "length"]
        full = before.length + len(tokens) + length > model.config.attention.maximum_context_tokens
        if not unfinished or length == max_tokens or full:
            break
        states, rows = model.forward(
            [beam.state for beam in unfinished], [beam.tokens[-1:] for beam in unfinished], last_only=True
        )
        growing = list(zip(unfinished, states, rows, strict=True))
    return kept


def _best(
    kept: list[Beam], growing: list[tuple[Beam, ModelState, Any]], beams: int, divisor: float, ends: frozenset[int]
) -> list[Beam]:
    """The best of the finished beams and of all one-token extensions of the others.

    `kept` is in order of rank, and `growing` are its unfinished ones (at first the empty one), in that order, each with
    the state behind its last token and the logits there.
    """
    scores = np.concatenate([np.asarray(row) for _, _, row in growing])
    # No more than `beams` extensions of one beam can be among the best of all.
    values, tokens = (np.asarray(a) for a in top_k(scores, min(beams, scores.shape[1])))
    wide = scores.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    check_finite(top)
    logprobs = values - (top + np.log(np.exp(wide - top).sum(axis=1, keepdims=True)))
    extensions = iter(range(len(growing)))
    candidates: list[tuple[float, Beam, int, int]] = []
    for beam in kept or [growing[0][0]]:
        if beam.finish_reason == "stop":
            candidates.append((beam.score, beam, -1, -1))
            continue
        row, total = next(extensions), beam.log_probability
        for column, logprob in enumerate(logprobs[row].tolist()):
            candidates.append(((total + logprob) / divisor, beam, row, column))
    # Made in order of rank, of logit and of id (top_k's own rule), and sorted() is stable: the rule for equal scores.
    best = []
    for score, beam, row, column in sorted(candidates, key=lambda candidate: -candidate[0])[:beams]:
        if row < 0:
            best.append(beam)
            continue
        token = int(tokens[row, column])
        reason = "stop" if token in ends else "length"
        path = (*beam.logprobs, float(logprobs[row, column]))
        best.append(Beam((*beam.tokens, token), path, score, reason, growing[row][1]))
    return best
