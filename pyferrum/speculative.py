"""Speculative decoding: a draft model proposes a block, the target verifies it in one call, and what the target would
have said is what comes out.

Greedy output is plain greedy output, token for token: the target's logits do not depend, in any bit, on how many rows
share a call (docs/numerics.md). Sampled output follows the target's distribution (Leviathan et al. 2023, Chen et al.
2023), but is another draw from it than plain decoding's with the same key: it depends on the drafter and on how tokens
fall into blocks. States are immutable, so rolling back is keeping an earlier one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyferrum import _random as random
from pyferrum._check import whole_number
from pyferrum.dflash2 import MAX_LANES, MAX_ROWS
from pyferrum.errors import InvalidArgument
from pyferrum.generate import GenerationResponse, Prompt, generate, peak_memory, prompt_tokens
from pyferrum.models.draft import NO_PROPOSAL, Drafter, Proposal
from pyferrum.models.model import PREFILL_CHUNK, Model
from pyferrum.models.model_state import ModelState
from pyferrum.sampling import Sampling, check_finite, log_softmax


@dataclass(frozen=True)
class SpeculativeResponse(GenerationResponse):
    """One token, and how drafting goes."""

    lane: int
    """Which prompt it continues."""
    drafted: int
    """Tokens proposed in this token's round; 0 for the first token and where no draft was worth it."""
    accepted: int
    """Of those, how many the target accepted."""
    histogram: dict[int, int]
    """Rounds of this lane so far by tokens accepted."""


@dataclass
class _Lane:
    tokens: list[int]
    state: ModelState
    key: random.Key
    started: float
    stream: Any = None
    prompt_tps: float = 0.0
    anchor: int = 0
    count: int = 0
    finish: str | None = None
    histogram: Counter[int] = field(default_factory=Counter)


