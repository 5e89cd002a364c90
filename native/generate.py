"""What the build derives from the sources: cffi declarations, fingerprint, embedded shaders.

python native/generate.py cdef OUT.py          declarations of ferrum.h and ferrum_kernels.h
python native/generate.py fingerprint OUT.cpp  SHA-256 over everything the library is built from
python native/generate.py shaders OUT.metal    all shaders as one source, each header once
python native/generate.py embed OUT.c NAME=[FILE] ...   files as `NAME[]`, `NAME_size`; no FILE: no bytes
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("native/include/ferrum_kernels.h", "native/include/ferrum.h")


def declarations(header: str) -> str:
    """The header as cffi parses it: without comments, preprocessor lines and the C++ linkage braces."""
    text = (ROOT / header).read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = re.sub(r"#ifdef __METAL_VERSION__.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
    return text


def write_cdef(out: Path) -> None:
    """Write the out-of-line ABI-mode module that `pyferrum._native` imports."""
    from cffi import FFI

    ffi = FFI()
    ffi.set_source("pyferrum._cdef", None)
    for header in HEADERS:
        ffi.cdef(declarations(header))
    ffi.emit_python_code(str(out))


def write_fingerprint(out: Path) -> None:
    """Write `ferrum_build_fingerprint`: a digest over names and contents of all native sources and shaders."""
    digest = hashlib.sha256()
    suffixes = {".h", ".c", ".cpp", ".m", ".metal"}
    sources = [p for folder in ("native", "shaders") for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    for path in sorted([*sources, ROOT / "Makefile"]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    out.write_text(
        f'#include "ferrum.h"\n\nconst char *ferrum_build_fingerprint(void) {{ return "{digest.hexdigest()}"; }}\n'
    )


def write_shaders(out: Path) -> None:
    """Write shaders/*.metal as one file for Metal to compile at run time: quoted includes put in where they stand."""
    seen: set[Path] = set()

    def flat(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        lines = [f'#line 1 "{path.name}"']
        for number, line in enumerate(path.read_text().splitlines(), 1):
            included = re.fullmatch(r'\s*#\s*include\s+"([^"]+)"\s*', line)
            folders = (path.parent, ROOT / "native/include")
            found = [folder / included[1] for folder in folders if (folder / included[1]).exists()] if included else []
            if found:
                lines += [flat(found[0].resolve()), f'#line {number + 1} "{path.name}"']
            elif not re.fullmatch(r"\s*#\s*pragma\s+once\s*", line):
                lines.append(line)
        return "\n".join(lines)

    out.write_text("\n".join(flat(path.resolve()) for path in sorted((ROOT / "shaders").glob("*.metal"))) + "\n")


def write_embedded(out: Path, *pairs: str) -> None:
    """Write a C file with the bytes of files."""
    parts = []
    for pair in pairs:
        name, _, file = pair.partition("=")
        data = Path(file).read_bytes() if file else b""
        rows = [", ".join(map(str, data[i : i + 24])) for i in range(0, len(data), 24)]
        # One zero more than the size says: the source is a C string, and no array is empty.
        parts.append(f"const unsigned char {name}[] = {{\n" + ",\n".join([*rows, "0"]) + "};\n")
        parts.append(f"const unsigned long long {name}_size = {len(data)};\n")
    out.write_text("\n".join(parts))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "cdef": write_cdef,
        "fingerprint": write_fingerprint,
        "shaders": write_shaders,
        "embed": write_embedded,
    }
    command, target, *rest = sys.argv[1:]
    commands[command](Path(target), *rest)
