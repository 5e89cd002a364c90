"""A checkpoint file of an evaluation: JSON lines that are only ever appended, so that it can end at any moment."""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pyferrum.errors import InvalidArgument
from pyferrum.evaluate.work import Scored


class Journal:
    """Scores that an evaluation has so far, on disk.

    The first line says what is measured; every further line is a window that has been scored. A line is written in one
    piece and synced, so after an interruption all lines but the last one are whole, and a torn last one is dropped.
    The file is locked while it is open: two evaluations cannot work on it at once.

    Args:
        path: the file; made if it is not there.
        measures: plain data that says what is measured.

    Raises:
        InvalidArgument: the file is in use, is not a checkpoint of an evaluation, or is one of something else.
    """

    def __init__(self, path: str | os.PathLike[str], measures: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidArgument(f"checkpoint: {path} is in use by another evaluation") from error
            self._done = self._read(json.loads(json.dumps(measures)))
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> Mapping[int, Scored]:
        """What was there when the file was opened, by number."""
        return MappingProxyType(self._done)

    def append(self, number: int, scored: Scored) -> None:
        """Keep the scores of a window."""
        nlls = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in scored.nlls]
        self._write({"unit": number, "nlls": nlls, "greedy": list(scored.greedy), "device": dict(scored.device)})

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        while line:  # a full disk may take a part of it, and then raises
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _read(self, measures: Mapping[str, Any]) -> dict[int, Scored]:
        text = self._path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole == 0 and text and not b'{"evaluation": '.startswith(text[:15]):
            raise InvalidArgument(f"checkpoint: {self._path} is not a checkpoint of an evaluation")
        lines = text[:whole].splitlines()
        header = self._entry(lines[0], 1).get("evaluation") if lines else None
        if lines and not isinstance(header, dict):
            raise InvalidArgument(f"checkpoint: {self._path} is not a checkpoint of an evaluation")
        if header is not None and header != measures:
            names = [name for name in {**header, **measures} if header.get(name) != measures.get(name)]
            shown = "; ".join(f"{name} {header.get(name)!r}, now {measures.get(name)!r}" for name in sorted(names))
            raise InvalidArgument(f"checkpoint: {self._path} is of another evaluation: {shown}")
        os.ftruncate(self._file, whole)
        if not lines:
            self._write({"evaluation": measures})
        done = {}
        for number, line in enumerate(lines[1:], 2):
            entry = self._entry(line, number)
            try:
                stored = (base64.b64decode(row, validate=True) for row in entry["nlls"])
                rows = tuple(np.frombuffer(row, "<f4").astype(np.float32) for row in stored)
                done[int(entry["unit"])] = Scored(rows, tuple(entry["greedy"]), dict(entry["device"]))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(f"checkpoint: line {number} of {self._path} is damaged: {error!r}") from error
        return done

    def _entry(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidArgument(f"checkpoint: line {number} of {self._path} is damaged: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidArgument(f"checkpoint: {self._path} is not a checkpoint of an evaluation")
        return entry