def speculative_generate(
    model: Model,
    drafter: Drafter,
    prompt: Prompt,
    *,
    block: int | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    key: random.Key | int = 0,
    ignore_eos: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> Iterator[SpeculativeResponse]:
    """Continue a prompt, a block of tokens at a time.

    There is no `state` to start from, as `generate` has: a drafter's context is what the target's layers gave for every
    token before, which a state does not keep.

    Args:
        model: the target.
        drafter: proposes; `load_draft` makes one.
        prompt: text, chat messages or token ids, as in `generate`.
        block: rows that the target verifies at once, the last token and the drafts behind it, 2…16; None for the
            drafter's own. Fewer cost less where drafts are seldom right.
        max_tokens: how many to generate at most.
        temp: temperature; 0 takes the most probable token.
        top_p, top_k, min_p: of the target's distribution, as in `generate`.
        key: of the draws, or a seed. The same key gives the same text for the same drafter, `block` and `max_tokens`.
        ignore_eos: go on after an end-of-sequence token.
        chunk: prompt tokens of a pass through the layers; changes no bit.

    Yields:
        A SpeculativeResponse per token; `state` is everything before it.

    Raises:
        InvalidArgument: an option out of its range, a prompt that is empty or longer than the model's context, a
            proposal that cannot be one, or a target whose logits are not finite.
    """
    return speculative_generate_batch(
        model,
        drafter,
        [prompt],
        block=block,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        key=key,
        ignore_eos=ignore_eos,
        chunk=chunk,
    )


def speculative_generate_batch(
    model: Model,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    block: int | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    key: random.Key | int = 0,
    ignore_eos: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> Iterator[SpeculativeResponse]:
    """Continue up to four prompts together; arguments as in `speculative_generate`.

    A lane has a key of its own, which `key` and its place in the list give. So what it says does not depend on the
    other lanes, unless the drafter lets them matter, and the first says what `speculative_generate` does.

    Yields:
        A SpeculativeResponse per token; `lane` says of which prompt. A lane's tokens come in order.
    """
    sampling = Sampling(temp, top_k, top_p, min_p)
    if not isinstance(drafter, Drafter):
        raise InvalidArgument(f"drafter: expected a Drafter, as `load_draft` makes one, got {type(drafter).__name__}")
    rows = min(drafter.block_size, MAX_ROWS) if block is None else block
    whole_number(rows, "block", 2, MAX_ROWS)
    if not isinstance(prompts, (list, tuple)) or not 1 <= len(prompts) <= MAX_LANES:
        got = len(prompts) if isinstance(prompts, (list, tuple)) else type(prompts).__name__
        raise InvalidArgument(f"prompts: expected a list of 1…{MAX_LANES} of them, got {got}")
    whole_number(max_tokens, "max_tokens", 1)
    whole_number(chunk, "chunk", 1)
    encoded = [prompt_tokens(model, prompt) for prompt in prompts]
    if not all(encoded):
        raise InvalidArgument("prompt: expected at least one token, got none")
    keys = random.split(random.as_key(key), len(encoded))
    ends = frozenset() if ignore_eos else model.tokenizer.eos_token_ids
    decoding = _Decoding(model, drafter, sampling, rows, max_tokens, ends)
    return decoding.run(encoded, keys, chunk)


def plain_tps(model: Model, state: ModelState, token: int, *, tokens: int = 16, **sampling: Any) -> float:
    """Tokens per second of plain decoding from a step of a run, a pass of the model for each.

    States are immutable, so this takes nothing from the run. Beside its `generation_tps`, mind that a run's first token
    comes with the prompt, in no time.

    Args:
        model: the target.
        state: of a step; the middle one stands for the run, because a token takes longer the more come before it.
        token: of the same step.
        tokens: how many to time at most.
        sampling: temp, top_p, top_k and min_p, as in `generate`.

    Raises:
        InvalidArgument: `tokens` is less than 1, or the model's context has no room behind the state.
    """
    count = min(tokens, model.config.attention.maximum_context_tokens - state.length)
    for most in (min(1, count), count):  # the first one warms up: it may have the model's programs to record
        start = time.perf_counter()
        for _ in generate(model, [token], state=state, max_tokens=most, ignore_eos=True, **sampling):
            pass
    return count / (time.perf_counter() - start)


class _Decoding:
    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        sampling: Sampling,
        block: int,
        max_tokens: int,
        ends: frozenset[int],
    ) -> None:
        self.model, self.drafter, self.sampling = model, drafter, sampling
        self.block, self.max_tokens, self.ends = block, max_tokens, ends

    def run(self, prompts: list[list[int]], keys: Sequence[random.Key], chunk: int) -> Iterator[SpeculativeResponse]:
        context = self.drafter.init_state(len(prompts))
        lanes: list[_Lane] = []
        for index, (tokens, key) in enumerate(zip(prompts, keys, strict=True)):
            lane = _Lane(tokens, self.model.init_state(), key, time.perf_counter())
            row, context = self._prefill(lane, index, len(prompts), context, chunk)
            lane.stream = self.model.tokenizer.stream(after=tokens)
            lanes.append(lane)
            lane.key, use = random.split(lane.key)
            token = random.categorical(use, self.sampling.probabilities(row))
            yield self._emit(lane, index, token, row, lane.state, 0, 0, False)
        while active := [i for i, lane in enumerate(lanes) if lane.finish is None]:
            rows = [self._rows(lane) for lane in lanes]
            drafts = self._draft(context, lanes, rows)
            for i in active:
                self._check(drafts[i], rows[i] - 1, i)
            blocks = [[lanes[i].anchor, *drafts[i].tokens] for i in active]
            verified, scores, features = self._verify([lanes[i].state for i in active], blocks)
            taken: list[tuple[list[int], np.ndarray[Any, Any]]] = [([], features[0][:0]) for _ in lanes]
            for at, i in enumerate(active):
                lane, start = lanes[i], lanes[i].state.length
                accepted, bonus = self._accept(lane, drafts[i], scores[at])
                if accepted + 1 > verified[at].length - start:
                    raise AssertionError("more tokens accepted than were verified")
                if rows[i] > 1:
                    lane.histogram[accepted] += 1
                for j, token in enumerate([*drafts[i].tokens[:accepted], bonus]):
                    state = verified[at].truncate(start + j + 1)
                    yield self._emit(lane, i, token, scores[at][j], state, rows[i] - 1, accepted, j < accepted)
                    lane.state = state
                    if lane.finish is not None:
                        break
                kept = lane.state.length - start
                taken[i] = blocks[at][:kept], features[at][:kept]
            context = self.drafter.extend(context, [t for t, _ in taken], [f for _, f in taken])

    def _prefill(self, lane: _Lane, index: int, lanes: int, context: Any, chunk: int) -> tuple[Any, Any]:
        """Logits of the prompt's last token, and the context with the lane's."""
        for start in range(0, len(lane.tokens), chunk):
            part = lane.tokens[start : start + chunk]
            taps: dict[int, Any] = dict.fromkeys(self.drafter.taps)
            lane.state, logits = self.model.forward(lane.state, part, last_only=True, chunk=len(part), taps=taps)
            features = _side_by_side([taps[layer] for layer in self.drafter.taps], len(part))
            empty: list[tuple[list[int], Any]] = [([], features[:0])] * lanes
            empty[index] = part, features
            context = self.drafter.extend(context, [t for t, _ in empty], [f for _, f in empty])
        lane.prompt_tps = len(lane.tokens) / (time.perf_counter() - lane.started)
        lane.started = time.perf_counter()
        return np.asarray(logits)[0], context

    def _rows(self, lane: _Lane) -> int:
        """Of a lane's next block: none behind the last token that is wanted, or past the context's end."""
        if lane.finish is not None:
            return 1
        room = self.model.config.attention.maximum_context_tokens - lane.state.length
        return min(self.block, self.max_tokens - lane.count, room)

    def _draft(self, context: Any, lanes: list[_Lane], rows: list[int]) -> list[Proposal]:
        keys = []
        for lane in lanes:  # whether or not it is drafted for, so that this does not depend on the others
            lane.key, use = random.split(lane.key)
            keys.append(use)
        if max(rows) == 1:
            return [NO_PROPOSAL] * len(lanes)
        return self.drafter.propose(context, [lane.anchor for lane in lanes], rows, self.sampling.temp, keys)

    def _check(self, draft: Proposal, count: int, lane: int) -> None:
        """That a proposal is one: `_accept` follows the target's distribution only if a draft was drawn as it says."""
        tokens, vocabulary = np.asarray(draft.tokens), self.model.config.vocabulary
        if tokens.shape != (count,) or (count and not 0 <= tokens.min() <= tokens.max() < vocabulary):
            raise InvalidArgument(
                f"drafter: expected {count} tokens of 0…{vocabulary - 1} for lane {lane}, got {draft.tokens}"
            )
        if self.sampling.temp == 0 or count == 0:
            return
        candidates, probabilities = np.asarray(draft.candidates), np.asarray(draft.probabilities, np.float64)
        if candidates.shape != probabilities.shape or not 0 <= candidates.min() <= candidates.max() < vocabulary:
            raise InvalidArgument(
                f"drafter: expected candidates of 0…{vocabulary - 1} for lane {lane}, each with its probability, got "
                f"{candidates} with {probabilities}"
            )
        drawn = np.where(candidates == tokens[:, None], probabilities, 0).sum(axis=1)
        if (
            not (probabilities >= 0).all()
            or not (drawn > 0).all()
            or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3
        ):
            raise InvalidArgument(
                f"drafter: expected probabilities of lane {lane} that sum to 1, the drawn tokens' among them, got sums "
                f"{probabilities.sum(axis=1)} and {drawn} of the tokens"
            )

    def _verify(
        self, states: list[ModelState], blocks: list[list[int]]
    ) -> tuple[list[ModelState], list[Any], list[Any]]:
        taps: dict[int, Any] = dict.fromkeys(self.drafter.taps)
        new, logits = self.model.forward(states, blocks, chunk=MAX_ROWS, taps=taps)
        by_lane = [[taps[layer][at] for layer in self.drafter.taps] for at in range(len(blocks))]
        features = [_side_by_side(parts, len(block)) for parts, block in zip(by_lane, blocks, strict=True)]
        return new, [np.asarray(rows) for rows in logits], features

    def _accept(self, lane: _Lane, draft: Proposal, scores: np.ndarray[Any, Any]) -> tuple[int, int]:
        """How many drafts stand, and the token behind them (Leviathan et al. 2023)."""
        if self.sampling.temp == 0:
            best = scores.argmax(axis=1)
            check_finite(scores.max(axis=1))
            accepted = next((i for i, d in enumerate(draft.tokens) if d != best[i]), len(draft.tokens))
            return accepted, int(best[accepted])
        lane.key, accept_key, draw_key = random.split(lane.key, 3)
        uniforms = random.uniform(accept_key, (len(scores),))
        for i, token in enumerate(draft.tokens):
            p = self.sampling.probabilities(scores[i])
            # A candidate may be listed twice: its probabilities add up, here as in `_check`.
            q = np.bincount(draft.candidates[i], draft.probabilities[i], len(p))
            if uniforms[i] * q[token] >= p[token]:
                rest = np.maximum(p - q, 0)
                return i, random.categorical(draw_key, rest if rest.sum() > 0 else p)
        return len(draft.tokens), random.categorical(draw_key, self.sampling.probabilities(scores[-1]))

    def _emit(
        self, lane: _Lane, index: int, token: int, row: Any, state: ModelState, drafted: int, accepted: int, draft: bool
    ) -> SpeculativeResponse:
        lane.count += 1
        lane.anchor = token
        is_last = lane.count == self.max_tokens or state.length == self.model.config.attention.maximum_context_tokens
        lane.finish = "stop" if token in self.ends else "length" if is_last else None
        text = "" if lane.finish == "stop" else lane.stream.push(token)
        return SpeculativeResponse(
            text=text + lane.stream.flush() if lane.finish else text,
            token=token,
            logprobs=log_softmax(row),
            from_draft=draft,
            prompt_tokens=len(lane.tokens),
            prompt_tps=lane.prompt_tps,
            generation_tokens=lane.count,
            generation_tps=lane.count / max(time.perf_counter() - lane.started, 1e-9),
            peak_memory=peak_memory(),
            finish_reason=lane.finish,
            state=state,
            lane=index,
            drafted=drafted,
            accepted=accepted,
            histogram=dict(lane.histogram),
        )


def _side_by_side(parts: list[Any], tokens: int) -> np.ndarray[Any, Any]:
    if not parts:
        return np.zeros((tokens, 0), np.float32)
    return np.concatenate([np.asarray(part) for part in parts], axis=1)
