"""The native functions of programs, and of groups of states; a part of `_native`.

A group is an array `ferrum_state *[]` under one owner: as many owners would cost more than a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from pyferrum._cdef import ffi
from pyferrum._native import Handle, _check, _empties, _new, _states, _tensors, lib


def program_begin(device: Handle, inputs: Sequence[Any], states: Sequence[Handle], run: bool = True) -> None:
    """Take down this thread's calls on the device, with these tensors and states as inputs; `run` them too."""
    _check(lib.ferrum_program_begin(device[0], run, len(inputs), _tensors(inputs), len(states), _states(states)))


def program_end(outputs: Sequence[Any], states: Sequence[Handle]) -> Handle:
    """The program that makes these tensors and states."""
    return _new(
        "program",
        lambda out: lib.ferrum_program_end(len(outputs), _tensors(outputs), len(states), _states(states), out),
    )


def program_abandon() -> None:
    """End this thread's recording and keep nothing."""
    lib.ferrum_program_abandon()


_U64S, _INDICES = ffi.typeof("uint64_t[]"), ffi.typeof("int32_t[]")
_BUFFER, _BUFFER_OUTS = ffi.typeof("ferrum_buffer **"), ffi.typeof("ferrum_buffer **[]")
_STATE_OUTS = ffi.typeof("ferrum_state **[]")


@functools.cache
def _sizes(groups: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """`groups` as the library takes it, and the C type of each group: states, and a NULL behind them."""
    # The length in the type: cffi forgets another one.
    return ffi.new("uint32_t[]", groups), [ffi.typeof(f"ferrum_state *[{size + 1}]") for size in groups]


def program_run(
    program: Handle, inputs: Sequence[Any], states: Any, arrays: int, groups: Sequence[int]
) -> tuple[list[Handle], list[Any], list[int]]:
    """Buffers of the outputs, the new states in groups of these sizes, and their lengths.

    `states` is a group, or a list of handles.
    """
    sizes, kinds = _sizes(tuple(groups))
    buffers = _empties("buffer", arrays)
    made = [ffi.gc(ffi.new(kind), lib.ferrum_states_release) for kind in kinds]
    count = sum(groups)
    lengths = ffi.new(_U64S, count)
    _check(
        lib.ferrum_program_run(
            program[0],
            _tensors(inputs),
            ffi.NULL,
            _states(states) if isinstance(states, list) else states,
            ffi.new(_BUFFER_OUTS, buffers),
            len(made),
            sizes,
            ffi.new(_STATE_OUTS, made),
            lengths,
        )
    )
    return buffers, made, ffi.unpack(lengths, count) if count else []


def stepper(program: Handle, size: int) -> Callable[[list[int], Any], tuple[Handle, Any]]:
    """`program_run` of a program from int32 indices and one group of states to one array and a group of `size`.

    What a step calls is a closure's: between two steps kernels run for milliseconds, and every look-up in a dictionary
    then waits for memory.
    """
    sizes, (kind,) = _sizes((size,))
    run, new, gc, null = lib.ferrum_program_run, ffi.new, ffi.gc, ffi.NULL
    release_buffer, release_states = lib.ferrum_buffer_release, lib.ferrum_states_release
    indices_kind, buffer_kind, buffers_kind, groups_kind = _INDICES, _BUFFER, _BUFFER_OUTS, _STATE_OUTS

    def step(indices: list[int], states: Any) -> tuple[Handle, Any]:
        buffer, group = gc(new(buffer_kind), release_buffer), gc(new(kind), release_states)
        values, outs = new(indices_kind, indices), new(buffers_kind, (buffer,))
        status = run(program[0], null, values, states, outs, 1, sizes, new(groups_kind, (group,)), null)
        if status:
            _check(status)
        return buffer, group

    return step
