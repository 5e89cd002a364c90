"""What a number was measured with: the model's files, devices, library, packages, text."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pyferrum
from pyferrum.checkpoint import open_gguf, open_safetensors
from pyferrum.models.model import Model

PACKAGES = ("numpy", "tokenizers", "jinja2", "lm_eval")


def model_facts(model: Model) -> dict[str, Any]:
    """Name, hash and architecture of a model."""
    return {"name": model.path.name, "sha256": model_sha256(model.path), "architecture": model.config.architecture}


def model_sha256(path: str | Path) -> str:
    """SHA-256, as 64 hex digits, of a checkpoint wherever it lies.

    Of a GGUF file, that of its bytes. Of several files (shards, or a safetensors folder with its .json and .jinja
    files), that of their names and hashes. Remembered in this process while size and time of a file stay the same.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        files = list(open_gguf(path).files)
        if len(files) == 1:
            return _file_sha256(files[0])
    else:
        folder = path if path.is_dir() else path.parent
        files = [*open_safetensors(path).files, *folder.glob("*.json"), *folder.glob("*.jinja")]
    lines = {file.name: _file_sha256(file) for file in files}
    return hashlib.sha256("".join(f"{name} {lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    stat = path.stat()
    return _sha256(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _sha256(path: str, _size: int, _modified: int) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def device_facts(model: Model) -> dict[str, Any]:
    """Device and library build that a model runs on; what bits may depend on, and not the number of threads."""
    info = model.device.info()
    return {name: info[name] for name in ("name", "instruction_set", "build")}


def versions() -> dict[str, str]:
    """Of Python, pyferrum and the packages that a score goes through, as far as they are installed."""
    found = {"python": platform.python_version(), "pyferrum": pyferrum.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def tokens_sha256(rows: Iterable[Iterable[int]]) -> str:
    """SHA-256 of lists of integers, and of where one ends and the next begins."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(" ".join(map(str, row)).encode() + b"\n")
    return digest.hexdigest()
