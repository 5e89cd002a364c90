"""Writes calls of the C ABI down, with what they gave here, for replay.cpp to repeat on another machine.

A record is a function's name and its arguments in the order of the C signature: numbers as 64-bit words, data as a
length and bytes, tensors and objects by number. replay.cpp reads them by the types of that signature.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

import pyferrum as pf
from pyferrum import _native, _native_attention, _native_rings
from pyferrum.array import DeviceArray, as_array
from pyferrum.formats import NUMBERS

lib, ffi = _native.lib, _native.ffi


def word(number: int) -> bytes:
    return struct.pack("<Q", number)


def real(number: float) -> bytes:
    return struct.pack("<f4x", number)


def blob(data: Any) -> bytes:
    data = bytes(data)
    return word(len(data)) + data + bytes(-len(data) % 8)


def result(buffer: Any) -> bytes:
    return blob(_native.buffer_view(buffer))


class Trace:
    """Runs calls on `device` and writes each of them to `file` with its results."""

    def __init__(self, file: BinaryIO, device: pf.Device) -> None:
        self.file = file
        self.device = device
        self.names: set[str] = set()
        self.case("")

    def _write(self, name: str, *parts: bytes) -> None:
        self.names.add(name)
        self.file.write(blob(name.encode()) + b"".join(parts))

    def case(self, name: str) -> None:
        """What follows belongs to this case; objects of the one before are gone."""
        self._buffers: list[DeviceArray] = []
        self._made: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._counts: dict[str, int] = {}
        self._write("case", blob(name.encode()))

    def _keep(self, noun: str, handle: Any) -> Any:
        self._made.append(handle)
        self._numbers[id(handle)] = self._counts.get(noun, 0)
        self._counts[noun] = self._counts.get(noun, 0) + 1
        return handle

    def _object(self, handle: Any) -> bytes:
        return word(self._numbers[id(handle)])

    def array(self, values: Any) -> DeviceArray:
        """The values on the device; whatever is on one already passes through."""
        return values if isinstance(values, DeviceArray) else as_array(values, "values", device=self.device)

    def _tensors(self, *values: DeviceArray | None) -> bytes:
        parts = []
        for value in values:
            if value is None:
                continue
            if id(value) not in self._numbers:
                self._keep("buffer", value)
                self._write("buffer", blob(value._bytes()))
            shape = [*value.shape, *([0] * (4 - value.ndim))]
            parts += [self._object(value), word(NUMBERS[value.format]), word(value.ndim), *map(word, shape)]
        return word(sum(value is not None for value in values)) + b"".join(parts)

    # ---- Functions whose results are buffers

    def operation(self, name: str, *arguments: Any, outputs: int = 1, owner: Any = None) -> list[np.ndarray]:
        """ferrum_<name>(device or `owner`, arguments…): arrays and None are tensors, the rest numbers. Gives bytes."""
        parts = [] if owner is None else [self._object(owner)]
        native: list[Any] = []
        for argument in arguments:
            if isinstance(argument, int):
                parts.append(word(argument))
                native.append(argument)
            elif isinstance(argument, float):
                parts.append(real(argument))
                native.append(argument)
            else:
                array = None if argument is None else self.array(argument)
                parts.append(self._tensors(array))
                native.append(_native.NO_TENSOR if array is None else array.tensor)
                self._made.append(array)
        buffers = _native.operation(name, self.device.handle if owner is None else owner, *native, outputs=outputs)
        self._write(name, *parts, *map(result, buffers))
        return [_native.buffer_view(buffer) for buffer in buffers]

    def prepare(self, weight: DeviceArray) -> None:
        tensor = self._tensors(weight)
        self._write("weight_prepare", tensor, word(_native.weight_prepare(self.device.handle, weight.tensor)))

    # ---- States and attention

    def state(self, key_value_heads: int, head_dim: int) -> Any:
        self._write("state_new", word(key_value_heads), word(head_dim))
        return self._keep("state", _native.state_new(self.device.handle, key_value_heads, head_dim))

    def append(self, state: Any, keys: Any, values: Any) -> Any:
        arrays = self.array(keys), self.array(values)
        self._write("state_append", self._object(state), *map(self._tensors, arrays))
        return self._keep("state", _native.state_append(state, *(array.tensor for array in arrays)))

    def truncate(self, state: Any, length: int) -> Any:
        self._write("state_truncate", self._object(state), word(length))
        return self._keep("state", _native.state_truncate(state, length))

    def read(self, state: Any) -> None:
        length = _native.state_describe(state)["length"]
        buffers = _native.state_read(state, 0, length)
        self._write("state_read", self._object(state), word(0), word(length), *map(result, buffers))

    def attention(self, config: pf.AttentionConfig) -> Any:
        native = ffi.new("ferrum_attention_config *")
        native.maximum_context_tokens = config.maximum_context_tokens
        native.hidden_size = config.hidden_size
        native.query_heads = config.query_heads
        native.key_value_heads = config.key_value_heads
        native.head_dim = config.head_dim
        native.rope_dim = config.rotary_dim
        native.sliding_window = config.sliding_window or 0
        native.output_gate = config.output_gate
        native.rope_interleaved = config.rope_interleaved
        native.epsilon = config.epsilon
        native.scale = config.scale or 0
        native.softcap = config.softcap or 0
        native.rope_attention_factor = config.rope_attention_factor
        frequencies = np.ascontiguousarray(config.inverse_frequencies())
        self._write("attention_new", blob(ffi.buffer(native)), blob(frequencies.tobytes()))
        return self._keep("attention", config.native(self.device))

    def attend(
        self, attention: Any, weights: dict[str, DeviceArray], states: Sequence[Any], xs: Sequence[Any], packed: bool
    ) -> list[Any]:
        """causal_attention of new rows xs[i] behind states[i]; gives the new states."""
        tokens = [len(x) for x in xs]
        rows = [self.array(x) for x in ([np.concatenate(xs)] if packed else xs)]
        form = lib.FERRUM_FORM_PACKED if packed else lib.FERRUM_FORM_PARTICIPANT_LOOP
        parts = (
            self._object(attention),
            b"".join(self._tensors(weights.get(name)) for name in _native_attention.WEIGHT_FIELDS),
            *(word(form), word(len(states)), word(len(states)), *map(self._object, states)),
            *(blob(np.array(tokens, np.uint64).tobytes()), self._tensors(*rows)),
        )
        tensors = {name: value.tensor for name, value in weights.items()}
        new, ys = _native_attention.causal_attention(
            attention,
            _native_attention.attention_weights(tensors),
            packed,
            states,
            tokens,
            [row.tensor for row in rows],
        )
        self._write("causal_attention", *parts, word(len(new)), word(len(ys)), *map(result, ys))
        return [self._keep("state", state) for state in new]

    # ---- Rings

    def ring(self, lanes: int, window: int, key_value_heads: int, head_dim: int) -> Any:
        sizes = lanes, window, key_value_heads, head_dim
        self._write("ring_new", *map(word, sizes))
        return self._keep("ring", _native_rings.ring_new(self.device.handle, *sizes))

    def load(self, ring: Any, keys: Any, values: Any, lengths: Sequence[int], positions: Sequence[int]) -> Any:
        arrays = self.array(keys), self.array(values)
        numbers = blob(np.array(lengths, np.uint64).tobytes()), blob(np.array(positions, np.uint32).tobytes())
        self._write("ring_load", self._object(ring), *map(self._tensors, arrays), *numbers)
        handle = _native_rings.ring_load(ring, *(array.tensor for array in arrays), lengths, positions)
        return self._keep("ring", handle)

    def commit(self, ring: Any, keys: Any, values: Any, counts: Sequence[int]) -> Any:
        arrays = self.array(keys), self.array(values)
        self._write(
            "dflash2_commit",
            self._object(ring),
            *map(self._tensors, arrays),
            blob(np.array(counts, np.uint32).tobytes()),
        )
        handle = _native_rings.ring_commit(ring, *(array.tensor for array in arrays), counts)
        return self._keep("ring", handle)
