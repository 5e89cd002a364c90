"""Generation: a loop over a pure forward pass. Every step carries the state it left, ready to be continued twice."""

from __future__ import annotations

import operator
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum import _random as random
from pyferrum._check import whole_number
from pyferrum.errors import InvalidArgument
from pyferrum.models.model import Model
from pyferrum.models.model_state import ModelState
from pyferrum.sampling import Sampling, log_softmax

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class GenerationResponse:
    """One step. Field names as in mlx-lm's GenerationResponse, with the state added."""

    text: str
    """Text that became complete with this token; characters of several tokens come with the last of them."""
    token: int
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    """Log-probabilities the token was chosen from (before temperature), float32 [vocabulary]."""
    from_draft: bool
    """Whether a draft model proposed the token."""
    prompt_tokens: int
    prompt_tps: float
    """Prompt tokens per second."""
    generation_tokens: int
    """Tokens so far, this one included."""
    generation_tps: float
    """Generated tokens per second."""
    peak_memory: float
    """Of the process, in GB."""
    finish_reason: str | None
    """None, "stop" (an end-of-sequence token, which is not in `text`) or "length": `max_tokens`, or as many as the
    model's context holds."""
    state: ModelState
    """Everything up to, but not including, this token: what goes on behind it begins with `token`."""


def prompt_text(model: Model, prompt: Prompt) -> str | None:
    """A prompt's text, messages in the chat template; None if it is of token ids."""
    if isinstance(prompt, str):
        return _encodable(prompt)
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not hasattr(prompt, "__iter__"):
        hint = {bytes: ": decode them", dict: ": messages go in a list"}.get(type(prompt), "")
        raise InvalidArgument(
            f"prompt: expected text, a list of chat messages or token ids, got {type(prompt).__name__}{hint}"
        )
    messages = [entry for entry in prompt if isinstance(entry, Mapping)]
    ids = len(prompt) - len(messages)
    if messages and ids:
        raise InvalidArgument(
            f"prompt: expected chat messages or token ids, got {len(messages)} messages and {ids} ids"
        )
    return _encodable(model.tokenizer.apply_chat_template(messages)) if messages else None


def _encodable(text: str) -> str:
    """The text, unless half a surrogate pair is in it, as where bytes of a command line are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"prompt: expected text that can be written in UTF-8: {error}") from None
    return text


def token_ids(tokens: Any, name: str) -> list[int]:
    """Integers, whatever their type; nothing else passes for one."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidArgument(f"{name}: expected token ids, got {type(tokens).__name__}")
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise InvalidArgument(f"{name}: expected token ids, all of them integers, got {tokens!r:.80}") from None


def prompt_tokens(model: Model, prompt: Prompt, *, continued: bool = False) -> list[int]:
    """Token ids of a prompt; of a text, behind BOS if the tokenizer says so and nothing came before.

    A text goes on where that ended; chat messages begin anew.
    """
    text = prompt_text(model, prompt)
    if text is None:
        return token_ids(prompt, "prompt")
    goes_on = continued and isinstance(prompt, str)
    return model.tokenizer.encode(text, add_bos=False if continued else None, continued=goes_on)


def continues(state: ModelState | None) -> bool:
    """Whether a state has something before what is to come; refuses what is no state."""
    if state is not None and not isinstance(state, ModelState):
        expected = "a ModelState, as `model.init_state` and every step give, or None"
        raise InvalidArgument(f"state: expected {expected}, got {type(state).__name__}")
    return state is not None and state.length > 0


def generate(
    model: Model,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    key: random.Key | int = 0,
    state: ModelState | None = None,
    ignore_eos: bool = False,
) -> Iterator[GenerationResponse]:
    """Continue a prompt, token by token.

    Args:
        model: the model.
        prompt: text, chat messages ({"role", "content"}), or token ids; at least one token.
        max_tokens: how many to generate at most.
        temp: temperature; 0 takes the most probable token.
        top_p: nucleus; 1 keeps all.
        top_k: most probable tokens kept; 0 keeps all.
        min_p: least probability kept, relative to the best.
        key: of the draws (`pyferrum.random.key`), or a seed. The same key gives the same text.
        state: what came before the prompt; None for nothing. It stays as it is. A text goes on in it, without the space
            that SentencePiece begins texts with: behind a special token, give `tokenizer.encode(text, add_bos=False)`.
            A step's own state does not hold the step's token yet: `generate(model, [step.token, *more],
            state=step.state)` goes on behind it.
        ignore_eos: go on after an end-of-sequence token.

    Yields:
        A GenerationResponse per token; the last one has a `finish_reason`.

    Raises:
        InvalidArgument: an option out of its range, a prompt that is empty or longer than the model's context, or a
            model whose logits are not finite.
    """
    sampling = Sampling(temp, top_k, top_p, min_p)
    whole_number(max_tokens, "max_tokens", 1)
    tokens = prompt_tokens(model, prompt, continued=continues(state))
    if not tokens:
        raise InvalidArgument("prompt: expected at least one token, got none")
    return _steps(model, tokens, max_tokens, sampling, key, state, ignore_eos)


def _steps(
    model: Model,
    tokens: list[int],
    max_tokens: int,
    sampling: Sampling,
    key: random.Key | int,
    state: ModelState | None,
    ignore_eos: bool,
) -> Iterator[GenerationResponse]:
    key = random.as_key(key)
    ends = frozenset() if ignore_eos else model.tokenizer.eos_token_ids
    start = time.perf_counter()
    current, logits = model.forward(state or model.init_state(), tokens, last_only=True)
    row = np.asarray(logits)[0]
    prompt_tps = len(tokens) / (time.perf_counter() - start)
    stream = model.tokenizer.stream(after=tokens)
    start = time.perf_counter()
    for count in range(1, max_tokens + 1):
        key, use = random.split(key)
        token = random.categorical(use, sampling.probabilities(row))
        is_last = count == max_tokens or current.length == model.config.attention.maximum_context_tokens
        finish = "stop" if token in ends else "length" if is_last else None
        text = "" if finish == "stop" else stream.push(token)
        yield GenerationResponse(
            text=text + stream.flush() if finish else text,
            token=token,
            logprobs=log_softmax(row),
            from_draft=False,
            prompt_tokens=len(tokens),
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / max(time.perf_counter() - start, 1e-9),
            peak_memory=peak_memory(),
            finish_reason=finish,
            state=current,
        )
        if finish:
            return
        current, logits = model.forward(current, [token], last_only=True)
        row = np.asarray(logits)[0]


def peak_memory() -> float:
    """Largest resident size of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9
