"""Stored tensors to weights on a device: in place where a kernel reads their format, expanded where none does."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyferrum import _native
from pyferrum.array import Array, DeviceArray, array
from pyferrum.checkpoint import SafetensorsFiles, StoredTensor
from pyferrum.checkpoint.stored import DENSE_DTYPES, Bytes
from pyferrum.device import Device
from pyferrum.errors import CheckpointError, UnsupportedError
from pyferrum.formats import BLOCK_FORMATS, DTYPES
from pyferrum.weights import BlockArray, Weight, prepare

logger = logging.getLogger("pyferrum")

_MAX_LAYERS = 1024
_COMPARED_AT_ONCE = 1 << 24
"""Bytes of a tensor that are compared at once: an embedding is too large for a second array of its size."""
_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.")
_NUMBERS = ("F64", "F32", "F16", "BF16")
"""Dense formats whose elements are the weights themselves; others only mean something beside a scale."""


def check_unquantised(files: SafetensorsFiles) -> None:
    """Raise UnsupportedError where config.json says that the weights are to be multiplied by scales of their own."""
    for key in ("quantization_config", "quantization", "compression_config"):
        given = (files.config or {}).get(key)
        if given:
            method = given.get("quant_method", given) if isinstance(given, Mapping) else given
            raise UnsupportedError(
                f"{files.path}: config.json: {key}: quant_method {method!r} is not built; load the model as it was "
                "before quantisation, or a GGUF file of it"
            )


def check_layers(source: str, key: str, layers: int, tensors: Iterable[str]) -> None:
    """Raise CheckpointError unless `layers`, which the file gives as `key`, is a number of layers and those it holds.

    Too few tensors are found later, by their names.
    """
    if not 1 <= layers <= _MAX_LAYERS:
        raise CheckpointError(f"{source}: {key}: expected 1…{_MAX_LAYERS} layers, got {layers:,}")
    held = 1 + max((int(match[1]) for name in tensors if (match := _LAYER_NAME.search(name))), default=-1)
    if held > layers:
        raise CheckpointError(f"{source}: {key} is {layers}, and the file holds tensors of {held} layers")


class TensorLoader:
    """Gives a checkpoint's tensors as weights, and remembers which were asked for.

    Files stay memory-mapped: a weight in a native format is a view of its file. Shapes are checked against what the
    model expects; a missing tensor or a wrong shape is a CheckpointError that names file and tensor.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, StoredTensor], files: Mapping[Path, Any], device: Device
    ) -> None:
        self._path = path
        self._tensors = tensors
        self._device = device
        self._buffers = {path: _native.buffer_wrap(device.handle, data) for path, data in files.items()}
        self._used: set[str] = set()
        self._expanded: Counter[str] = Counter()
        self.mapped_bytes = 0
        """Bytes of weights read in place."""
        self.expanded_bytes = 0
        """Bytes of weights that have a copy in another format."""
        self.prepared_bytes = 0
        """Bytes that the device holds beside the weights, to multiply them sooner."""

    def use(self, name: str) -> None:
        """Mark a tensor as known, though it is read elsewhere or not at all."""
        self._used.add(name)

    def require(self, names: Iterable[str], reason: str = "") -> None:
        """Raise CheckpointError if any of these tensors is missing, with a `reason` to expect them in front."""
        missing = [name for name in names if name not in self._tensors]
        if missing:
            what = "tensor {} is missing" if len(missing) == 1 else f"{len(missing)} tensors are missing: {{}}"
            raise CheckpointError(f"{self._path}: {reason}{what.format(some(missing))}")

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raise UnsupportedError if any of these tensors is there."""
        there = [name for name in names if name in self._tensors]
        if there:
            raise UnsupportedError(f"{self._path}: {some(there)}: {reason}")

    def check_tied(self, embedding: str, output: str) -> None:
        """Raise CheckpointError if there is an output matrix that is not the embedding it is said to be tied to."""
        if output not in self._tensors:
            return
        self.require([embedding])
        self.use(output)
        one, other = self._tensors[embedding], self._tensors[output]
        equal = one.shape == other.shape and (
            _equal_bytes(one.data, other.data)
            if one.format == other.format
            else np.array_equal(one.dequantize(), other.dequantize())
        )
        if not equal:
            raise CheckpointError(
                f"{self._path}: tie_word_embeddings is true, and tensors {embedding!r} and {output!r} differ"
            )

    def matrix(self, name: str, shape: tuple[int, int], *, multiplied: bool = True) -> Weight:
        """A matrix [out, in] in its stored format, or float16 where no kernel multiplies that.

        One that is only looked up, as an embedding is, is not `multiplied`: the device need not prepare for it.
        """
        stored = self._stored(name, shape)
        weight = self._matrix(stored)
        if multiplied:
            prepared = prepare(weight)
            self.prepared_bytes += prepared
            if prepared:
                stored.release_pages()
        return weight

    def _matrix(self, stored: StoredTensor) -> Weight:
        if stored.format in BLOCK_FORMATS:
            return BlockArray(self._device, *self._in_place(stored))
        if stored.format in ("F32", "F16", "BF16"):
            if stored.offset % DTYPES[stored.format].itemsize == 0:
                return Array(self._device, *self._in_place(stored))
            self.expanded_bytes += stored.nbytes  # safetensors does not promise alignment
            return array(stored.array(), device=self._device)
        self._expanded[stored.format] += 1
        return self._copy(stored, np.float16)

    def vector(self, name: str, length: int, *, optional: bool = False) -> Array | None:
        """A norm or bias [length], float16 or float32; None where it is optional and not there."""
        if optional and name not in self._tensors:
            return None
        stored = self._stored(name, (length,))
        dtype = np.float16 if stored.format == "F16" else np.float32
        return self._copy(stored, dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A small tensor of any rank, float32."""
        return self._copy(self._stored(name, shape), np.float32)

    def finish(self, strict: bool) -> None:
        """Report what was expanded, and tensors nobody asked for: an INFO line, or an error if `strict`.

        Raises UnsupportedError for a tensor nobody asked for beside a weight that is used, as its scale or its bias:
        without it the weight does not mean what the file says.
        """
        if self._expanded:
            what = ", ".join(f"{count} {format}" for format, count in self._expanded.items())
            logger.warning("no kernel multiplies %s tensors as stored: expanded to float16", what)
        unused = [name for name in self._tensors if name not in self._used]
        beside = [name for name in unused if self._is_beside_a_weight(name)]
        if beside:
            raise UnsupportedError(f"{self._path}: parts of weights that are not built: {some(beside)}")
        if unused:
            text = f"{self._path}: {len(unused)} tensors of the file are not used: {some(unused)}"
            if strict:
                raise CheckpointError(text)
            logger.info("%s", text)

    def _is_beside_a_weight(self, name: str) -> bool:
        parts = name.split(".")
        owners = (".".join(parts[:end]) for end in range(1, len(parts)))
        return any(owner in self._used or f"{owner}.weight" in self._used for owner in owners)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        self.require([name])
        stored = self._tensors[name]
        self._used.add(name)
        if stored.format in DENSE_DTYPES and stored.format not in _NUMBERS:
            raise UnsupportedError(
                f"{stored.path}: tensor {name!r}: weights of dtype {stored.format} are not built; "
                f"known: {', '.join(_NUMBERS)} and the block formats of GGUF"
            )
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {name!r}: expected shape {list(shape)}, got {list(stored.shape)}"
            )
        return stored

    def _in_place(self, stored: StoredTensor) -> tuple[Any, tuple[int, ...], str, int]:
        self.mapped_bytes += stored.nbytes
        return self._buffers[stored.path], stored.shape, stored.format, stored.offset

    def _copy(self, stored: StoredTensor, dtype: Any) -> Array:
        with np.errstate(over="ignore"):
            values = stored.dequantize().astype(dtype)
        if np.isinf(values).any():
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name!r} ({stored.format}): has values beyond those of "
                f"{values.dtype}, which it is expanded to"
            )
        copied: DeviceArray = array(values, device=self._device)
        self.expanded_bytes += copied.nbytes
        assert isinstance(copied, Array)
        return copied


def _equal_bytes(one: Bytes, other: Bytes) -> bool:
    return all(
        np.array_equal(one[start : start + _COMPARED_AT_ONCE], other[start : start + _COMPARED_AT_ONCE])
        for start in range(0, one.size, _COMPARED_AT_ONCE)
    )


def some(names: list[str]) -> str:
    """The first of these names, as a message shows them."""
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
