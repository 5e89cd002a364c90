"""What a call will dispatch, as a value: launches, grids, scratch, page tables, fingerprints. Planning runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from pyferrum import _native, _native_attention
from pyferrum.config import AttentionConfig
from pyferrum.device import Device, default_device
from pyferrum.errors import InvalidArgument
from pyferrum.formats import FORMATS, NUMBERS, hidden_format
from pyferrum.weights import AttentionWeights

FORMS = ("scalar", "participant_loop", "packed")
ROLES = ("input", "output", "weight", "scratch", "page_table", "rope", "partials")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SCRATCH_REGIONS = ("normalized", "query_raw", "key_raw", "value_raw", "query", "context", "projected")
_CONSTANTS = {
    _native.constant(f"FERRUM_CONSTANT_{name.upper()}"): name
    for name in (
        "norm_f32",
        "output_f32",
        "bias",
        "bias_f32",
        "output_gate",
        "rope_interleaved",
        "query_norm",
        "query_norm_f32",
        "key_norm",
        "key_norm_f32",
    )
}


class Numbers(Mapping[str, Any]):
    """Named numbers that do not change, so that what holds them can be hashed, copied and pickled."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class Binding:
    """A buffer of a launch: the kernel's slot, and where in which resource it points."""

    slot: int
    resource: str
    """A role, with an index where there are several: "scratch", "input 0", "weight q_proj"."""
    offset: int
    """Bytes."""


@dataclass(frozen=True)
class Launch:
    """One dispatch of one kernel."""

    kernel: str
    constants: tuple[str, ...]
    """Function constants that are true."""
    grid: tuple[int, int, int]
    """Threadgroups."""
    threads: tuple[int, int, int]
    """Threads of a threadgroup."""
    threadgroup_bytes: int
    barrier: bool
    """True: waits for every launch before it. False: may run beside them."""
    participant: int
    bindings: tuple[Binding, ...]
    params: Mapping[str, int | float]
    """The kernel's params struct."""


@dataclass(frozen=True)
class Plan:
    """The dispatches of one causal-attention call and what they need."""

    form: str
    """"scalar", "participant_loop" (8 launches a sequence) or "packed" (2 a sequence and 6 shared); one more for each
    sequence whose attention is split over a long context."""
    launches: tuple[Launch, ...]
    total_tokens: int
    scratch_bytes: int
    scratch_bytes_per_token: int
    scratch_regions: Mapping[str, int]
    """Byte offset of each region."""
    partials_bytes: int
    """Of attention that is split over a long context and combined by a second launch."""
    page_table_bytes: int
    pages: int
    """Pages of all states after the call, before sharing."""
    maximum_pages: int
    """Pages of one state at maximum_context_tokens."""
    state_bytes_per_token: int
    fingerprint: str
    """SHA-256, hex, of the call's topology: how many sequences, and where each one's new tokens start and end."""
    implementation: str
    """SHA-256, hex, of the sources the library was built from."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, numbers and text, for JSON."""

        def plain(value: Any) -> Any:
            if is_dataclass(value):
                return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
            if isinstance(value, Mapping):
                return dict(value)
            return [plain(entry) for entry in value] if isinstance(value, tuple) else value

        made: dict[str, Any] = plain(self)
        return made

    def __str__(self) -> str:
        rows = [
            f"{self.form} plan, {len(self.launches)} launches, {self.total_tokens} tokens",
            f"scratch {self.scratch_bytes} B ({self.scratch_bytes_per_token} B/token), page tables "
            f"{self.page_table_bytes} B, {self.pages} pages of states ({self.state_bytes_per_token} B/token)",
            f"topology {self.fingerprint[:16]}…  implementation {self.implementation[:16]}…",
            f"{'':4}{'kernel':<32}{'threadgroups':>16}{'threads':>12}{'tg bytes':>10}  constants",
        ]
        for launch in self.launches:
            sizes = ["x".join(str(n) for n in dims if n > 1) or "1" for dims in (launch.grid, launch.threads)]
            rows.append(
                f"{'|' if launch.barrier else ' ':>3} {launch.kernel:<32}{sizes[0]:>16}{sizes[1]:>12}"
                f"{launch.threadgroup_bytes:>10}  {', '.join(launch.constants)}"
            )
        return "\n".join(rows)


