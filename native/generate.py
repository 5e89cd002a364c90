"""What the build derives from the sources: the cffi declarations and the implementation fingerprint.

python native/generate.py cdef OUT.py          declarations of ferrum.h and ferrum_kernels.h
python native/generate.py fingerprint OUT.cpp  SHA-256 over everything the library is built from
"""

from __future__ import annotations

import hashlib
import re
import sys
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
        '#include "../native/include/ferrum.h"\n\n'
        f'const char *ferrum_build_fingerprint(void) {{ return "{digest.hexdigest()}"; }}\n'
    )


if __name__ == "__main__":
    {"cdef": write_cdef, "fingerprint": write_fingerprint}[sys.argv[1]](Path(sys.argv[2]))
