"""`jit`: record a pure function once, replay it as one native call.

A decode step of a small model is hundreds of calls of microseconds each; replayed, it is one. The recording is a run:
the calls that a function makes are taken down while they run as ever, with the function's arrays and states as what
will differ from run to run. docs/programs.md has the details.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from pyferrum import _native, _native_programs
from pyferrum.array import Array, DeviceArray, array
from pyferrum.config import AttentionConfig
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument, UnsupportedError
from pyferrum.formats import NAMES
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

    @functools.cached_property
    def step(self) -> Callable[[list[int], Any], tuple[Any, Any]]:
        """`_native_programs.stepper`, of a program from one array of indices to one array."""
        return _native_programs.stepper(self.handle, len(self.states))

    def run(self, arrays: Sequence[DeviceArray], states: Sequence[KVState]) -> tuple[list[Array], list[KVState]]:
        """The outputs for other inputs of the same shapes, formats and configurations.

        Raises:
            InvalidArgument: an input that is not like the recorded one, an index out of range, a context too long.
            OutOfPages: the arena is full.
            StateError: a closed array, state or device.
            Whatever is raised, no state has changed and no page is held.
        """
        new_arrays, groups, lengths = self.run_groups(arrays, [s.handle for s in states], [1] * len(self.states))
        return (
            new_arrays,
            [KVState(self.device, c, g, n) for c, g, n in zip(self.states, groups, lengths, strict=True)],
        )

    def run_groups(
        self, arrays: Sequence[DeviceArray], states: Any, sizes: Sequence[int]
    ) -> tuple[list[Array], list[Any], list[int]]:
        """As `run`, over groups of native states: see `_native_programs.program_run`."""
        device = self.device
        _ = device.handle  # a closed device runs nothing
        tensors = [a.tensor for a in arrays]
        buffers, groups, lengths = _native_programs.program_run(self.handle, tensors, states, len(self.arrays), sizes)
        return [Array(device, b, *like) for b, like in zip(buffers, self.arrays, strict=True)], groups, lengths


_thread = threading.local()


def recording() -> bool:
    """Whether this thread is inside `record`: calls are taken down already, and must not be recorded again."""
    return getattr(_thread, "recording", False)


Flat = Callable[[list[DeviceArray], list[KVState]], tuple[Sequence[DeviceArray], Sequence[KVState]]]


def record(
    device: Device, function: Flat, arrays: Sequence[DeviceArray], states: Sequence[KVState], run: bool = True
) -> tuple[Program, list[Any], list[KVState]]:
    """Call `function(arrays, states)` and keep its calls as a program.

    Args:
        device: where all of it runs.
        function: pure; gives (arrays, states), each made by an operation in it.
        arrays: what it is called with.
        states: the same.
        run: whether calls run as they are taken down. If not, what `function` gave holds no values: let go of it.

    Returns:
        (program, and what the function gave: arrays, states).

    Raises:
        UnsupportedError: the function reads the values of an array or the length of a state, calls something that is
            not replayed, or gives what it did not make; or this thread is recording already.
    """
    if recording():
        raise UnsupportedError("jit: expected one recording at a time in a thread")
    # What the function is given is known by its buffer or handle, so each input gets one of its own, over the same
    # bytes. Whatever else the function knows is captured, even if it shares memory with an input.
    own = [type(a)(device, _native.buffer_wrap(device.handle, a._bytes()), a.shape, a.format) for a in arrays]
    aliases = [KVState(device, s.config, _native.state_truncate(s.handle, s.length), None) for s in states]
    _native_programs.program_abandon()  # one that a second interrupt left behind
    try:
        _thread.recording = True
        _native_programs.program_begin(device.handle, [a.tensor for a in own], [s.handle for s in aliases], run)
        out_arrays, out_states = function(own, aliases)
        handle = _native_programs.program_end([a.tensor for a in out_arrays], [s.handle for s in out_states])
    finally:
        _thread.recording = False
        _native_programs.program_abandon()
    likes = tuple((a.shape, a.format, a._offset) for a in out_arrays)
    program = Program(device, handle, likes, tuple(s.config for s in out_states))
    lengths = [_native.state_describe(s.handle)["length"] if run else None for s in out_states]
    known = [KVState(device, s.config, s.handle, n) for s, n in zip(out_states, lengths, strict=True)]
    return program, list(out_arrays), known


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what `function` does, in one native call from its second run on.

    Arguments and results are Arrays, BlockArrays, KVStates and NumPy arrays (which become Arrays), in tuples, lists,
    dicts, dataclasses and classes with JAX's tree_flatten and tree_unflatten, of any depth. Anything else is static,
    must be hashable, and selects a recording, as shapes, formats, configurations and the device do. The lengths of
    states do not: one recording serves a sequence as it grows. Arrays and states that the function takes from outside
    are captured as they are.

    Inside, the values of arrays that calls make and the lengths of states are not known: asking for them raises
    UnsupportedError, as do calls that are not replayed (DFlash 2 rings, KVState.append, truncate and keys) and results
    that are neither made by a call nor an argument. Called while another function is recorded, it becomes part of that
    recording.

    Args:
        function: pure.

    Returns:
        The function; results have the bits of the original's.
    """
    programs: OrderedDict[Any, tuple[Program, Any]] = OrderedDict()
    lock = threading.Lock()

    @functools.wraps(function)
    def jitted(*args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        nest = _flatten((args, kwargs), leaves)
        device = next((leaf.device for leaf in leaves if not isinstance(leaf, np.ndarray)), None) or default_device()
        arrays, states = [], []
        for leaf in leaves:
            if isinstance(leaf, KVState):
                states.append(leaf)
            else:
                arrays.append(array(leaf, device=device) if isinstance(leaf, np.ndarray) else leaf)
                leaf = arrays[-1]
            if leaf.device is not device:
                raise InvalidArgument("jit: expected arrays and states of one device")
        if recording():
            args, kwargs = _build(nest, iter(arrays), iter(states))
            return function(*args, **kwargs)
        key = device, nest
        with lock:
            entry = programs.get(key)
            if entry is not None:
                programs.move_to_end(key)
        if entry is None:
            program, structure, new_arrays, new_states = _record(function, device, nest, arrays, states)
            with lock:
                programs[key] = program, structure
                while len(programs) > PROGRAMS:
                    programs.popitem(last=False)
        else:
            program, structure = entry
            new_arrays, new_states = program.run(arrays, states)
        return _build(structure, iter(new_arrays), iter(new_states), (arrays, states))

    return jitted


def _record(function: Callable[..., Any], device: Device, nest: Any, arrays: list[Any], states: list[Any]) -> Any:
    structure: Any = None

    def flat(own: list[DeviceArray], aliases: list[KVState]) -> tuple[list[DeviceArray], list[KVState]]:
        nonlocal structure
        args, kwargs = _build(nest, iter(own), iter(aliases))
        made: list[Any] = []
        inputs = {id(v): ("input", 0, i) for i, v in enumerate(own)}
        inputs |= {id(v): ("input", 1, i) for i, v in enumerate(aliases)}
        structure = _flatten(function(*args, **kwargs), made, inputs)
        made = [array(m, device=device) if isinstance(m, np.ndarray) else m for m in made]
        return [m for m in made if isinstance(m, DeviceArray)], [m for m in made if isinstance(m, KVState)]

    program, new_arrays, new_states = record(device, flat, arrays, states)
    return program, structure, new_arrays, new_states


def _flatten(value: Any, leaves: list[Any], inputs: dict[int, Any] | None = None) -> Any:
    """A hashable description of a nest, its arrays and states appended to `leaves` in order."""
    if inputs and id(value) in inputs:
        return inputs[id(value)]
    if isinstance(value, DeviceArray):
        leaves.append(value)
        return "array", type(value), value.shape, value.format
    if isinstance(value, np.ndarray):
        leaves.append(value)
        return "array", Array, value.shape, NAMES.get(value.dtype)
    if isinstance(value, KVState):
        leaves.append(value)
        return "state", value.config
    if isinstance(value, (tuple, list)):
        return "sequence", type(value), tuple([_flatten(v, leaves, inputs) for v in value])
    if isinstance(value, dict):
        return (
            "dict",
            tuple(value),
            tuple(map(type, value)),
            tuple([_flatten(v, leaves, inputs) for v in value.values()]),
        )
    if hasattr(value, "tree_flatten"):  # as in jax.tree_util.register_pytree_node_class
        children, auxiliary = value.tree_flatten()
        return "node", type(value), auxiliary, tuple([_flatten(v, leaves, inputs) for v in children])
    if is_dataclass(value) and not isinstance(value, type) and not isinstance(value, AttentionConfig):
        names = tuple((f.name, f.init) for f in fields(value))
        return "dataclass", type(value), names, tuple(_flatten(getattr(value, n), leaves, inputs) for n, _ in names)
    if isinstance(value, np.floating):
        return "static", type(value), value, value.tobytes()
    if type(value) is float:
        return "float", value.hex()  # -0.0 is not 0.0 here, and NaN is NaN
    try:
        hash(value)
    except TypeError:
        raise InvalidArgument(f"jit: expected arrays, states or hashable values, got {type(value).__name__}") from None
    return "static", type(value), value  # the type tells 1 from True


def _build(node: Any, arrays: Any, states: Any, inputs: Any = ()) -> Any:
    """The nest that `_flatten` described, with these leaves."""
    kind = node[0]
    if kind == "array":
        return next(arrays)
    if kind == "state":
        return next(states)
    if kind == "input":
        return inputs[node[1]][node[2]]
    if kind == "static":
        return node[2]
    if kind == "float":
        return float.fromhex(node[1])
    children = [_build(child, arrays, states, inputs) for child in node[-1]]
    if kind == "dict":
        return dict(zip(node[1], children, strict=True))
    if kind == "node":
        return node[1].tree_unflatten(node[2], tuple(children))
    if kind == "dataclass":
        pairs = list(zip(node[2], children, strict=True))
        result = node[1](**{name: child for (name, init), child in pairs if init})
        for (name, init), child in pairs:
            if not init:
                object.__setattr__(result, name, child)  # the class may be frozen
        return result
    return node[1](*children) if hasattr(node[1], "_fields") else node[1](children)
