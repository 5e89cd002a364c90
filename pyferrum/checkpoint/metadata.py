"""Values of GGUF metadata: arrays of strings that decode on first use, and reads that insist on a type."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, overload

import numpy as np

from pyferrum.errors import CheckpointError

T = TypeVar("T")
D = TypeVar("D")

REQUIRED: Any = object()
"""Stands for "no default": an absent key is then an error."""

_ARRAY_KINDS = {(int,): "iu", (float,): "f", (bool,): "b"}


class StringArray(Sequence[str]):
    """A metadata array of strings: bounds are checked when the file is opened, text is decoded on first use.

    Reading an element raises CheckpointError if any string of the array is not UTF-8.
    """

    def __init__(self, view: memoryview, count: int, where: str) -> None:
        self._view, self._count, self._where = view, count, where
        self._strings: tuple[str, ...] | None = None

    def _decoded(self) -> tuple[str, ...]:
        if self._strings is None:
            data, end, strings = bytes(self._view), 0, list[str]()
            length_at = struct.Struct("<Q").unpack_from
            try:
                for _ in range(self._count):
                    begin = end + 8
                    end = begin + length_at(data, end)[0]
                    strings.append(data[begin:end].decode())
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._where}: string {len(strings)}: {error}") from error
            self._strings = tuple(strings)
        return self._strings

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __repr__(self) -> str:
        return f"StringArray({self._count} strings)"


@overload
def typed_value(metadata: Mapping[str, Any], path: Path, key: str, kind: type[T]) -> T: ...
@overload
def typed_value(metadata: Mapping[str, Any], path: Path, key: str, kind: type[T], default: D) -> T | D: ...
def typed_value(metadata: Mapping[str, Any], path: Path, key: str, kind: type[T], default: D = REQUIRED) -> T | D:
    """`metadata[key]`, which must be a `kind`: int, float, bool, str, or list[…] of one of these.

    Types are not converted into each other: an int where a float belongs is the mark of a broken converter.
    Raises CheckpointError that names key and file if the type differs, or if the key is absent and no
    `default` was given.
    """
    if key not in metadata:
        if default is REQUIRED:
            raise CheckpointError(f"{path}: the file lacks the metadata key {key!r}, which is needed here")
        return default
    value: Any = metadata[key]
    item = get_args(kind)
    if not item and type(value) is kind:
        return value
    if item == (str,) and isinstance(value, StringArray):
        return cast(T, list(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS.get(item, ""):
        return cast(T, value.tolist())
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    expected = kind if item else kind.__name__
    raise CheckpointError(f"{path}: metadata key {key!r}: expected {expected}, the file has {found}")


def strings_value(metadata: Mapping[str, Any], path: Path, key: str) -> StringArray:
    """`metadata[key]`, which must be an array of strings, undecoded; as `typed_value` with `list[str]` otherwise."""
    value = metadata.get(key)
    if not isinstance(value, StringArray):
        typed_value(metadata, path, key, list[str])
    return cast(StringArray, value)
