"""Immutable keys and values of a sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pyferrum import _native, rope
from pyferrum.array import Array, as_array
from pyferrum.config import AttentionConfig
from pyferrum.device import Device, default_device
from pyferrum.errors import CheckpointError, InvalidArgument, StateError, UnsupportedError


class KVState:
    """The keys and values of a sequence's first `length` tokens in one layer.

    Immutable: a call that extends a state gives a new one, and this one shows what it showed. States share pages;
    docs/states.md says when a page is copied (at most one per append, and none in a straight decode). Made by
    `init_state`.
    """

    __slots__ = ("__weakref__", "_handle", "_length", "config", "device")

    def __init__(self, device: Device, config: AttentionConfig, handle: Any, length: int | None) -> None:
        self.device = device
        self.config = config
        self._handle = handle
        self._length = length

    @property
    def length(self) -> int:
        """Tokens."""
        if self._length is None:
            raise UnsupportedError("length: not known while `jit` records a function, which runs for any length")
        return self._length

    @property
    def handle(self) -> Any:
        """The native state."""
        if self._handle is None:
            raise StateError("this state was closed")
        return self._handle

    @property
    def pages(self) -> int:
        """Pages of 64 KiB that this state shows; relatives may show them too."""
        if self._length is None:
            raise UnsupportedError("pages: not known while `jit` records a function, which runs for any length")
        return int(_native.state_describe(self.handle)["pages"])

    @property
    def page_ids(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Which pages of the device's arena those are, in order: uint64 [pages].

        Two living states of a device that show an equal id share that page's memory. An id means nothing else, and may
        come again for another page once no state shows the one it meant.
        """
        if self._length is None:
            raise UnsupportedError("page_ids: not known while `jit` records a function, which runs for any length")
        return np.array(_native.state_pages(self.handle), np.uint64)

    @property
    def tokens_per_page(self) -> int:
        """Tokens whose keys and values fit a page: 65536 // bytes_per_token."""
        return int(_native.state_describe(self.handle)["tokens_per_page"])

    def truncate(self, length: int) -> KVState:
        """The first `length` tokens: O(1), shares everything."""
        if not 0 <= length <= self.length:
            raise InvalidArgument(f"length: expected 0…{self.length}, the state's length, got {length}")
        return KVState(self.device, self.config, _native.state_truncate(self.handle, length), length)

    def append(self, keys: ArrayLike | Array, values: ArrayLike | Array) -> KVState:
        """A state with more tokens, given as they are stored: keys already normed and rotated.

        Args:
            keys: float16 [tokens, key_value_heads, head_dim].
            values: the same shape.

        Raises:
            OutOfPages: the arena is full; nothing changed.
        """
        arrays = as_array(keys, "keys", device=self.device), as_array(values, "values", device=self.device)
        handle = _native.state_append(self.handle, arrays[0].tensor, arrays[1].tensor)
        return KVState(self.device, self.config, handle, self.length + arrays[0].shape[0])

    def keys(self, start: int = 0, stop: int | None = None) -> Array:
        """Keys as stored, normed and rotated: float16 [tokens, key_value_heads, head_dim]."""
        return self._read(start, stop)[0]

    def values(self, start: int = 0, stop: int | None = None) -> Array:
        """Values: float16 [tokens, key_value_heads, head_dim]."""
        return self._read(start, stop)[1]

    def _read(self, start: int, stop: int | None) -> tuple[Array, Array]:
        start, stop, _ = slice(start, stop).indices(self.length)
        tokens = max(stop - start, 0)
        keys, values = _native.state_read(self.handle, start if tokens else 0, tokens)
        shape = (tokens, self.config.key_value_heads, self.config.head_dim)
        return Array(self.device, keys, shape, "F16"), Array(self.device, values, shape, "F16")

    def save(self, path: str | PathLike[str]) -> None:
        """Write keys, values and configuration as safetensors; `load_state` reads it back bit for bit."""
        save_states(path, "kv_state", {"": self})

    def close(self) -> None:
        """Let go of the pages now instead of when the last reference goes. Idempotent."""
        self._handle = None

    def __enter__(self) -> KVState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        if self._handle is None:
            return f"KVState(closed, length={self._length})"
        size = "recorded" if self._length is None else f"length={self._length}, pages={self.pages}"
        return f"KVState({size}, heads={self.config.key_value_heads}, head_dim={self.config.head_dim})"


def init_state(config: AttentionConfig, *, device: Device | None = None) -> KVState:
    """An empty state for a layer of this configuration. Holds no page."""
    device = device or default_device()
    config.native(device)  # a bad configuration is found here rather than at the first call
    return KVState(device, config, _native.state_new(device.handle, config.key_value_heads, config.head_dim), 0)


def load_state(path: str | PathLike[str], *, device: Device | None = None) -> KVState:
    """The state that `KVState.save` wrote.

    Raises:
        CheckpointError: not such a file, or damaged.
    """
    return load_states(path, "kv_state", "KVState.save", lambda count: [""], device)[0]


def save_states(path: str | PathLike[str], kind: str, states: Mapping[str, KVState]) -> None:
    """One file of states of one configuration, each under a prefix of its own."""
    from pyferrum.checkpoint.safetensors import save_safetensors

    tensors: dict[str, Any] = {}
    for prefix, state in states.items():
        keys, values = state._read(0, None)
        tensors |= {f"{prefix}keys": np.asarray(keys), f"{prefix}values": np.asarray(values)}
    config = next(iter(states.values())).config
    save_safetensors(Path(path), tensors, {"pyferrum": kind, "config": json.dumps(_config_to_json(config))})


def load_states(
    path: str | PathLike[str], kind: str, writer: str, prefixes: Callable[[int], list[str]], device: Device | None
) -> list[KVState]:
    """States that `save_states` wrote; `prefixes` gives those of so many."""
    from pyferrum.checkpoint import open_safetensors

    file = open_safetensors(Path(path))
    names = prefixes(len(file.tensors) // 2)
    expected = {f"{prefix}{part}" for prefix in names for part in ("keys", "values")}
    if file.metadata.get("pyferrum") != kind or not names or set(file.tensors) != expected:
        raise CheckpointError(f"{path}: expected a state saved by {writer}, got tensors {list(file.tensors)}")
    try:
        config = _config_from_json(json.loads(file.metadata["config"]))
        return [
            init_state(config, device=device).append(
                file.tensors[f"{name}keys"].array(), file.tensors[f"{name}values"].array()
            )
            for name in names
        ]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged state file: {error}") from error


def _config_to_json(config: AttentionConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    fields = asdict(replace(config, rope_scaling=None))
    if scaling is not None:
        fields["rope_scaling"] = {"type": type(scaling).__name__, **asdict(scaling)}
    return fields


def _config_from_json(fields: dict[str, Any]) -> AttentionConfig:
    scaling = fields.pop("rope_scaling")
    if scaling is not None:
        kinds = {kind.__name__: kind for kind in rope.Scaling.__args__}
        kind = kinds[scaling.pop("type")]
        if kind is rope.FrequencyFactors:
            scaling["divisors"] = tuple(scaling["divisors"])
        scaling = kind(**scaling)
    return AttentionConfig(**fields, rope_scaling=scaling)
