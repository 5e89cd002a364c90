"""A bounds-checked reader of GGUF files over one read-only memory map per file.

The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian:

    "GGUF" · version u32 · tensor count u64 · key count u64
    keys      name string · type u32 · value                         (array: type u32 · count u64 · values)
    tensors   name string · n_dims u32 · dims u64 each, fastest first · type u32 · offset u64 from the data
    padding to `general.alignment` (32 if absent) · data

A string is a u64 length and UTF-8 bytes. Nothing in a file is trusted: a count, length or offset is compared
with the bytes the file has before anything is made from it, and what does not fit raises CheckpointError that
names the file and the tensor or key.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np

from pyferrum.checkpoint.metadata import REQUIRED, StringArray, strings_value, typed_value
from pyferrum.checkpoint.stored import Bytes, StoredTensor, check_shape, map_file
from pyferrum.errors import CheckpointError
from pyferrum.formats import FORMATS

T = TypeVar("T")
D = TypeVar("D")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_U32, _U64 = "<I", "<Q"
# struct format codes by value type; NumPy reads the same codes as dtypes.
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: _U32, 5: "<i", 6: "<f", _BOOL: "<B", 10: _U64, 11: "<q", 12: "<d",
}  # fmt: skip
_TYPES = {number: (name, elements, size) for name, (number, elements, size) in FORMATS.items()}
_REMOVED_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_MAX_ALIGNMENT = 65536
_MAX_BLOCKS = 1024
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF checkpoint: one file, or all the parts of a split one."""

    path: Path
    """The file that was opened (the first part of a split checkpoint)."""
    metadata: Mapping[str, Any]
    """int, float, bool, str; for an array a NumPy array of numbers or a StringArray."""
    tensors: Mapping[str, StoredTensor]
    """Every tensor by name, in file order."""
    files: Mapping[Path, Bytes]
    """Each part's bytes, read-only uint8 [file size]; a tensor's `path` and `offset` point into it."""

    @property
    def data(self) -> Bytes:
        """The whole file, read-only uint8 [file size]; CheckpointError if the checkpoint is split."""
        if len(self.files) != 1:
            raise CheckpointError(f"{self.path}: one of {len(self.files)} parts; use .files[tensor.path]")
        return self.files[self.path]

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type[T], default: D = REQUIRED) -> T | D:
        """A metadata value of exactly the type `kind`; see `typed_value`."""
        return typed_value(self.metadata, self.path, key, kind, default)


