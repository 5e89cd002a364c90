"""`jit`: record a pure function once, replay it as one native call.

A decode step of a small model is hundreds of calls of microseconds each; replayed, it is one. The recording is a run:
the calls that a function makes are taken down while they run as ever, with the function's arrays and states as what
will differ from run to run. docs/programs.md has the details.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from pyferrum import _native
from pyferrum.array import Array, DeviceArray, array
from pyferrum.config import AttentionConfig
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument
from pyferrum.state import KVState

PROGRAMS = 64
"""Recordings that a function keeps, the latest used; one for every combination of shapes it is called with."""


@dataclass(frozen=True)
class Program:
    """A recorded function of a flat list of arrays and one of states."""

    device: Device
    handle: Any
    arrays: tuple[tuple[tuple[int, ...], str, int], ...]
    """Of each output array: shape, format, offset in its buffer."""
    states: tuple[AttentionConfig, ...]
    """Of each output state."""

    def run(self, arrays: Sequence[DeviceArray], states: Sequence[KVState]) -> tuple[list[Array], list[KVState]]:
        """The outputs for other inputs of the same shapes, formats and configurations.

        Raises:
            InvalidArgument: an input that is not like the recorded one, an index out of range, a context too long.
            OutOfPages: the arena is full. Whatever is raised, nothing has changed.
        """
        buffers, handles, lengths = _native.program_run(
            self.handle,
            [a.tensor for a in arrays],
            [s.handle for s in states],
            len(self.arrays),
            len(self.states),
        )
        device = self.device
        return (
            [Array(device, b, *like) for b, like in zip(buffers, self.arrays, strict=True)],
            [KVState(device, c, h, n) for c, h, n in zip(self.states, handles, lengths, strict=True)],
        )


Flat = Callable[[list[DeviceArray], list[KVState]], tuple[Sequence[DeviceArray], Sequence[KVState]]]


def record(
    device: Device, function: Flat, arrays: Sequence[DeviceArray], states: Sequence[KVState]
) -> tuple[Program, list[Any], list[KVState]]:
    """Call `function(arrays, states)` and keep its calls as a program.

    Args:
        device: where all of it runs.
        function: pure; gives (arrays, states), each made by an operation in it.
        arrays: what it is called with.
        states: the same.

    Returns:
        (program, and what the function gave: arrays, states).

    Raises:
        UnsupportedError: the function reads the values of an array or the length of a state, or calls something that
            is not replayed.
    """
    seen: set[int] = set()
    own: list[DeviceArray] = []
    for given in arrays:  # each input needs a buffer of its own to be told from the others
        own.append(given if id(given.buffer) not in seen else array(np.asarray(given), device=device))
        seen.add(id(given.buffer))
    aliases = [KVState(device, s.config, _native.state_truncate(s.handle, s.length), None) for s in states]
    _native.program_begin(device.handle, [a.tensor for a in own], [s.handle for s in aliases])
    try:
        out_arrays, out_states = function(own, aliases)
        # Views share a buffer: the program gives it once for each.
        tensors = [a.tensor for a in out_arrays]
        handle = _native.program_end(tensors, [s.handle for s in out_states])
    except BaseException:
        _native.program_abandon()
        raise
    likes = tuple((a.shape, a.format, a._offset) for a in out_arrays)
    program = Program(device, handle, likes, tuple(s.config for s in out_states))
    lengths = [_native.state_describe(s.handle)["length"] for s in out_states]
    known = [KVState(device, s.config, s.handle, n) for s, n in zip(out_states, lengths, strict=True)]
    return program, list(out_arrays), known


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what `function` does, in one native call from its second run on.

    Arguments and results are Arrays, BlockArrays, KVStates and NumPy arrays (which become Arrays), in tuples, lists,
    dicts and dataclasses of any depth; anything else is static, must be hashable, and selects a recording, as shapes,
    formats and configurations do. The lengths of states do not: one recording serves a sequence as it grows. Arrays
    that the function takes from outside are captured as they are.

    Inside, the values of arrays that depend on the arguments and the lengths of states are not known: asking for them
    raises UnsupportedError, as do calls that are not replayed (DFlash 2 rings, KVState.append, truncate and keys).

    Args:
        function: pure.

    Returns:
        The function; results have the bits of the original's.
    """
    programs: OrderedDict[Any, tuple[Program, Any]] = OrderedDict()

    @functools.wraps(function)
    def jitted(*args: Any) -> Any:
        leaves: list[Any] = []
        key = _flatten(args, leaves)
        device = next((leaf.device for leaf in leaves), None) or default_device()
        arrays = [leaf for leaf in leaves if isinstance(leaf, DeviceArray)]
        states = [leaf for leaf in leaves if isinstance(leaf, KVState)]
        entry = programs.get(key)
        if entry is None:
            program, structure, new_arrays, new_states = _record(function, device, key, arrays, states)
            programs[key] = program, structure
            while len(programs) > PROGRAMS:
                programs.popitem(last=False)
        else:
            programs.move_to_end(key)
            program, structure = entry
            new_arrays, new_states = program.run(arrays, states)
        return _build(structure, iter(new_arrays), iter(new_states), arrays, states)

    return jitted


