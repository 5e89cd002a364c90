"""A loaded model: parameters, configuration, tokenizer, and a forward pass over immutable states."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from pyferrum.array import Array, array
from pyferrum.checkpoint import Tokenizer
from pyferrum.device import Device
from pyferrum.errors import CheckpointError, InvalidArgument, UnsupportedError
from pyferrum.jit import PROGRAMS, Program, record, recording
from pyferrum.models import llama
from pyferrum.models.model_state import ModelState
from pyferrum.state import KVState, init_state

PREFILL_CHUNK = 256
"""Tokens of a sequence that go through the layers in one go. Results do not depend on it, bit for bit; Ctrl-C, memory
and the first progress report do."""


Tokens = Sequence[int] | np.ndarray[Any, Any]


class Model:
    """A language model. Made by `load`.

    `config` and `params` are plain immutable data; `pyferrum.models.llama` has the functions over them.
    """

    def __init__(
        self,
        config: llama.LlamaConfig,
        params: llama.LlamaParams,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None,
        *,
        path: Path,
        dtype: DTypeLike = np.float32,
        device: Device,
        memory: dict[str, int] | None = None,
    ) -> None:
        self.config = config
        self.params = params
        self.path = path
        self.device = device
        self.dtype = np.dtype(dtype)
        """Of the residual stream."""
        self._tokenizer = tokenizer
        self._tokenizer_lock = threading.Lock()
        self._memory = memory or {}
        self._like = device, config.attention, config.layers
        self._context = config.attention.maximum_context_tokens
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back. Made when it is first asked for: a vocabulary takes longer to read than the weights.

        Raises:
            CheckpointError: no tokenizer, or one that is damaged; `load` has found what the settings alone tell.
        """
        if self._tokenizer is None:
            raise CheckpointError(f"{self.path}: the checkpoint has no tokenizer")
        if not isinstance(self._tokenizer, Tokenizer):
            with self._tokenizer_lock:
                if not isinstance(self._tokenizer, Tokenizer):
                    self._tokenizer = self._tokenizer()
        return self._tokenizer

    def init_state(self) -> ModelState:
        """The state before the first token."""
        return ModelState._of_layers(
            [init_state(self.config.attention, device=self.device) for _ in range(self.config.layers)]
        )

    @overload
    def forward(
        self,
        state: ModelState,
        tokens: Tokens,
        *,
        last_only: bool = False,
        chunk: int = PREFILL_CHUNK,
        taps: dict[int, Any] | None = None,
    ) -> tuple[ModelState, Array]: ...
    @overload
    def forward(
        self,
        state: Sequence[ModelState],
        tokens: Sequence[Tokens],
        *,
        last_only: bool = False,
        chunk: int = PREFILL_CHUNK,
        taps: dict[int, Any] | None = None,
    ) -> tuple[list[ModelState], list[Array]]: ...
    def forward(
        self,
        state: Any,
        tokens: Any,
        *,
        last_only: bool = False,
        chunk: int = PREFILL_CHUNK,
        taps: dict[int, Any] | None = None,
    ) -> Any:
        """Extend a sequence and score what comes next.

        Args:
            state: a ModelState, or a list of them to run together.
            tokens: the new tokens, or a list of such. At least one each.
            last_only: logits of the last token only.
            chunk: tokens of a sequence per pass through the layers.
            taps: a dict whose keys are layers, counted from 0: the residual stream behind each becomes its value, an
                array [tokens, hidden] in the model's dtype (a list of these for a list of states). In one pass with
                the logits, so the tokens may be no more than `chunk`.

        Returns:
            (state, logits float32 [tokens, vocabulary] — [1, vocabulary] with `last_only`), or two lists of these.
            Row i scores the token after tokens[i]. Bits do not depend on chunks or on companions.

        Raises:
            InvalidArgument: no tokens, a token outside the vocabulary, more tokens than the model's context, or a state
                that is not this model's. Nothing has run.
            OutOfPages: the arena is full; no state has changed.
        """
        if type(tokens) is list and type(state) is ModelState and taps is None:
            done = self._decode(state, tokens, last_only, chunk)
            if done is not None:
                return done
        one = isinstance(state, ModelState)
        if not one and not isinstance(state, (list, tuple)):
            raise InvalidArgument(f"state: expected a ModelState or a list of them, got {type(state).__name__}")
        states = [state] if one else list(state)
        batch = [self._tokens(t) for t in ([tokens] if one else tokens)]
        if len(states) != len(batch) or not states:
            raise InvalidArgument(f"tokens: expected one list per state, got {len(batch)} for {len(states)}")
        for i, (before, new) in enumerate(zip(states, batch, strict=True)):
            self._check(before, len(new), "" if one else f"[{i}]")
        if chunk < 1:
            raise InvalidArgument(f"chunk: expected at least 1, got {chunk}")
        if taps is not None and not isinstance(taps, dict):
            raise InvalidArgument(
                f"taps: expected a dict whose keys are layers, as {{0: None}}, got {type(taps).__name__}"
            )
        for layer in taps or ():
            if not isinstance(layer, int) or not 0 <= layer < self.config.layers:
                raise InvalidArgument(f"taps: expected layers 0…{self.config.layers - 1}, got {layer!r}")
        if taps is not None and max(len(t) for t in batch) > chunk:
            raise InvalidArgument(f"taps: expected at most chunk={chunk} tokens, got {max(len(t) for t in batch)}")
        results, scores = self._in_chunks(states, batch, last_only, chunk, taps)
        if taps is not None:
            for layer, x in taps.items():
                taps[layer] = x if one else _cut(x, [len(t) for t in batch])
        return (results[0], scores[0]) if one else (results, scores)

    def _decode(
        self, state: ModelState, tokens: list[Any], last_only: bool, chunk: int
    ) -> tuple[ModelState, Array] | None:
        """`forward` of a sequence that goes on with as many tokens as before; None if it is not, or if they are wrong.

        Everything else beside the kernels is there to be forgotten while they run, so a step touches little.
        """
        key = (len(tokens),), (1 if last_only else len(tokens),), True, ()
        group, vocabulary = state._group, self.config.vocabulary
        if group is None or state._like is not self._like:
            return None
        length = cast(int, state._length) + len(tokens)
        with self._lock:
            program = self._programs.get(key)
            if program is None or len(tokens) > chunk or length > self._context or self.device._handle is None:
                return None
            self._programs.move_to_end(key)
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                return None
        try:
            buffer, made = program.step(tokens, group)
        except UnsupportedError:  # this thread is recording
            return None
        new: ModelState = object.__new__(ModelState)
        new._layers, new._group, new._like = None, made, self._like
        new._length = length
        shape, format, offset = program.arrays[0]
        return new, Array(self.device, buffer, shape, format, offset)

    def _in_chunks(
        self, states: list[ModelState], batch: list[Any], last_only: bool, chunk: int, taps: dict[int, Any] | None
    ) -> tuple[list[ModelState], list[Array]]:
        lengths = [len(t) for t in batch]
        wanted = [1 if last_only else n for n in lengths]
        if max(lengths) <= chunk:
            states, scores = self._pass(states, batch, wanted, True, taps)
            return states, _cut(scores, wanted)
        # Logits in the end: of all tokens they are many times what goes through the layers.
        current = list(states)
        parts: list[list[Array]] = [[] for _ in batch]
        for start in range(0, max(lengths), chunk):
            active = [i for i, n in enumerate(lengths) if start < n]
            rows = [batch[i][start : start + chunk] for i in active]
            ends = [start + chunk >= lengths[i] for i in active]
            cut = [int(end) if last_only else len(row) for end, row in zip(ends, rows, strict=True)]
            new, x = self._pass([current[i] for i in active], rows, cut, False, None)
            pieces = _cut(x, cut) if x is not None else [None] * len(cut)
            for i, state, n, piece in zip(active, new, cut, pieces, strict=True):
                current[i] = state
                if n:
                    parts[i].append(cast(Array, piece))
        flat = [part for sequence in parts for part in sequence]
        x = flat[0] if len(flat) == 1 else array(np.concatenate(flat), device=self.device)
        return current, _cut(llama.logits(self.params, self.config, x), wanted)

    def _pass(
        self,
        states: list[ModelState],
        batch: list[Any],
        wanted: list[int],
        logits: bool,
        taps: dict[int, Any] | None,
    ) -> tuple[list[ModelState], Any]:
        """Tokens through the layers: the last `wanted` rows of each sequence, of the stream or as logits.

        It is one native call, recorded the first time that rows are cut like this.
        """
        tokens = array(batch[0] if len(batch) == 1 else np.concatenate(batch), device=self.device)
        lengths, tapped, layers = tuple(map(len, batch)), tuple(taps or ()), self.config.layers

        def step(arrays: list[Any], flat: list[KVState]) -> tuple[list[Any], list[KVState]]:
            return self._step(arrays[0], flat, lengths, wanted, logits, tapped)

        if recording():  # of a function that calls this model
            made, new = step([tokens], [layer for state in states for layer in state.layers])
            results = [ModelState._of_layers(new[i : i + layers]) for i in range(0, len(new), layers)]
        else:
            key = lengths, tuple(wanted), logits, tapped
            with self._lock:
                program = self._programs.get(key)
            if program is None:
                flat = [layer for state in states for layer in state.layers]
                program = record(self.device, step, [tokens], flat, run=False)[0]
            with self._lock:
                self._programs[key] = program
                self._programs.move_to_end(key)
                while len(self._programs) > PROGRAMS:
                    self._programs.popitem(last=False)
            if len(states) == 1:
                given = states[0]._native_states()
            else:
                given = [layer.handle for state in states for layer in state.layers]
            made, groups, ends = program.run_groups([tokens], given, [layers] * len(states))
            results = [ModelState._of_group(g, n, self._like) for g, n in zip(groups, ends[::layers], strict=True)]
        if taps is not None:
            taps.update(zip(taps, made[len(made) - len(taps) :], strict=True))
        return results, made[0] if any(wanted) else None

    def _step(
        self,
        tokens: Any,
        states: list[KVState],
        lengths: Sequence[int],
        wanted: list[int],
        logits: bool,
        tapped: tuple[int, ...],
    ) -> tuple[list[Any], list[KVState]]:
        layers, taps = self.config.layers, dict[int, Any].fromkeys(tapped)
        grouped = [states[i : i + layers] for i in range(0, len(states), layers)]
        new, x = llama.forward(
            self.params, self.config, grouped, tokens, lengths, dtype=self.dtype, taps=taps, wanted=wanted
        )
        made = [] if x is None else [llama.logits(self.params, self.config, x) if logits else x]
        return [*made, *taps.values()], [layer for sequence in new for layer in sequence]

    def _check(self, state: Any, tokens: int, which: str) -> None:
        """That a state is this model's, and has room for so many tokens."""
        if not isinstance(state, ModelState):
            raise InvalidArgument(
                f"state{which}: expected a ModelState, as `init_state` makes one, got {type(state).__name__}"
            )
        device, config, count = self._like
        if state._like != self._like:
            if len(state.layers) != count:
                raise InvalidArgument(
                    f"state{which}: expected the {count} layers of this model, got {len(state.layers)}"
                )
            for layer in state.layers:
                if layer.device is not device:
                    raise InvalidArgument(f"state{which}: is of another device, {layer.device!r}, not {device!r}")
                if layer.config != config:
                    raise InvalidArgument(
                        f"state{which}: is of another model: {layer.config}, and this model's is {config}"
                    )
        if recording():  # lengths are not known yet
            return
        room = self._context - state.length
        if tokens > room:
            raise InvalidArgument(
                f"tokens{which}: expected at most {room}, what the model's context of {self._context} "
                f"leaves behind {state.length}, got {tokens}"
            )

    def _tokens(self, tokens: ArrayLike) -> np.ndarray[Any, Any]:
        host = np.asarray(tokens)
        if host.ndim != 1 or host.size == 0 or host.dtype.kind not in "iu":
            raise InvalidArgument(
                f"tokens: expected a list of at least one integer, got {host.dtype} {list(host.shape)}"
            )
        if host.min() < 0 or host.max() >= self.config.vocabulary:
            raise InvalidArgument(f"tokens: expected 0…{self.config.vocabulary - 1}, got {host.min()}…{host.max()}")
        return host.astype(np.int32)

    def memory(self) -> dict[str, int]:
        """Bytes of weights: read in place from the mapped file, copied into another format, prepared by the device."""
        return dict(self._memory)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Model({c.architecture}, layers={c.layers}, hidden={c.hidden_size}, vocabulary={c.vocabulary}, "
            f"{self.dtype} stream, {self.device!r})"
        )


def _cut(x: Array, lengths: Sequence[int]) -> list[Array]:
    if len(lengths) == 1:
        return [x]
    ends = list(itertools.accumulate(lengths))
    return [x[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
