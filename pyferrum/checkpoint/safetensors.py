"""Reads and writes safetensors checkpoints: one file, or shards under a `model.safetensors.index.json`.

A file is a u64 header length, a JSON header `{name: {dtype, shape, data_offsets}}` and the data; offsets
count from the end of the header (README of huggingface/safetensors). The `safetensors` library validates each
file: offsets contiguous, sizes equal to dtype times shape, nothing left over. The header is then read again
only to place views over the memory map.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pyferrum.checkpoint.stored import DENSE_DTYPES, Bytes, StoredTensor, check_shape, map_file, read_json
from pyferrum.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, eq=False)
class SafetensorsFiles:
    """An open safetensors checkpoint: one file or several shards, and the model's config if it is there."""

    path: Path
    """What was opened: the file or the folder."""
    tensors: Mapping[str, StoredTensor]
    """Every tensor by name; of a sharded checkpoint those the index lists, from the files it names."""
    files: Mapping[Path, Bytes]
    """Each file's bytes, read-only uint8 [file size]; a tensor's `path` and `offset` point into it."""
    config: Mapping[str, Any] | None
    """The parsed `config.json` beside the weights, or None."""
    metadata: Mapping[str, str]
    """The `__metadata__` of a single file; empty for shards, whose files may disagree."""


def open_safetensors(path: str | Path) -> SafetensorsFiles:
    """Open a `.safetensors` file, an index file, or the folder that holds either.

    In a folder the index rules: shards it does not list are ignored. Without one, `model.safetensors` or else
    the only `.safetensors` file is opened. Raises CheckpointError that names the file, and the missing shard
    or tensor, if the checkpoint is incomplete or damaged.
    """
    path = Path(path)
    weights = _weights_in(path) if path.is_dir() else path
    folder = weights.parent
    if weights.name.endswith(".index.json"):
        tensors, files = _read_shards(weights)
        metadata: dict[str, str] = {}
    else:
        data = map_file(weights)
        (tensors, metadata), files = _read_file(weights, data), {weights: data}
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    return SafetensorsFiles(
        path, MappingProxyType(tensors), MappingProxyType(files), config, MappingProxyType(metadata)
    )


def save_safetensors(
    path: str | Path, tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays of any memory layout to one file; a reader sees the whole new file or the old one.

    bfloat16 and float8 arrays are `ml_dtypes` ones. Arrays are laid out in C order first, because the library
    writes the memory of a Fortran-ordered array as it lies, under the shape it does not have. Raises
    CheckpointError for a dtype that safetensors cannot hold.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    known = set(DENSE_DTYPES.values())
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, given in tensors.items():
        array = np.asarray(given)
        little = array.dtype.newbyteorder("<")
        if little not in known:
            raise CheckpointError(f"{path}: tensor {name!r}: safetensors cannot hold dtype {array.dtype}")
        arrays[name] = array.astype(little, order="C", copy=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(arrays, temporary, dict(metadata or {}))
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot write the file: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _weights_in(folder: Path) -> Path:
    """The index or the single weight file of a folder."""
    for name in (_INDEX, _SINGLE):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found) or "none of them"
    raise CheckpointError(f"{folder}: expected {_INDEX}, {_SINGLE} or one .safetensors file; found {names}")


def _read_shards(index: Path) -> tuple[dict[str, StoredTensor], dict[Path, Bytes]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    for name, file in weight_map.items():
        # A path would let a downloaded index reach files outside its own folder.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise CheckpointError(f"{index}: tensor {name!r} maps to {file!r}; expected a plain file name")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index}: missing {len(missing)} of {len(names)} shards: {', '.join(missing)}")
    files = {index.parent / name: map_file(index.parent / name) for name in names}
    shards = {path.name: _read_file(path, data)[0] for path, data in files.items()}
    absent = [f"{name!r} in {file}" for name, file in weight_map.items() if name not in shards[file]]
    if absent:
        raise CheckpointError(f"{index}: {len(absent)} tensors are not where the index says: {', '.join(absent[:8])}")
    return {name: shards[file][name] for name, file in weight_map.items()}, files


def _read_file(path: Path, data: Bytes) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} ({data.size:,} bytes): damaged or not safetensors: {error}") from error
    base = 8 + int.from_bytes(data[:8].tobytes(), "little")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            twice = next(name for position, (name, _) in enumerate(pairs) if name in dict(pairs[:position]))
            raise CheckpointError(f"{path}: the header has the name {twice!r} twice")
        return entries

    header = json.loads(data[8:base].tobytes(), object_pairs_hook=unique)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in DENSE_DTYPES:
            known = ", ".join(DENSE_DTYPES)
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}; this reader knows {known}")
        check_shape(path, name, shape)
        tensors[name] = StoredTensor(name, dtype, shape, data[base + begin : base + end], path, base + begin)
    return tensors, metadata
