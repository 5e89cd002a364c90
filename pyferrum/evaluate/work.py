"""Scoring in many places: units of work, and the models that the processes doing them have loaded."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyferrum.device import Device
from pyferrum.errors import CheckpointError
from pyferrum.evaluate.provenance import device_facts, model_sha256
from pyferrum.models.checkpoints import load
from pyferrum.models.model import Model
from pyferrum.models.model_state import ModelState
from pyferrum.score import score_tokens


@dataclass(frozen=True)
class ModelSpec:
    """A model as another process can load it, and as that process can tell that it is the same."""

    path: str
    dtype: str
    sha256: str
    build: str

    @classmethod
    def of(cls, model: Model) -> ModelSpec:
        """Describe a model of this process, and let `score_unit` find it here."""
        build = str(model.device.info()["build"])
        spec = cls(str(model.path.resolve()), str(model.dtype), model_sha256(model.path), build)
        with _lock:
            _callers[os.getpid(), spec] = model
        return spec


@dataclass(frozen=True)
class Unit:
    """A context and what may follow it, as token ids."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scored:
    """The scores of a unit, and where they were made."""

    nlls: tuple[np.ndarray[Any, np.dtype[np.float32]], ...]
    greedy: tuple[bool, ...]
    device: Mapping[str, Any]


_lock = threading.Lock()
_callers: weakref.WeakValueDictionary[tuple[int, ModelSpec], Model] = weakref.WeakValueDictionary()
_loaded: dict[tuple[int, ModelSpec], Model] = {}
_IMPORTED_IN = os.getpid()


def score_unit(spec: ModelSpec, unit: Unit, batch_size: int | None = None) -> Scored:
    """Score a unit, here, with the model of `spec`: loaded once in each process that calls this.

    Raises:
        CheckpointError: what lies at the path here is another model, or this is another build of the library.
    """
    return score_with(_model(spec), unit, batch_size)


def score_with(model: Model, unit: Unit, batch_size: int | None = None) -> Scored:
    """Score a unit with a model of this process."""
    return _score(model, Prefixes(model), unit, batch_size)


class Prefixes:
    """States behind token sequences, each made from the one before as far as the two begin alike.

    Going back to where they part is `truncate`, which costs nothing; no bit depends on it.
    """

    _WORTH_IT = 16
    """Fewer tokens in common are run again, so that the state before can go first."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokens: tuple[int, ...] = ()
        self._state: ModelState | None = None

    def state(self, tokens: Sequence[int]) -> ModelState:
        """The state behind `tokens`, which may be none."""
        tokens = tuple(tokens)
        common = 0
        for ours, theirs in zip(self._tokens, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        before, self._state = self._state, None
        if before is None or common < self._WORTH_IT:
            before, common = self._model.init_state(), 0
        state = before.truncate(common)
        if common < len(tokens):
            state, _ = self._model.forward(state, tokens[common:], last_only=True)
        self._tokens, self._state = tokens, state
        return state


def _score(model: Model, prefixes: Prefixes, unit: Unit, batch_size: int | None) -> Scored:
    state = prefixes.state(unit.context[:-1])
    scores = score_tokens(model, unit.context[-1:], unit.continuations, state=state, batch_size=batch_size)
    return Scored(tuple(-s.token_logprobs for s in scores), tuple(s.is_greedy for s in scores), device_facts(model))


def _model(spec: ModelSpec) -> Model:
    key = os.getpid(), spec
    with _lock:
        model = _callers.get(key) or _loaded.get(key)
        if model is None:
            model = _load(spec)
            _loaded[key] = model
        return model


def _load(spec: ModelSpec) -> Model:
    # In a child made by fork(), the default device is its parent's and cannot be used.
    device = Device() if os.getpid() != _IMPORTED_IN else None
    model = load(spec.path, dtype=spec.dtype, device=device)
    for what, wanted, found in (
        ("the model", spec.sha256, model_sha256(Path(spec.path))),
        ("the library's build", spec.build, model.device.info()["build"]),
    ):
        if wanted != found:
            raise CheckpointError(f"{spec.path}: {what} is {found} in this worker, expected {wanted}")
    return model


def run_units(
    model: Model, units: Sequence[tuple[int, Unit]], executor: Executor | Any | None, batch_size: int | None = None
) -> Iterator[tuple[int, Scored]]:
    """Score numbered units, here or through an executor; results come as they are ready.

    Here, contexts that begin alike and follow each other share what they have in common. If a unit fails, or the caller
    stops, the units that have not begun are cancelled.
    """
    if executor is None:
        prefixes = Prefixes(model)
        for number, unit in units:
            yield number, _score(model, prefixes, unit, batch_size)
        return
    spec = ModelSpec.of(model)
    yield from run_in(executor, [(number, (score_unit, spec, unit, batch_size)) for number, unit in units])


def run_in(executor: Any, calls: Sequence[tuple[int, tuple[Callable[..., Any], Any, Any, Any]]]) -> Iterator[Any]:
    """(number, result) of calls given to an executor, as they are ready."""
    if hasattr(executor, "get_executor"):  # a dask.distributed Client
        executor = executor.get_executor(pure=False)
    futures: dict[Future[Any], int] = {}
    try:
        for number, call in calls:
            futures[executor.submit(*call)] = number
        for future in as_completed(list(futures)):
            yield futures.pop(future), future.result()
    finally:
        for future in futures:
            future.cancel()
