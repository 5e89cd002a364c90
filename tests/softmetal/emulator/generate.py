"""Trampolines: reads the kernels of a preprocessed .metal file and writes the C++ that the emulator calls them through.

    generate.py file STEM PREPROCESSED.i OUTPUT.inc     one file's kernels; OUTPUT.inc is compiled after the file itself
    generate.py table OUTPUT.cpp STEM...                the list of all linked files

The preprocessor has expanded the macros that instantiate kernels, and left the language's own words alone
(FERRUM_GENERATE in emulated_metal.h). Argument attributes are required, and checked.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# Attribute: the member of emu::call, its dimensions.
POSITIONS = {
    "threadgroup_position_in_grid": 3,
    "threadgroups_per_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threads_per_threadgroup": 3,
    "thread_position_in_grid": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "threads_per_simdgroup": 1,
}


class SignatureError(ValueError):
    """A kernel that the emulator, or Metal, would not understand."""


@dataclass
class Argument:
    type: str
    name: str
    attribute: str  # buffer, threadgroup, or a position
    index: str  # of a buffer: an expression
    constant: str  # function constant, or empty

    @property
    def writes(self) -> bool:
        pointed_to = re.findall(r"\w+", self.type.split("*")[0])
        return "device" in pointed_to and "const" not in pointed_to


@dataclass
class Kernel:
    name: str
    arguments: list[Argument]


def split_top(text: str) -> list[str]:
    """Splits at commas outside any bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_argument(kernel: str, text: str) -> Argument:
    text = " ".join(text.split())
    match = re.fullmatch(r"(.*?[\s*&])(\w+) ?\[\[ ?(.*?) ?\]\]", text)
    if not match:
        raise SignatureError(f"{kernel}: an argument without its attribute: {text}")
    type_, name, attributes = match[1].strip(), match[2], split_top(match[3])
    argument = Argument(type_, name, "", "", "")
    for attribute in attributes:
        word = re.fullmatch(r"(\w+)(?: ?\( ?(.*?) ?\))?", attribute)
        if not word:
            raise SignatureError(f"{kernel}: {name}: attribute {attribute}")
        if word[1] == "function_constant":
            argument.constant = word[2]
        elif word[1] in ("buffer", "threadgroup"):
            argument.attribute, argument.index = word[1], word[2]
        elif word[1] in POSITIONS:
            argument.attribute = word[1]
        else:
            raise SignatureError(f"{kernel}: {name}: attribute {attribute} is not one of ours")
    if argument.attribute == "threadgroup" and argument.index != "0":
        raise SignatureError(f"{kernel}: {name}: only threadgroup(0) is emulated")
    if argument.attribute == "buffer" and not re.match(r"(const )?(device|constant)\b", type_):
        raise SignatureError(f"{kernel}: {name}: a buffer is device or constant memory")
    return argument


def parse(source: str) -> tuple[list[Kernel], list[str]]:
    """Kernels, and the names of function constants, of a preprocessed file."""
    source = re.sub(r"^#.*$", "", source, flags=re.MULTILINE)
    kernels = []
    for match in re.finditer(r"\bkernel\s+void\s+(\w+)\s*\(", source):
        depth, end = 1, match.end()
        while depth:
            depth += (source[end] == "(") - (source[end] == ")")
            end += 1
        arguments = [parse_argument(match[1], text) for text in split_top(source[match.end() : end - 1])]
        kernels.append(Kernel(match[1], arguments))
    return kernels, re.findall(r"\bemu_constant\s*\(\s*(\w+)\s*,", source)


def value(argument: Argument) -> str:
    """The C++ expression that a trampoline passes."""
    if argument.attribute == "buffer":
        kind = "reference" if argument.type.endswith("&") else "pointer"
        return f"emu::{kind}<{argument.type}>(call, {argument.index})"
    if argument.attribute == "threadgroup":
        return f"({argument.type})call.threadgroup_memory"
    if POSITIONS[argument.attribute] == 1:
        return f"({argument.type})call.{argument.attribute}"
    size = re.search(r"([23]?)$", argument.type)
    count = int(size[1] or 1) if size else 1
    parts = ", ".join(f"call.{argument.attribute}[{i}]" for i in range(count))
    return f"{argument.type}({parts})"


def trampolines(stem: str, source: str) -> str:
    kernels, constants = parse(source)
    lines = [f"// Kernels of {stem}.metal, for the emulator. Generated.", ""]
    for kernel in kernels:
        buffers = [a for a in kernel.arguments if a.attribute == "buffer"]
        passed = ",\n        ".join(value(a) for a in kernel.arguments)
        lines += [f"static void emu_run_{kernel.name}(const emu::call &call) {{"]
        lines += [f"    {kernel.name}(\n        {passed});", "    (void)call;", "}"]
        lines += [f"static const emu_buffer_argument emu_buffers_of_{kernel.name}[] = {{"]
        for a in buffers:
            constant = f"decltype({a.constant})::index + 1" if a.constant else "0"
            lines += [f"    {{{a.index}, {int(a.writes)}, {constant}}},"]
        lines += ["};" if buffers else "    {}};", ""]
    mask = " | ".join(f"1u << decltype({name})::index" for name in constants) or "0"
    lines += [f"static const emu::linked_kernel emu_kernels_of_{stem}[] = {{"]
    for kernel in kernels:
        count = sum(a.attribute == "buffer" for a in kernel.arguments)
        lines += [f'    {{{{"{kernel.name}", {count}, emu_buffers_of_{kernel.name}, {mask}}}, emu_run_{kernel.name}}},']
    lines += ["};", f"extern const emu::linked_file emu_file_{stem};"]
    lines += [f"const emu::linked_file emu_file_{stem} = {{emu_kernels_of_{stem}, {len(kernels)}}};", ""]
    return "\n".join(lines)


def table(stems: list[str]) -> str:
    lines = ["// All linked .metal files. Generated.", '#include "call.h"', ""]
    lines += [f"extern const emu::linked_file emu_file_{stem};" for stem in stems]
    lines += ["const emu::linked_file *const emu::linked_files[] = {"]
    lines += [f"    &emu_file_{stem}," for stem in stems] or ["    nullptr,"]
    lines += ["};", f"const unsigned emu::linked_file_count = {len(stems)};", ""]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1] == "file":
        stem, source, output = sys.argv[2:]
        Path(output).write_text(trampolines(stem, Path(source).read_text()))
    else:
        Path(sys.argv[2]).write_text(table(sys.argv[3:]))


if __name__ == "__main__":
    main()