def _record(function: Callable[..., Any], device: Device, key: Any, arrays: list[Any], states: list[Any]) -> Any:
    structure: Any = None

    def flat(own: list[DeviceArray], aliases: list[KVState]) -> tuple[list[DeviceArray], list[KVState]]:
        nonlocal structure
        result = function(*_build(key, iter(own), iter(aliases), [], []))
        made: list[Any] = []
        inputs = {id(v): ("input", kind, i) for kind, vs in enumerate((own, aliases)) for i, v in enumerate(vs)}
        structure = _flatten(result, made, inputs)
        return [m for m in made if isinstance(m, DeviceArray)], [m for m in made if isinstance(m, KVState)]

    program, new_arrays, new_states = record(device, flat, arrays, states)
    return program, structure, new_arrays, new_states


def _flatten(value: Any, leaves: list[Any], inputs: dict[int, Any] | None = None) -> Any:
    """A hashable description of a nest, its arrays and states appended to `leaves` in order."""
    if inputs and id(value) in inputs:
        return inputs[id(value)]
    if isinstance(value, np.ndarray):
        value = array(value)
    if isinstance(value, DeviceArray):
        leaves.append(value)
        return "array", type(value), value.shape, value.format
    if isinstance(value, KVState):
        leaves.append(value)
        return "state", value.config
    if isinstance(value, (tuple, list)):
        return "sequence", type(value), tuple(_flatten(v, leaves, inputs) for v in value)
    if isinstance(value, dict):
        return "dict", tuple(value), tuple(_flatten(v, leaves, inputs) for v in value.values())
    if is_dataclass(value) and not isinstance(value, type) and not isinstance(value, AttentionConfig):
        names = tuple(f.name for f in fields(value))
        return "dataclass", type(value), names, tuple(_flatten(getattr(value, n), leaves, inputs) for n in names)
    try:
        hash(value)
    except TypeError:
        raise InvalidArgument(f"jit: expected arrays, states or hashable values, got {type(value).__name__}") from None
    return "static", value


def _build(node: Any, arrays: Any, states: Any, in_arrays: list[Any], in_states: list[Any]) -> Any:
    """The nest that `_flatten` described, with these leaves."""
    kind = node[0]
    if kind == "array":
        return next(arrays)
    if kind == "state":
        return next(states)
    if kind == "input":
        return (in_arrays, in_states)[node[1]][node[2]]
    if kind == "static":
        return node[1]
    children = [_build(child, arrays, states, in_arrays, in_states) for child in node[-1]]
    if kind == "dict":
        return dict(zip(node[1], children, strict=True))
    if kind == "dataclass":
        return node[1](**dict(zip(node[2], children, strict=True)))
    return node[1](*children) if hasattr(node[1], "_fields") else node[1](children)