class _Cursor:
    """Walks a file's header forwards; every step is checked against the bytes that remain."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.view, self.size, self.at = path, data.data, data.size, 0

    def step(self, count: int, what: str) -> int:
        """Pass over `count` bytes and return where they began."""
        begin = self.at
        if count > self.size - begin:
            raise CheckpointError(
                f"{self.path}: the header is damaged or cut short: {what} needs {count:,} bytes at byte "
                f"{begin:,}, and the file ends at {self.size:,}"
            )
        self.at = begin + count
        return begin

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.view, self.step(struct.calcsize(code), what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 count of things that take `smallest` bytes each at least."""
        count: int = self.number(_U64, what)
        if count * smallest > self.size - self.at:
            raise CheckpointError(
                f"{self.path}: {what} is {count:,}, at {smallest} bytes each or more, but only "
                f"{self.size - self.at:,} bytes of the file remain"
            )
        return count

    def text(self, what: str) -> str:
        length = self.count(1, f"the length of {what}")
        begin = self.step(length, what)
        try:
            return str(self.view[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def strings(self, what: str) -> StringArray:
        count = self.count(8, f"the length of {what}")
        view, size, begin = self.view, self.size, self.at
        length_at = struct.Struct("<Q").unpack_from
        at, last = begin, size - 8
        for index in range(count):
            if at > last:
                self.at = min(at, size)
                self.step(8, f"{what}, string {index},")
            at += 8 + length_at(view, at)[0]
        self.at = begin
        self.step(at - begin, what)
        return StringArray(view[begin:at], count, f"{self.path}: {what}")

    def value(self, key: str) -> Any:
        what = f"metadata key {key!r}"
        kind = self.number(_U32, what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            value = self.number(self.code(kind, what), what)
            return bool(value) if kind == _BOOL else value
        kind = self.number(_U32, what)
        if kind == _ARRAY:
            raise CheckpointError(f"{self.path}: {what} is an array of arrays, which no GGUF file needs")
        if kind == _STRING:
            return self.strings(what)
        dtype = np.dtype(self.code(kind, what))
        count = self.count(dtype.itemsize, f"the length of {what}")
        array = np.frombuffer(self.view, dtype, count, self.step(count * dtype.itemsize, what))
        return array != 0 if kind == _BOOL else array

    def code(self, kind: int, what: str) -> str:
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self.path}: {what} has unknown value type {kind} (GGUF knows 0 to 12)")
        return _NUMBERS[kind]


@dataclass(frozen=True)
class _Declared:
    """A tensor as the header declares it; `start` counts from the data section."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _check_preamble(cursor: _Cursor) -> None:
    magic = bytes(cursor.view[cursor.step(4, "the GGUF magic") : cursor.at])
    if magic != b"GGUF":
        hint = " (a Git LFS pointer? fetch the file itself with `git lfs pull`)" if magic == b"vers" else ""
        raise CheckpointError(f"{cursor.path}: not a GGUF file: starts with {magic!r}, not b'GGUF'{hint}")
    version = cursor.number(_U32, "the version")
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        fix = "the file is big-endian; convert it again with `--bigendian` left out"
    elif version == 1:
        fix = "version 1 has 32-bit counts and is obsolete; convert the model again"
    else:
        fix = "the file is damaged, or newer than this reader"
    raise CheckpointError(f"{cursor.path}: GGUF version {version:#x}, expected 2 or 3: {fix}")


def _declared_tensor(cursor: _Cursor, index: int) -> _Declared:
    name = cursor.text(f"the name of tensor {index}")
    where = f"tensor {name!r}"
    n_dims = cursor.number(_U32, where)
    if n_dims > 4:
        raise CheckpointError(f"{cursor.path}: {where} has {n_dims} dimensions; GGUF allows 4 at most")
    dims = tuple(cursor.number(_U64, where) for _ in range(n_dims))
    kind, start = cursor.number(_U32, where), cursor.number(_U64, where)
    format, block, block_bytes = _TYPES.get(kind) or _other_type(kind, f"{cursor.path}: {where}")
    check_shape(cursor.path, name, dims[::-1])
    row = dims[0] if dims else 1
    if row % block:
        raise CheckpointError(
            f"{cursor.path}: {where} has rows of {row} elements, not a multiple of the {block} in a {format} block"
        )
    return _Declared(name, format, dims[::-1], start, math.prod(dims) // block * block_bytes)


def _other_type(kind: int, where: str) -> tuple[str, int, int]:
    """A type that no kernel multiplies. The gguf package knows them all, and takes longer to import than a load."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        reason = "removed from ggml" if kind in _REMOVED_TYPES else "unknown to the installed gguf package"
        raise CheckpointError(f"{where} has type number {kind}: {reason}") from None
    return type_.name, *GGML_QUANT_SIZES[type_]


def _placed(
    declared: Sequence[_Declared], path: Path, data: Bytes, base: int, alignment: int
) -> dict[str, StoredTensor]:
    """Check every tensor's place against the file and against the others, and cut it out of the map.

    `base` is where the data section begins. An empty tensor may share its place: it has no bytes.
    """
    for tensor in declared:
        begin = base + tensor.start
        if tensor.start % alignment:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} starts at offset {tensor.start:,}, not a multiple of the "
                f"alignment {alignment}"
            )
        if begin + tensor.nbytes > max(data.size, base):
            present = max(0, data.size - begin)
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} ({tensor.format} {list(tensor.shape)}) needs "
                f"{tensor.nbytes:,} bytes at byte {begin:,}, and {present:,} are present: the file ends at "
                f"{data.size:,}. It is cut short or damaged; fetch it again"
            )
    occupied = sorted((t for t in declared if t.nbytes), key=lambda t: t.start)
    for one, other in pairwise(occupied):
        if one.start + one.nbytes > other.start:
            raise CheckpointError(f"{path}: tensors {one.name!r} and {other.name!r} overlap in the file")
    return {
        t.name: StoredTensor(t.name, t.format, t.shape, data[base + t.start :][: t.nbytes], path, base + t.start)
        for t in declared
    }


