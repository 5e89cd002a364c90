"""Checks that a Mach-O library exports the functions of a C header, and nothing else.

python native/metal/exports.py libferrum.dylib ferrum.h
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

MAGIC_64, ARM64 = 0xFEEDFACF, 0x0100000C
LC_SYMTAB = 2
# The linker's own, and the replaceable operators new and delete that a statically linked libc++ brings along.
ALLOWED = re.compile(r"__dso_handle|_mh_dylib_header|_Z(n[aw]|d[al])\w+")
N_EXT, N_PEXT, N_TYPE, N_SECT = 0x01, 0x10, 0x0E, 0x0E


def exported(data: bytes) -> set[str]:
    """Names of the symbols that a 64-bit arm64 Mach-O file defines for others, without their underscore."""
    magic, machine, _, _, commands, _ = struct.unpack_from("<6I", data)
    if (magic, machine) != (MAGIC_64, ARM64):
        raise SystemExit("not a Mach-O file for arm64")
    names, at = set(), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command == LC_SYMTAB:
            symbols, count, strings, _ = struct.unpack_from("<4I", data, at + 8)
            for i in range(count):
                name, kind = struct.unpack_from("<IB", data, symbols + 16 * i)
                if kind & N_EXT and not kind & N_PEXT and kind & N_TYPE == N_SECT:
                    start = strings + name
                    names.add(data[start : data.index(b"\0", start)].decode().removeprefix("_"))
        at += size
    return names


def declared(header: str) -> set[str]:
    """Functions that a C header declares."""
    return set(re.findall(r"\b(ferrum_\w+)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.S)))


def main(library: str, header: str) -> None:
    """Ends with a message if the two differ."""
    found = {name for name in exported(Path(library).read_bytes()) if not ALLOWED.fullmatch(name)}
    wanted = declared(Path(header).read_text())
    if found != wanted:
        raise SystemExit(f"{library}: missing {sorted(wanted - found)}, exported by mistake {sorted(found - wanted)}")
    print(f"{library}: exports the {len(wanted)} functions of {header}")


if __name__ == "__main__":
    main(*sys.argv[1:])
