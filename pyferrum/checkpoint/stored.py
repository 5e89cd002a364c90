"""A tensor as its file stores it, and the two things every reader needs: a memory map and a JSON file."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from pyferrum.errors import CheckpointError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

# GGML and safetensors use the same names for the plain types. All of them are little-endian on disk.
DENSE_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U64": np.dtype("<u8"),
        "U32": np.dtype("<u4"),
        "U16": np.dtype("<u2"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)


# Compared by identity: a generated __eq__ would ask an array for its truth value.
@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint, still in the memory map of its file."""

    name: str
    """The tensor's name in the file."""
    format: str
    """GGML type name ("F32", "BF16", "Q4_1", "Q6_K", "I32", …); safetensors dtypes use the same names."""
    shape: tuple[int, ...]
    """Torch order, so a linear layer is [out, in]; [] is a scalar and a 0 makes the tensor empty."""
    data: Bytes = field(repr=False)
    """Read-only uint8 [nbytes]: exactly the tensor's bytes, a view into the file's memory map."""
    path: Path
    """The file the bytes are in (one part, when the checkpoint has several)."""
    offset: int
    """Where `data` begins, in bytes from the start of `path`."""

    @property
    def nbytes(self) -> int:
        """Bytes the tensor occupies in the file."""
        return self.data.size

    def release_pages(self) -> None:
        """Let the system drop the tensor's pages from memory; whoever reads them again reads the file again."""
        mapped: Any = self.data
        while isinstance(mapped, np.ndarray):
            mapped = mapped.base
        mapped = getattr(mapped, "obj", None)  # NumPy holds a memoryview of the map
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (self.offset + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    @property
    def is_dense(self) -> bool:
        """True for one plain number per element, False for a block format such as Q4_1."""
        return self.format in DENSE_DTYPES

    def array(self) -> np.ndarray[Any, Any]:
        """The tensor as a read-only view of shape `shape`; BF16 comes as `ml_dtypes.bfloat16`.

        The view is unaligned when the file places the tensor so (safetensors does not promise alignment).
        Raises CheckpointError for a block format: its numbers exist only after `dequantize()`.
        """
        if not self.is_dense:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} is stored in {self.format} blocks, which NumPy cannot "
                "view; use .dequantize() for float32 values or .data for the bytes"
            )
        return self.data.view(DENSE_DTYPES[self.format]).reshape(self.shape)

    def dequantize(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor's values as a new float32 array of shape `shape`.

        Block formats follow `gguf.quants` (the formulas of ggml), dense ones are converted by NumPy. Raises
        CheckpointError for a block format that the installed gguf package cannot decode.
        """
        if self.is_dense:
            return self.array().astype(np.float32)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        if self.data.size == 0:
            return np.zeros(self.shape, np.float32)
        rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
        try:
            values = dequantize(rows, GGMLQuantizationType[self.format])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r}: the installed gguf package cannot decode {self.format}"
            ) from error
        return values.astype(np.float32, copy=False).reshape(self.shape)


def check_shape(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError if a shape is beyond what an array can index, even when a 0 makes it empty."""
    if math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {list(shape)}, whose size overflows")


def map_file(path: Path) -> Bytes:
    """The whole file as a read-only uint8 [size] over one memory map, which lives as long as any view of it.

    A file that is shortened while it is mapped raises SIGBUS in whoever reads it, as with every memory map.
    Raises CheckpointError if the file cannot be opened or is empty.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CheckpointError(f"{path}: the file is empty")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot open the file: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if it cannot be read or is not an object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot open the file: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value
