"""pyferrum as a model of EleutherAI's lm-evaluation-harness (extra `eval`).

    python -m pyferrum.lm_eval run --model pyferrum --model_args pretrained=model.gguf --tasks arc_easy

is the harness's own command with this model in its list; `pyferrum eval --tasks arc_easy` is shorter. In a program,
import this module and give `simple_evaluate` a `PyferrumLM`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pyferrum import _random as random
from pyferrum.device import Device
from pyferrum.errors import InvalidArgument, UnsupportedError
from pyferrum.evaluate.provenance import device_facts, model_facts, versions
from pyferrum.evaluate.work import Prefixes, Unit, run_units
from pyferrum.models.checkpoints import load
from pyferrum.models.model import Model
from pyferrum.sampling import Sampling
from pyferrum.score import encode_pair

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"pyferrum.lm_eval needs lm-evaluation-harness: pip install 'pyferrum[eval]' ({error})"
    ) from error

logger = logging.getLogger("pyferrum")
END_OF_MESSAGE = "⟦end of message⟧"
"""Marks in a rendered conversation where the text of its last message ends."""
GENERATION_BATCH = 16
"""Requests that generate together where the batch size is left to us."""


@register_model("pyferrum")
class PyferrumLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate`.

    Requests with the same context are scored from one state, and contexts that begin alike, as few-shot prompts do, are
    run once as far as they do. There is exactly one BOS, whether the tokenizer, the template or the text brings it. No
    score depends on the batch size, on the order or on the company of requests, to the last bit.

    Args:
        pretrained: a Model, or the path of one: a .gguf file or a safetensors folder.
        dtype: of the residual stream, for a path: float32 or float16.
        batch_size: continuations of one context, or requests that generate, run together; "auto" leaves it to us.
        max_batch_size: the harness's bound on "auto"; has no meaning here.
        max_length: tokens of context at most; the model's own limit if None. Longer requests lose their beginning.
        max_gen_toks: tokens to generate where the task does not say.
        device: "cpu" or "metal", for a path. None, or "cuda:0", the harness's own default: the default device.
        seed: of the draws of tasks that sample.
        executor: where log-likelihoods are computed: see `pyferrum.evaluate.evaluate`. None: here.
    """

    def __init__(
        self,
        pretrained: Model | str | PathLike[str],
        *,
        dtype: str = "float32",
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        seed: int = 0,
        executor: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, Model):
            pretrained = load(pretrained, dtype=dtype, device=None if device in (None, "cuda:0") else Device(device))
        self.model = pretrained
        self.tokenizer = pretrained.tokenizer
        self.batch_size = _batch_size(batch_size)
        most = pretrained.config.attention.maximum_context_tokens
        if max_length is not None and not 1 <= max_length <= most:
            raise InvalidArgument(f"max_length: expected 1…{most}, the model's context, got {max_length}")
        self.max_length = max_length or most
        self.max_gen_toks = max_gen_toks
        self._device = device_facts(pretrained)["name"]
        self._key = random.key(seed)
        self._executor = executor

    # ---- Tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if self.tokenizer.eos_token_id is None:
            raise UnsupportedError(f"{self.model.path}: the tokenizer has no token that ends a text")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: BOS, and only without one the token that ends a text."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Names the harness's cache of requests."""
        facts = model_facts(self.model)
        return f"{facts['name']}-{facts['sha256'][:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; BOS by the tokenizer's setting unless `add_special_tokens` is False, and never twice."""
        ids: list[int] = self.tokenizer.encode(string, add_bos=False if add_special_tokens is False else None)
        return ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        head, tail = encode_pair(self.tokenizer, context, continuation)
        return head or [self.prefix_token_id], tail

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Without a generation prompt it ends with the last message, to be continued."""
        if add_generation_prompt:
            return self.tokenizer.apply_chat_template(chat_history)
        *before, last = chat_history
        marked = {**last, "content": last["content"].rstrip() + END_OF_MESSAGE}
        text = self.tokenizer.apply_chat_template([*before, marked], add_generation_prompt=False)
        return text[: text.rindex(END_OF_MESSAGE)]

    # ---- Log-likelihood

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each request (what names it in the cache, context, continuation)."""
        contexts: dict[tuple[int, ...], list[int]] = {}
        results: dict[int, tuple[float, bool]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if continuation:
                contexts.setdefault(self._cut(context, continuation), []).append(index)
            else:
                results[index] = (0.0, True)  # the product of nothing
        # Sorted, so that contexts that begin alike follow each other.
        groups = [(context, contexts[context]) for context in sorted(contexts)]
        units = [
            (number, Unit(context, tuple(tuple(requests[i][2]) for i in indices)))
            for number, (context, indices) in enumerate(groups)
        ]
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for number, scored in run_units(self.model, units, self._executor, self.batch_size):
                for index, nlls, greedy in zip(groups[number][1], scored.nlls, scored.greedy, strict=True):
                    results[index] = (-float(nlls.sum(dtype=np.float64)), greedy)
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
                    bar.update()
        return [results[index] for index in range(len(requests))]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """The context, without its beginning if the whole is too long. The last token of all is not fed."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise InvalidArgument(
                f"continuation: expected at most {self.max_length} tokens, max_length, got {len(continuation)}"
            )
        if len(context) > room:
            logger.warning("a context of %d tokens loses its first %d", len(context), len(context) - room)
        return tuple(context[-room:])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole documents, each by itself: the method rolling, in windows of `max_length` behind BOS."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            if tokens[:1] == [self.prefix_token_id]:
                del tokens[0]  # the text brings its own
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            before = len(windows)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(windows) - before)
        parts = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum((next(parts)[0] for _ in range(count)), 0.0) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop sequence, an end of text or the task's bound; stop sequences are cut off."""
        keys = self._draw_keys(requests)
        jobs = [_Job(self, index, keys[index], *request.args) for index, request in enumerate(requests)]
        order = sorted(range(len(jobs)), key=lambda i: jobs[i].tokens)
        size = self.batch_size or GENERATION_BATCH
        prefixes = Prefixes(self.model)
        with tqdm(total=len(jobs), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for start in range(0, len(order), size):
                batch = [jobs[i] for i in order[start : start + size]]
                for job in batch:
                    job.state, job.pending = prefixes.state(job.tokens[:-1]), job.tokens[-1]
                for job in self._run(batch):
                    self.cache_hook.add_partial("generate_until", requests[job.index].args, job.text)
                    bar.update()
        return [job.text for job in jobs]

    def _draw_keys(self, requests: Sequence[Any]) -> list[random.Key]:
        """Of what each request asks for, and of how many before it ask the same: nothing else changes what is drawn."""
        before = Counter[str]()
        keys = []
        for request in requests:
            asked = json.dumps(request.args, sort_keys=True, default=str)
            digest = hashlib.sha256(json.dumps([*self._key, before[asked], asked]).encode()).digest()
            keys.append(random.Key(int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")))
            before[asked] += 1
        return keys

    def _run(self, batch: list[_Job]) -> Iterator[_Job]:
        """Jobs as they end. Those of a batch take each step together."""
        while batch:
            states, logits = self.model.forward(
                [job.state for job in batch], [[job.pending] for job in batch], last_only=True
            )
            going = []
            for job, state, row in zip(batch, states, logits, strict=True):
                job.state = state
                if job.step(np.asarray(row)[0]):
                    going.append(job)
                else:
                    job.state = None
                    yield job
            batch = going

    def get_model_info(self) -> dict[str, Any]:
        """What the harness puts into its results: model, device and versions."""
        return {
            **{f"model_{name}": value for name, value in model_facts(self.model).items()},
            "model_dtype": str(self.model.dtype),
            "pyferrum_device": device_facts(self.model),
            "versions": versions(),
        }


class _Job:
    """One request to generate, as it goes."""

    def __init__(self, lm: PyferrumLM, index: int, key: random.Key, context: str, options: Mapping[str, Any]) -> None:
        options = dict(normalize_gen_kwargs(dict(options), lm.max_gen_toks))
        self.stops = [stop for stop in options.pop("until") if stop]
        self.left = int(options.pop("max_gen_toks"))
        sample, temperature = options.pop("do_sample"), float(options.pop("temperature", 0.0))
        kept = {name: options.pop(name) for name in ("top_k", "top_p", "min_p") if name in options}
        if options:
            raise UnsupportedError(f"generation_kwargs: {', '.join(options)} is not built")
        self.sampling = Sampling(temperature if sample else 0.0, **kept)
        if not 1 <= self.left < lm.max_length:
            raise InvalidArgument(f"max_gen_toks: expected 1…{lm.max_length - 1}, below max_length, got {self.left}")
        self.index = index
        self.tokens = (lm.tok_encode(context) or [lm.prefix_token_id])[-(lm.max_length - self.left) :]
        self.state: Any = None
        self.pending = -1
        self.text = ""
        self._ends = lm.tokenizer.eos_token_ids
        self._stream = lm.tokenizer.stream(skip_special=True)
        # A stop sequence may be a special token, or hold one, which is not in `text`.
        self._marked, self._marked_stream = "", lm.tokenizer.stream()
        self._key = key

    def step(self, row: np.ndarray[Any, Any]) -> bool:
        """Take a token from its logits; whether there is more to come."""
        self._key, use = random.split(self._key)
        self.pending = random.categorical(use, self.sampling.probabilities(row))
        self.left -= 1
        ended = self.pending in self._ends or self.left == 0
        if self.pending not in self._ends:
            self.text += self._stream.push(self.pending)
            self._marked += self._marked_stream.push(self.pending)
        ended = ended or any(stop in self._marked for stop in self.stops)
        if ended:
            self.text += self._stream.flush()
        found = [at for at in (self.text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return not ended and not found


def _batch_size(value: int | str | None) -> int | None:
    if value is None or str(value).startswith("auto"):
        return None
    try:
        size = int(value)
    except ValueError:
        size = 0
    if size < 1:
        raise InvalidArgument(f'batch_size: expected a number of at least 1 or "auto", got {value!r}')
    return size


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
