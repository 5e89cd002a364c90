"""Stored tensors to weights on a device: in place where a kernel reads their format, expanded where none does."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyferrum import _native
from pyferrum.array import Array, DeviceArray, array
from pyferrum.checkpoint import StoredTensor
from pyferrum.device import Device
from pyferrum.errors import CheckpointError
from pyferrum.formats import BLOCK_FORMATS, DTYPES
from pyferrum.weights import BlockArray, Weight, prepare

logger = logging.getLogger("pyferrum")


class TensorLoader:
    """Gives a checkpoint's tensors as weights, and remembers which were asked for.

    Files stay memory-mapped: a weight in a native format is a view of its file. Shapes are checked against what the
    model expects; a missing tensor or a wrong shape is a CheckpointError that names it.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], files: Mapping[Path, Any], device: Device) -> None:
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
        return self._copy(stored.dequantize(), np.float16)

    def vector(self, name: str, length: int, *, optional: bool = False) -> Array | None:
        """A norm or bias [length], float16 or float32; None where it is optional and not there."""
        if optional and name not in self._tensors:
            return None
        stored = self._stored(name, (length,))
        dtype = np.float16 if stored.format == "F16" else np.float32
        return self._copy(stored.dequantize(), dtype)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A small tensor of any rank, float32."""
        return self._copy(self._stored(name, shape).dequantize(), np.float32)

    def finish(self, strict: bool) -> None:
        """Report what was expanded, and tensors nobody asked for: an INFO line, or an error if `strict`."""
        if self._expanded:
            what = ", ".join(f"{count} {format}" for format, count in self._expanded.items())
            logger.warning("no kernel multiplies %s tensors as stored: expanded to float16", what)
        unused = [name for name in self._tensors if name not in self._used]
        if unused:
            text = f"{len(unused)} tensors of the file are not used: {', '.join(unused[:8])}"
            if strict:
                raise CheckpointError(text)
            logger.info("%s", text)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        stored = self._tensors[name]
        self._used.add(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {name!r}: expected shape {list(shape)}, got {list(stored.shape)}"
            )
        return stored

    def _in_place(self, stored: StoredTensor) -> tuple[Any, tuple[int, ...], str, int]:
        self.mapped_bytes += stored.nbytes
        return self._buffers[stored.path], stored.shape, stored.format, stored.offset

    def _copy(self, values: np.ndarray[Any, Any], dtype: Any) -> Array:
        copied: DeviceArray = array(values, dtype, device=self._device)
        self.expanded_bytes += copied.nbytes
        assert isinstance(copied, Array)
        return copied
