"""What can be said of a .metal file without running it.

`check_a` and `check_b` compile it twice with address spaces that may not be mixed: as C++17 (implicit conversions are
errors) and as C++ for OpenCL (casts are, too). `lint` looks for what those accept and Metal, or the emulator, does not.
Each returns complaints, one a line, with file and line; an empty list is a pass.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.softmetal.emulator import generate

ROOT = Path(__file__).resolve().parents[2]
CLANG = "clang-19"
COMMON_HEADER = "common.h"

INCLUDES = [
    "-DFERRUM_EMULATED",
    "-D__METAL_VERSION__=300",
    f"-I{ROOT / 'tests/softmetal/emulator'}",
    f"-I{ROOT / 'shaders'}",
    f"-I{ROOT / 'native/include'}",
    "-include",
    "emulated_metal.h",
]
A = ["-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-DFERRUM_CHECK=1"]
B = [
    *["-x", "cl", "-cl-std=CLC++2021", "-target", "x86_64-linux-gnu", "-cl-no-stdinc"],
    *["-Xclang", "-ffake-address-space-map"],
    "-Xclang",
    "-cl-ext=-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue,+cl_khr_fp16",
    "-DFERRUM_CHECK=2",
]


def _complaints(path: Path, flags: Iterable[str]) -> list[str]:
    command = [CLANG, "-fsyntax-only", "-Wno-unknown-attributes", "-ferror-limit=0", *flags, *INCLUDES, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in done.stderr.splitlines() if re.search(r": (fatal )?(error|warning): ", line)]
    if done.returncode and not found:
        found = [done.stderr]
    return found


def check_a(path: Path) -> list[str]:
    return _complaints(path, A)


def check_b(path: Path) -> list[str]:
    return _complaints(path, B)


def preprocessed(path: Path) -> str:
    """With macros expanded but for the language's own words, as generate.py reads it."""
    command = [CLANG, "-E", "-P", "-x", "c++", "-DFERRUM_GENERATE", *INCLUDES, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kernels(path: Path) -> list[generate.Kernel]:
    return generate.parse(preprocessed(path))[0]


def _code(text: str) -> str:
    """`text` with comments and strings blanked out, line for line."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


VECTOR = r"(?:half|float|u?char|u?short|u?int|u?long)[234]"
# Pattern, why not; everywhere.
FORBIDDEN = [
    (r"\bdouble\b", "Metal has no double"),
    (r"\bhost_name\b", "kernels are instantiated by a macro, not by [[host_name]] on a template"),
    (rf"\(\s*{VECTOR}\s*\)\s*[\w(]", "a vector is converted by its constructor, not by a cast"),
    (rf"static_cast\s*<\s*{VECTOR}\s*>", "a vector is converted by its constructor, not by a cast"),
    (r"__attribute__\s*\(\(\s*(?!__)\w", "other attributes are spelled __attribute__((__x__))"),
    (r"\[\[\s*threadgroup\s*\(", "spelled FERRUM_THREADGROUP_ARGUMENT"),
    (r"\b(?:new|delete|goto|virtual|throw|try|dynamic_cast|typeid)\b", "not in Metal"),
    (r"\basm\b", "not in Metal"),
    (r"\batomic_\w+", "sums of atomics come in no fixed order"),
    (r"\bfast\s*::", "the contract's arithmetic is the precise one"),
    (r"\bFERRUM_EMULATED\b", "a shader does not know that it is emulated"),
    (r"\b\w+\s*=\s*\*\s*\(?\s*(?:params|pages)\b", "no struct is copied out of constant or device memory"),
]
# … but for the common header.
COMMON_ONLY = [
    (r"#\s*include\s*<", "only common.h includes Metal's library"),
    (r"\bmetal\s*::", "only common.h says metal::"),
    (r"\bfunction_constant\s*\(\s*\d", "function constants are declared by FERRUM_CONSTANT"),
    (r"\bthreadgroup\s+\w+\s+\w+\s*\[", "threadgroup arrays are declared by FERRUM_THREADGROUP"),
]
MAY_DIFFER_IN_COMMON = {r"\bFERRUM_EMULATED\b"}

# 32-bit counts that are multiplied by an index must be widened first. Names as in the params structs.
OFFSET = re.compile(r"(?<![\w.)\]])([\w.]+(?:\[\w+\])?)\s*\*\s*(?:\w+\.)?(?:\w*_stride|row_elements|page_bytes)\b(?!_)")
WIDE = re.compile(r"\b(?:ulong|uint64_t|size_t)\s*\(?\s*$|\((?:ulong|uint64_t|size_t)\)\s*$")


def lint(path: Path) -> list[str]:
    """The dialect that the static checks, the emulator and Metal all accept."""
    text = path.read_text()
    code = _code(text)
    found: list[tuple[int, str]] = []

    def complain(at: int, why: str) -> None:
        found.append((code.count("\n", 0, at) + 1, why))

    rules = list(FORBIDDEN)
    if path.name == COMMON_HEADER:
        rules = [rule for rule in rules if rule[0] not in MAY_DIFFER_IN_COMMON]
    else:
        rules += COMMON_ONLY
    for pattern, why in rules:
        for match in re.finditer(pattern, code):
            complain(match.start(), why)
    for match in OFFSET.finditer(code):
        before = code[: match.start()].rstrip()
        if not WIDE.search(before) and not before.endswith("*") and not match[1].isdigit():
            complain(match.start(), f"a 32-bit offset: ulong({match[1]}) * …")
    for name, start, body in _functions(code):
        # name<…>(…) is an overload; a template that calls its own instance would not end compiling.
        if re.search(rf"(?<![\w.]){name}\s*\(", body) and not name.isupper():
            complain(start, f"{name} calls itself")
    if path.suffix == ".metal":
        try:
            kernels(path)
        except (generate.SignatureError, subprocess.CalledProcessError) as error:
            complain(0, str(error))
    return [f"{path.name}:{line}: {why}" for line, why in sorted(found)]


def _functions(code: str) -> Iterable[tuple[str, int, str]]:
    """Name, place and body of what looks like a function definition."""
    for match in re.finditer(r"\b(\w+)\s*\(((?:[^(){};]|\([^(){};]*\))*)\)\s*\{", code):
        if match[1] in ("if", "for", "while", "switch"):
            continue
        depth, end = 1, match.end()
        while depth and end < len(code):
            depth += (code[end] == "{") - (code[end] == "}")
            end += 1
        yield match[1], match.start(), code[match.end() : end]


def shaders() -> list[Path]:
    return sorted((ROOT / "shaders").glob("*.metal"))


def sources() -> list[Path]:
    return sorted(path for path in (ROOT / "shaders").iterdir() if path.suffix in (".metal", ".h"))
