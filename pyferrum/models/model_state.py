"""What a model has seen of one sequence, as one immutable value."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from pyferrum import _native
from pyferrum.config import AttentionConfig
from pyferrum.device import Device
from pyferrum.errors import InvalidArgument
from pyferrum.state import KVState, load_states, save_states


class ModelState:
    """What a model has seen of one sequence: a KVState for each layer. Immutable; forking is using it twice.

    Raises:
        InvalidArgument: no layers, or layers that are not KVStates of one device, one configuration and one length.
    """

    __slots__ = ("_group", "_layers", "_length", "_like")

    def __init__(self, layers: Sequence[KVState]) -> None:
        layers = tuple(layers)
        if not layers or not all(isinstance(layer, KVState) for layer in layers):
            raise InvalidArgument("layers: expected a KVState for each layer of a model")
        for name in ("device", "config", "length"):
            kinds = dict.fromkeys(getattr(layer, name) for layer in layers)
            if len(kinds) > 1:
                raise InvalidArgument(
                    f"layers: expected one {name} for all of them, got {' and '.join(map(str, kinds))}"
                )
        self._layers: tuple[KVState, ...] | None = layers
        self._group: Any = None
        self._length: int | None = None
        self._like: tuple[Device, AttentionConfig, int] | None = None

    @classmethod
    def _of_layers(cls, layers: Sequence[KVState]) -> ModelState:
        """States that are known to go together, or stand for such while calls are recorded."""
        state: ModelState = object.__new__(cls)
        state._layers, state._group, state._length, state._like = tuple(layers), None, None, None
        return state

    @classmethod
    def _of_group(cls, group: Any, length: int, like: tuple[Device, AttentionConfig, int]) -> ModelState:
        """Native states of one owner; KVStates are made when somebody asks for them."""
        state: ModelState = object.__new__(cls)
        state._layers, state._group, state._length, state._like = None, group, length, like
        return state

    @property
    def layers(self) -> tuple[KVState, ...]:
        """A state for each layer. They may have one owner: then pages go with the last of them."""
        if self._layers is None:
            assert self._like is not None
            device, config, count = self._like
            group = self._group
            handles = [None if group is None else _native.GroupMember(group, i) for i in range(count)]
            self._layers = tuple(KVState(device, config, handle, self._length) for handle in handles)
        return self._layers

    @property
    def length(self) -> int:
        """Tokens."""
        return self.layers[0].length if self._length is None else self._length

    def truncate(self, length: int) -> ModelState:
        """The first `length` tokens: O(layers), shares everything."""
        return ModelState._of_layers([layer.truncate(length) for layer in self.layers])

    def save(self, path: str | PathLike[str]) -> None:
        """Write every layer's keys and values to one safetensors file; `load_model_state` reads it back bit for bit."""
        save_states(path, "model_state", dict(zip(_prefixes(len(self.layers)), self.layers, strict=True)))

    def close(self) -> None:
        """Let go of every layer's pages now, or when the calls of other threads that use them end. Idempotent."""
        for layer in self.layers:
            layer.close()
        self._group = None

    def _native_states(self) -> Any:
        group = self._group
        return [layer.handle for layer in self.layers] if group is None else group

    def tree_flatten(self) -> tuple[tuple[KVState, ...], None]:
        """(layers, None): a pytree node, for `jit` and JAX."""
        return self.layers, None

    @classmethod
    def tree_unflatten(cls, _: None, layers: tuple[KVState, ...]) -> ModelState:
        """The inverse."""
        return cls._of_layers(layers)

    def __enter__(self) -> ModelState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ModelState(layers={len(self.layers)}, {self.layers[0]!r})"


def load_model_state(path: str | PathLike[str], *, device: Device | None = None) -> ModelState:
    """The state that `ModelState.save` wrote: of a prompt that many runs begin with, say.

    It goes on in a model of the same configuration; that its weights are the same is the caller's to know.

    Raises:
        CheckpointError: not such a file, or damaged.
        InvalidArgument: layers of different lengths.
    """
    return ModelState(load_states(path, "model_state", "ModelState.save", _prefixes, device))


def _prefixes(count: int) -> list[str]:
    return [f"layers.{i}." for i in range(count)]