def _read_part(path: Path) -> GGUFFile:
    data = map_file(path)
    cursor = _Cursor(path, data)
    _check_preamble(cursor)
    n_tensors = cursor.count(_SMALLEST_TENSOR, "the tensor count")
    n_keys = cursor.count(_SMALLEST_KEY, "the metadata key count")
    metadata: dict[str, Any] = {}
    for index in range(n_keys):
        key = cursor.text(f"the name of metadata key {index}")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    declared: dict[str, _Declared] = {}
    for index in range(n_tensors):
        tensor = _declared_tensor(cursor, index)
        if tensor.name in declared:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} appears twice")
        declared[tensor.name] = tensor
    alignment = typed_value(metadata, path, "general.alignment", int, 32)
    if alignment % 8 or not 8 <= alignment <= _MAX_ALIGNMENT or alignment.bit_count() != 1:
        raise CheckpointError(
            f"{path}: general.alignment is {alignment}; expected a power of two from 8 to {_MAX_ALIGNMENT}"
        )
    base = -(-cursor.at // alignment) * alignment
    tensors = _placed(list(declared.values()), path, data, base, alignment)
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(tensors), MappingProxyType({path: data}))


def _part_paths(first: GGUFFile) -> list[Path]:
    """The paths of all parts of a split checkpoint, by the naming rule of llama.cpp's `gguf-split`."""
    count = first.get("split.count", int, 1)
    if count <= 1:
        return [first.path]
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{first.path}: this is a part of a checkpoint split in {count}, so its name should end in "
            f"-00001-of-{count:05}.gguf; give the parts their own names back"
        )
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    paths = [first.path.with_name(name) for name in names]
    if first.get("split.no", int) != 0:
        raise CheckpointError(f"{first.path}: not the first part of the checkpoint; open {paths[0]}")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{first.path}: missing {len(missing)} of {count} parts: {', '.join(missing)}")
    return paths


def _check_model(model: GGUFFile) -> None:
    """Check the sizes that metadata claims against each other and against the tensors."""
    block_key = f"{model.get('general.architecture', str, '')}.block_count"
    blocks = model.get(block_key, int, 0)
    if not 0 <= blocks <= _MAX_BLOCKS:
        raise CheckpointError(f"{model.path}: {block_key} is {blocks:,}; expected {_MAX_BLOCKS} at most")
    if "tokenizer.ggml.tokens" not in model.metadata:
        return
    tokens = strings_value(model.metadata, model.path, "tokenizer.ggml.tokens")
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        entries = model.metadata.get(key, tokens)
        if not isinstance(entries, Sequence | np.ndarray) or len(entries) != len(tokens):
            raise CheckpointError(f"{model.path}: {key} should have {len(tokens):,} entries, one per token")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[:1] != (len(tokens),):
        raise CheckpointError(
            f"{model.path}: tensor 'token_embd.weight' has shape {list(embedding.shape)}; expected a row for "
            f"each of the {len(tokens):,} tokens in tokenizer.ggml.tokens"
        )


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF checkpoint; of a split one, give the first part and all are opened.

    Tensors stay in the memory map; only the header is read. Raises CheckpointError for anything that is not a
    whole, consistent GGUF file of version 2 or 3; the message names the file and the tensor or key.
    """
    first = _read_part(Path(path))
    paths = _part_paths(first)
    if len(paths) == 1:
        _check_model(first)
        return first
    tensors, files = dict(first.tensors), dict(first.files)
    for number, part_path in enumerate(paths[1:], 1):
        part = _read_part(part_path)
        place = part.get("split.no", int), part.get("split.count", int)
        if place != (number, len(paths)):
            raise CheckpointError(
                f"{part_path}: the file says it is part {place[0] + 1} of {place[1]}; its name says otherwise"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part_path}: tensor {name!r} is also in {tensors[name].path.name}")
            tensors[name] = tensor
        files |= part.files
    expected = first.get("split.tensors.count", int, len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{first.path}: expected {expected:,} tensors in all, got {len(tensors):,}")
    model = GGUFFile(first.path, first.metadata, MappingProxyType(tensors), MappingProxyType(files))
    _check_model(model)
    return model