def plan_attention(
    config: AttentionConfig,
    lengths: Sequence[int] | int,
    *,
    starts: Sequence[int] | int = 0,
    packed: bool | None = None,
    dtype: DTypeLike = np.float32,
    weights: AttentionWeights | None = None,
    formats: str | Sequence[str] = "F16",
    device: Device | None = None,
) -> Plan:
    """The plan of a `causal_attention` call: a pure function of its arguments.

    Args:
        config: the layer.
        lengths: new tokens of each sequence; one number for one sequence.
        starts: tokens already in each state; one number for all.
        packed: whether x comes as `Ragged`; None: where there are several sequences.
        dtype: of x, float32 or float16.
        weights: take formats, norms and biases from these weights …
        formats: … or take the format of q_proj, k_proj, v_proj and o_proj (one name for all) and no q/k norms.
        device: None for the default device.

    Raises:
        InvalidArgument: what the call itself would refuse.
    """
    tokens = [lengths] if isinstance(lengths, (int, np.integer)) else list(lengths)
    begin = [starts] * len(tokens) if isinstance(starts, (int, np.integer)) else list(starts)
    if len(begin) != len(tokens) or any(n < 0 for n in (*begin, *tokens)):
        raise InvalidArgument(
            f"starts: expected {len(tokens)} numbers >= 0, one per length, got starts={begin}, lengths={tokens}"
        )
    device = device or default_device()
    request = {
        "form": FORMS.index("packed") if packed or (packed is None and len(tokens) > 1) else 0,
        "hidden_format": hidden_format(dtype, "dtype"),
        **(_of_weights(weights, device) if weights is not None else _of_formats(formats)),
    }
    summary, launches, resources = _native_attention.attention_plan(config.native(device), request, begin, tokens)
    named = [_resource_name(role, index) for role, index in resources]
    return Plan(
        form=FORMS[summary["form"]],
        launches=tuple(_launch(entry, named) for entry in launches),
        scratch_regions=Numbers(dict(zip(SCRATCH_REGIONS, summary["scratch_regions"], strict=True))),
        fingerprint=bytes(summary["fingerprint"]).hex(),
        implementation=_native.build_fingerprint(),
        **{
            name: summary[name]
            for name in (
                "total_tokens",
                "scratch_bytes",
                "scratch_bytes_per_token",
                "partials_bytes",
                "page_table_bytes",
                "pages",
                "maximum_pages",
                "state_bytes_per_token",
            )
        },
    )


def _of_formats(formats: str | Sequence[str]) -> dict[str, Any]:
    names = [formats] * 4 if isinstance(formats, str) else list(formats)
    if len(names) != 4 or any(name not in FORMATS for name in names):
        raise InvalidArgument(f"formats: expected one or four of {', '.join(FORMATS)}, got {formats!r}")
    return {"projection_formats": [NUMBERS[name] for name in names], "constants": 0, "biases": 0}


def _of_weights(weights: AttentionWeights, device: Device) -> dict[str, Any]:
    arrays = weights.tensors(device)
    bit = {name: value for value, name in _CONSTANTS.items()}
    constants, biases = 0, 0
    for field, constant in (("input_norm", "norm"), ("q_norm", "query_norm"), ("k_norm", "key_norm")):
        if field in arrays:
            constants |= bit.get(constant, 0)
            constants |= bit[f"{constant}_f32"] if arrays[field].format == "F32" else 0
    for index, field in enumerate(("q_bias", "k_bias", "v_bias", "o_bias")):
        if field in arrays:
            biases |= 1 << index | (1 << (index + 4) if arrays[field].format == "F32" else 0)
    formats = [NUMBERS[arrays[name].format] for name in PROJECTIONS]
    return {"projection_formats": formats, "constants": constants, "biases": biases}


def _resource_name(role: int, index: int) -> str:
    name = ROLES[role]
    if name == "weight":
        return f"weight {_native_attention.WEIGHT_FIELDS[index]}"
    return f"{name} {index}" if name in ("input", "output") else name


def _launch(entry: dict[str, Any], resources: list[str]) -> Launch:
    return Launch(
        kernel=entry["kernel"],
        constants=tuple(name for value, name in _CONSTANTS.items() if entry["constants"] & value),
        grid=tuple(entry["grid"]),
        threads=tuple(entry["threads"]),
        threadgroup_bytes=entry["threadgroup_bytes"],
        barrier=bool(entry["barrier"]),
        participant=entry["participant"],
        bindings=tuple(Binding(slot, resources[r], offset) for slot, r, offset in entry["bindings"]),
        params=Numbers(entry["params"]),
    )
