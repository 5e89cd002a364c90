"""The native functions of causal attention and its plans; a part of `_native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyferrum._cdef import ffi
from pyferrum._native import (
    _EMPTY,
    _STATE_OUTS,
    _STATES,
    _U64S,
    GroupMember,
    Handle,
    _check,
    _empties,
    _fields,
    _new,
    _states,
    _tensors,
    lib,
)

_LOOP = lib.FERRUM_FORM_PARTICIPANT_LOOP
_BUFFER_OUTS = ffi.typeof("ferrum_buffer **[]")


def attention_new(device: Handle, config: dict[str, Any], frequencies: np.ndarray[Any, Any]) -> Handle:
    """A validated attention operation; `config` holds the fields of ferrum_attention_config."""
    native = ffi.new("ferrum_attention_config *", config)
    table = ffi.from_buffer("double[]", frequencies)
    return _new(
        "attention",
        lambda out: lib.ferrum_attention_new(device[0], native, table, out),
    )


WEIGHT_FIELDS: tuple[str, ...] = tuple(name for name, _ in ffi.typeof("ferrum_attention_weights").fields)


def attention_weights(tensors: dict[str, Any]) -> Any:
    """A ferrum_attention_weights from tensors by field; keep their buffers alive beside it."""
    return ffi.new("ferrum_attention_weights *", {name: tensor[0] for name, tensor in tensors.items()})


def causal_attention(
    attention: Handle,
    weights: Any,
    packed: bool,
    states: Sequence[Handle],
    tokens: Sequence[int],
    xs: Sequence[Any],
) -> tuple[list[Handle], list[Handle]]:
    """New states and output buffers of one call; `weights` from `attention_weights`."""
    new_states = _empties("state", len(states))
    ys = _empties("buffer", len(xs))
    _check(
        lib.ferrum_causal_attention(
            attention[0],
            weights,
            lib.FERRUM_FORM_PACKED if packed else lib.FERRUM_FORM_PARTICIPANT_LOOP,
            len(states),
            _states(states),
            ffi.new(_U64S, tokens),
            _tensors(xs),
            ffi.new(_STATE_OUTS, new_states),
            ffi.new(_BUFFER_OUTS, ys),
        )
    )
    return new_states, ys


def causal_attention_alone(attention: Handle, weights: Any, state: Handle, tokens: int, x: Any) -> tuple[Handle, Any]:
    """The new state and the output buffer of a call with one sequence."""
    (state_kind, release_state), (buffer_kind, release_buffer) = _EMPTY["state"], _EMPTY["buffer"]
    new, gc = ffi.new, ffi.gc
    new_state, y = gc(new(state_kind), release_state), gc(new(buffer_kind), release_buffer)
    states = state if type(state) is not GroupMember else new(_STATES, (state[0],))
    outs = new(_STATE_OUTS, (new_state,)), new(_BUFFER_OUTS, (y,))
    status = lib.ferrum_causal_attention(attention[0], weights, _LOOP, 1, states, new(_U64S, (tokens,)), x, *outs)
    if status:
        _check(status)
    return new_state, y


def attention_plan(
    attention: Handle, request: dict[str, Any], starts: Sequence[int], tokens: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[tuple[int, int]]]:
    """Summary, launches (params as a dict of the kernel's struct) and resources (role, index) of a plan."""
    kept = ffi.new("uint64_t[]", list(starts)), ffi.new("uint64_t[]", list(tokens))
    native = ffi.new(
        "ferrum_plan_request *",
        {**request, "participants": len(starts), "starts": kept[0], "tokens": kept[1]},
    )
    plan = _new("plan", lambda out: lib.ferrum_attention_plan(attention[0], native, out))
    summary, launch = ffi.new("ferrum_plan_summary *"), ffi.new("ferrum_launch *")
    _check(lib.ferrum_plan_describe(plan[0], summary))
    launches, resources = [], []
    for index in range(summary.launches):
        _check(lib.ferrum_plan_launch(plan[0], index, launch))
        entry = _fields(launch[0])
        entry["kernel"] = ffi.string(lib.ferrum_kernel_name(launch.kernel)).decode()
        entry["bindings"] = [(b.slot, b.resource, b.offset) for b in launch.bindings[0 : launch.binding_count]]
        struct = ffi.cast(f"{_params_struct(entry['kernel'])} *", launch.params)
        entry["params"] = _fields(struct[0])
        launches.append(entry)
    resource = ffi.new("ferrum_resource *")
    for index in range(summary.resources):
        _check(lib.ferrum_plan_resource(plan[0], index, resource))
        resources.append((resource.role, resource.index))
    return _fields(summary[0]), launches, resources


def _params_struct(kernel: str) -> str:
    family = kernel.rsplit("_", 1)[0].removesuffix("_prepare")
    return next(
        struct for struct in ("causal_attention", "rms_norm", "residual_add", "linear") if family.startswith(struct)
    ).join(("ferrum_", "_params"))
