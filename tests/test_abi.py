"""The C ABI: what the library exports is what the header says, byte for byte, and no NULL brings a process down."""

from __future__ import annotations

import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pyferrum
from pyferrum import _native, _native_attention
from pyferrum._cdef import ffi
from tests.cases.dflash2_abi import dflash2_arguments

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "native/include"
HEADER = (INCLUDE / "ferrum.h").read_text()
DARWIN = sys.platform == "darwin"
LIBRARY = Path(pyferrum.__file__).parent / "_libs" / ("libferrum.dylib" if DARWIN else "libferrum.so")
SETS = ("avx2", "avx512") if platform.machine() == "x86_64" else ("portable",)
STRUCTS = re.findall(r"^typedef struct (ferrum_\w+) \{", HEADER + (INCLUDE / "ferrum_kernels.h").read_text(), re.M)
DECLARATION = re.compile(r"^(?!typedef)[a-z][\w *]*?[ *](ferrum_\w+)\([^;{]*\);", re.M)


def run(*command: str | Path, **options: Any) -> str:
    """A tool's output; its complaint where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter in the repository's root."""
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | environment, "timeout": 120}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def declared() -> list[str]:
    return DECLARATION.findall(re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S))


def symbols(path: Path, *options: str) -> Iterator[tuple[str, str]]:
    """(type, name) of each defined symbol of an object or library."""
    for line in run("nm", "--defined-only", *options, path).splitlines():
        if len(fields := line.split()) == 3:
            yield fields[1], fields[2].removeprefix("_" if DARWIN else "")


def test_library__exports_what_the_header_declares_and_nothing_else() -> None:
    names = declared()
    assert len(names) == len(set(names)) >= 35
    exported = {name.split("@")[0] for kind, name in symbols(LIBRARY, "-g" if DARWIN else "-D") if kind != "A"}
    assert exported == set(names)
    assert {name for name in dir(_native.lib) if name.startswith("ferrum_")} == set(names)


def test_header__every_function_is_described() -> None:
    """A comment right above it, or one in its section beside the heading."""
    sections = re.split(r"^/\* ---- .* ---- \*/$|^/\* ---- .*-+ \*/$", HEADER, flags=re.M)
    assert len(sections) > 6
    described = 0
    for section in sections[1:]:
        for function in DECLARATION.finditer(section):
            above = section[: function.start()].rstrip()
            assert above.endswith("*/") or "/*" in section, f"{function[1]} has no comment"
            described += 1
    assert described == len(declared())


@pytest.mark.parametrize("order", [("ferrum.h",), ("ferrum_kernels.h",), ("ferrum_kv_layout.h", "ferrum.h")])
@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_header__compiles_alone_without_a_warning(order: tuple[str, ...], language: str, tmp_path: Path) -> None:
    cxx = "++" in language
    source = tmp_path / ("t.cpp" if cxx else "t.c")
    includes = "".join(f'#include "{name}"\n' for name in order * 2)
    source.write_text(f"{includes}int main(void) {{ return 0; }}\n")
    flags = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-I{INCLUDE}", f"-std={language}")
    run("c++" if cxx else "cc", *flags, source)


def test_structs__have_the_layout_that_cffi_thinks_they_have(tmp_path: Path) -> None:
    assert len(STRUCTS) >= 20
    expected, lines = {}, []
    for name in STRUCTS:
        expected[name] = ffi.sizeof(name)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in ffi.typeof(name).fields:
            expected[f"{name}.{field}"] = ffi.offsetof(name, field)
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    source, program = tmp_path / "t.c", tmp_path / "t"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "ferrum.h"\n#include "ferrum_kernels.h"\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    run("cc", "-std=c11", f"-I{INCLUDE}", source, "-o", program)
    found = {name: int(value) for name, value in (line.split() for line in run(program).splitlines())}
    assert found == expected


def test_params__are_small_whole_words_without_holes_or_pointers() -> None:
    """The rules at the head of ferrum_kernels.h: the same bytes for a C compiler, a C++ one and a shader's."""
    most = _native.constant("FERRUM_MAX_PARAMS")
    params = [name for name in STRUCTS if name.endswith("_params")]
    assert len(params) >= 8
    for name in params:
        kind = ffi.typeof(name)
        assert ffi.sizeof(name) % 8 == 0, name
        assert ffi.sizeof(name) <= most, name
        types = [field.type for _, field in kind.fields]
        assert {t.cname for t in types} <= {"uint32_t", "uint64_t", "float"}, name
        assert sum(ffi.sizeof(t) for t in types) == ffi.sizeof(name), f"{name} has a hole"
        assert [ffi.sizeof(t) for t in types] == sorted((ffi.sizeof(t) for t in types), reverse=True), name
    lengths = {
        name: field.type.length for name, field in ffi.typeof("ferrum_launch").fields if field.type.kind == "array"
    }
    assert lengths == {"grid": 3, "threads": 3, "bindings": _native.constant("FERRUM_MAX_BINDINGS"), "params": most}
    assert dict(ffi.typeof("ferrum_tensor").fields)["shape"].type.length == _native.constant("FERRUM_MAX_RANK")


@pytest.mark.parametrize("set_name", SETS)
def test_kernels__of_one_instruction_set_cannot_be_picked_for_another(set_name: str) -> None:
    """A weak symbol compiled for AVX-512 may be the one the linker keeps for everybody: SIGILL on an older machine."""
    objects = sorted((ROOT / "build/cpu" / set_name).glob("*.o"))
    assert len(objects) >= 5, "run `make lib` first"
    for path in objects:
        shared = [name for kind, name in symbols(path) if kind in "WVuC"]
        assert not shared, f"{path.name}: weak or common symbols {shared}"
        foreign = [name for kind, name in symbols(path) if kind.isupper() and set_name not in name]
        assert not foreign, f"{path.name}: global symbols outside namespace {set_name}: {foreign}"


def test_library__has_no_path_of_this_machine_to_look_for_others() -> None:
    """absadiki/pywhispercpp#59; abetlen/llama-cpp-python#1285 (H7): no run path into a build tree, no stray library."""
    dynamic = run("otool", "-l", LIBRARY) if DARWIN else run("readelf", "-d", LIBRARY)
    assert not re.search(r"RPATH|RUNPATH", dynamic)
    if not DARWIN:
        needed = re.findall(r"NEEDED.*\[(.*?)\]", dynamic)
        assert needed
        assert all(re.match(r"(libc|libm|libpthread|libdl|librt|ld-linux.*)\.so", name) for name in needed), needed


def valid_arguments() -> dict[str, Callable[[], list[Any]]]:
    """For every function with a pointer argument, arguments that make it succeed."""
    lib = _native.lib

    def new(kind: str, call: Callable[[Any], int]) -> Any:
        out = ffi.new(f"{kind} **")
        assert call(out) == 0, ffi.string(lib.ferrum_last_error())
        return out[0]

    device = new("ferrum_device", lambda out: lib.ferrum_device_new(b"cpu", ffi.new("ferrum_device_options *"), out))
    buffer = new("ferrum_buffer", lambda out: lib.ferrum_buffer_new(device, 4096, out))
    data, size = ffi.new("void **"), ffi.new("uint64_t *")
    assert lib.ferrum_buffer_contents(buffer, data, size) == 0
    ffi.memmove(data[0], bytes(4096), 4096)

    def tensor(shape: tuple[int, ...], format: str = "F16") -> Any:
        number = _native.constant("FERRUM_FORMAT_I32") if format == "I32" else _native.formats()[format][0]
        return ffi.new("ferrum_tensor *", [buffer, 0, [*shape], len(shape), number])

    sizes = {"maximum_context_tokens": 64, "hidden_size": 8, "query_heads": 2, "key_value_heads": 1, "head_dim": 4}
    config = ffi.new("ferrum_attention_config *", sizes | {"rope_dim": 4, "epsilon": 1e-5, "rope_attention_factor": 1})
    frequencies = ffi.new("double[]", [1.0, 0.5])
    attention = new("ferrum_attention", lambda out: lib.ferrum_attention_new(device, config, frequencies, out))
    state = new("ferrum_state", lambda out: lib.ferrum_state_new(device, 1, 4, out))
    kv, x, row, wide = tensor((3, 1, 4)), tensor((2, 8)), tensor((8,)), tensor((2, 8), "F32")
    state = new("ferrum_state", lambda out: lib.ferrum_state_append(state, kv, kv, out))
    q, k, tokens = tensor((8, 8)), tensor((4, 8)), tensor((2,), "I32")
    weights = ffi.new("ferrum_attention_weights *", [row[0], q[0], k[0], k[0], q[0]])
    counts = ffi.new("uint64_t[]", [2])
    formats = {"participants": 1, "hidden_format": 1, "projection_formats": [1] * 4}
    request = ffi.new("ferrum_plan_request *", formats | {"starts": counts, "tokens": counts})
    plan = new("ferrum_plan", lambda out: lib.ferrum_attention_plan(attention, request, out))
    states, xs = ffi.new("ferrum_state *[]", [state]), ffi.new("ferrum_tensor[]", [x[0]])
    own, norm = ffi.new("ferrum_tensor *", x[0]), ffi.new("ferrum_tensor *", x[0])
    own.buffer = new("ferrum_buffer", lambda out: lib.ferrum_buffer_new(device, 2 * 8 * 2, out))
    assert lib.ferrum_program_begin(device, 1, 1, own, 1, states) == 0
    norm.buffer = new("ferrum_buffer", lambda out: lib.ferrum_rms_norm(device, own, row, 1e-5, out))
    program = new("ferrum_program", lambda out: lib.ferrum_program_end(1, norm, 0, states, out))
    outside, new_state, new_y = ffi.from_buffer(bytearray(64)), ffi.new("ferrum_state **"), ffi.new("ferrum_buffer **")
    o = ffi.new
    return {
        "debug_counts": lambda: [o("ferrum_counts *")],
        "format_at": lambda: [0, o("ferrum_format_info *")],
        "device_new": lambda: [o("char[]", b"cpu"), o("ferrum_device_options *"), o("ferrum_device **")],
        "device_release": lambda: [o("ferrum_device **")],
        "device_describe": lambda: [device, o("ferrum_device_summary *")],
        "device_arena_stats": lambda: [device, o("ferrum_arena_stats *")],
        "buffer_new": lambda: [device, 64, o("ferrum_buffer **")],
        "buffer_wrap": lambda: [device, ffi.cast("void *", outside), 64, o("ferrum_buffer **")],
        "buffer_release": lambda: [o("ferrum_buffer **")],
        "buffer_contents": lambda: [buffer, o("void **"), o("uint64_t *")],
        "weight_prepare": lambda: [device, q, o("uint64_t *")],
        "state_new": lambda: [device, 1, 4, o("ferrum_state **")],
        "state_release": lambda: [o("ferrum_state **")],
        "states_release": lambda: [o("ferrum_state *[1]")],
        "state_describe": lambda: [state, o("ferrum_state_summary *")],
        "state_pages": lambda: [state, 4, o("uint64_t[4]"), o("uint64_t *")],
        "state_truncate": lambda: [state, 1, o("ferrum_state **")],
        "state_append": lambda: [state, kv, kv, o("ferrum_state **")],
        "state_read": lambda: [state, 0, 2, o("ferrum_buffer **"), o("ferrum_buffer **")],
        "attention_new": lambda: [device, config, frequencies, o("ferrum_attention **")],
        "attention_release": lambda: [o("ferrum_attention **")],
        "causal_attention": lambda: [
            *(attention, weights, 0, 1, states, counts, xs),
            *(o("ferrum_state **[]", [new_state]), o("ferrum_buffer **[]", [new_y])),
        ],
        "attention_plan": lambda: [attention, request, o("ferrum_plan **")],
        "plan_release": lambda: [o("ferrum_plan **")],
        "plan_describe": lambda: [plan, o("ferrum_plan_summary *")],
        "plan_launch": lambda: [plan, 0, o("ferrum_launch *")],
        "plan_resource": lambda: [plan, 0, o("ferrum_resource *")],
        "program_begin": lambda: [device, 1, 1, own, 1, states],
        "program_end": lambda: [1, norm, 1, states, o("ferrum_program **")],
        "program_abandon": lambda: [],
        "program_release": lambda: [o("ferrum_program **")],
        "program_run": lambda: [
            *(program, x, ffi.NULL, states, o("ferrum_buffer **[]", [new_y])),
            *(0, o("uint32_t[1]"), o("ferrum_state **[1]"), o("uint64_t[1]")),
        ],
        "rms_norm": lambda: [device, x, row, 1e-5, o("ferrum_buffer **")],
        "linear": lambda: [device, x, q, row, 1, o("ferrum_buffer **")],
        "embed": lambda: [device, tokens, q, 1, o("ferrum_buffer **")],
        "swiglu": lambda: [device, x, x, o("ferrum_buffer **")],
        "residual_add": lambda: [device, x, x, o("ferrum_buffer **")],
        "cross_entropy": lambda: [device, wide, tokens, o("ferrum_buffer **")],
        "argmax": lambda: [device, wide, o("ferrum_buffer **")],
        "top_k": lambda: [device, wide, 2, o("ferrum_buffer **"), o("ferrum_buffer **")],
        **dflash2_arguments(device, new, tensor, wide, x, row),
    }


MAY_BE_NULL = {
    *(("device_new", 1), ("buffer_contents", 2), ("linear", 3), ("dflash2_heads", 2)),
    *(("program_run", at) for at in (2, 6, 7, 8)),
}
HUGE = (1 << 64) - 1
HOSTILE_TENSORS: list[dict[str, Any]] = [
    {"buffer": ffi.NULL},
    *({"rank": rank} for rank in (0, 4, 5, 9, HUGE >> 32)),
    *({"offset": offset} for offset in (1, 4095, 4096, 1 << 32, HUGE)),
    *({"format": number} for number in (4, 31, 9999, HUGE >> 32)),
    {"format": 14, "shape": [1 << 60, 256, 0, 0]},
    *({"shape": [rows, width, width, 1]} for rows in (2, 1 << 31, 1 << 63) for width in (1 << 31, 1 << 40, HUGE)),
    {"shape": [0, 1 << 40, 4, 0]},
    {"shape": [1 << 40, 0, 0, 0]},
]


def report(name: str, arguments: list[Any], what: str, message: bytes) -> None:
    """Print whatever is wrong about a call that should be refused with `message`."""
    kinds, lib = ffi.typeof(getattr(_native.lib, f"ferrum_{name}")).args, _native.lib
    handles = [a for a, kind in zip(arguments, kinds, strict=True) if kind.kind == "pointer" and a != ffi.NULL]
    handles = [a for a in handles if ffi.typeof(a).item.kind == "pointer"]
    handles += [a[0] for a in handles if ffi.typeof(a).item.item.kind == "pointer" and a[0] != ffi.NULL]
    before, old = _native.debug_counts(), [a[0] for a in handles]
    status, after = getattr(lib, f"ferrum_{name}")(*arguments), _native.debug_counts()
    error = ffi.string(lib.ferrum_last_error())
    if status not in (lib.FERRUM_INVALID_ARGUMENT, lib.FERRUM_UNSUPPORTED) or message not in error:
        print(f"ferrum_{name}, {what}: status {status}, {error!r}")
    if after != before:
        print(f"ferrum_{name}, {what}: leaked {[key for key in after if after[key] != before[key]]}")
    if [a[0] for a in handles] != old:
        print(f"ferrum_{name}, {what}: wrote an output though it failed")


def null_arguments() -> None:
    """Every pointer NULL, one by one and all at once."""
    table = valid_arguments()
    for name in (n.removeprefix("ferrum_") for n in declared()):
        function = getattr(_native.lib, f"ferrum_{name}")
        kind = ffi.typeof(function)
        pointers = [i for i, argument in enumerate(kind.args) if argument.kind == "pointer"]
        for chosen in ([i] for i in pointers):
            arguments = [ffi.NULL if i in chosen else a for i, a in enumerate(table[name]())]
            if kind.result.kind == "void":
                function(*arguments)
                function(*table[name]())  # a variable that holds NULL
            elif (name, *chosen) in MAY_BE_NULL:
                assert function(*arguments) == 0, f"ferrum_{name} refused an argument that may be NULL"
            else:
                report(name, arguments, f"argument {chosen[0]} NULL", b"NULL")
        if pointers and kind.result.kind != "void":
            arguments = [ffi.NULL if i in pointers else a for i, a in enumerate(table[name]())]
            report(name, arguments, "all NULL", b"NULL")


def hostile_structs() -> None:
    """Tensors, weights and requests whose fields are NULL, absurd or just too large."""
    table = valid_arguments()
    kinds = {name: ffi.typeof(getattr(_native.lib, f"ferrum_{name}")).args for name in table}
    slots = [(name, at) for name in table for at, k in enumerate(kinds[name]) if k is ffi.typeof("ferrum_tensor *")]
    # A recording starts and ends with tensors of any shape; test_jit.py has what it refuses.
    slots = [(name, at) for name, at in slots if name not in ("program_begin", "program_end")]
    assert len(slots) == 45
    for (name, at), change in itertools.product(slots, HOSTILE_TENSORS):
        arguments = table[name]()
        arguments[at] = ffi.new("ferrum_tensor *", arguments[at][0])
        optional = (name, at) in MAY_BE_NULL and "buffer" in change  # no buffer: an absent tensor
        if (
            optional
            or arguments[at].rank == change.get("rank")
            or (arguments[at].rank == 1 and change.get("shape", [HUGE])[0] < 3)
        ):
            continue
        for field, value in change.items():
            setattr(arguments[at], field, value)
        report(name, arguments, f"argument {at}: {change}", b": ")
    for field in _native_attention.WEIGHT_FIELDS[:5]:
        for change in HOSTILE_TENSORS:
            arguments = table["causal_attention"]()
            arguments[1] = ffi.new("ferrum_attention_weights *", arguments[1][0])
            for key, value in change.items():
                setattr(getattr(arguments[1], field), key, value)
            report("causal_attention", arguments, f"weights.{field}: {change}", f"weights.{field}:".encode())
    arguments = table["causal_attention"]()
    report(
        "causal_attention", [*arguments[:4], ffi.new("ferrum_state *[1]"), *arguments[5:]], "states[0] NULL", b"NULL"
    )
    for count in (0, 1, 3, 1 << 31, HUGE):
        tokens = ffi.new("uint64_t[]", [count])
        report("causal_attention", [*arguments[:5], tokens, *arguments[6:]], f"{count} tokens", b"x: expected")
    for field in ("starts", "tokens"):
        arguments = table["attention_plan"]()
        arguments[1] = ffi.new("ferrum_plan_request *", arguments[1][0])
        setattr(arguments[1], field, ffi.NULL)
        report("attention_plan", arguments, f"request.{field} NULL", b"NULL")


@pytest.mark.parametrize("calls", [null_arguments, hostile_structs])
def test_bad_arguments__are_a_status_and_leave_everything_as_it_was(calls: Callable[[], None]) -> None:
    """In a process of its own, which a wild pointer would end. No line of output: every call answered as it should."""
    result = python(f"from tests import test_abi; test_abi.{calls.__name__}(); print('done')")
    assert result.returncode == 0, f"exit {result.returncode}: {result.stdout[-500:]}{result.stderr}"
    assert result.stdout.splitlines() == ["done"]


def test_release__clears_the_variable_and_counts_once() -> None:
    lib, device, buffer = _native.lib, ffi.new("ferrum_device **"), ffi.new("ferrum_buffer **")
    before = _native.debug_counts()
    assert lib.ferrum_device_new(b"cpu", ffi.NULL, device) == lib.ferrum_buffer_new(device[0], 8, buffer) == 0
    both = {key: before[key] + (key in ("devices", "buffers")) for key in before}
    for _ in range(2):
        lib.ferrum_device_release(device)  # lives on until its last buffer is gone
        assert (device[0], _native.debug_counts()) == (ffi.NULL, both)
    for _ in range(2):
        lib.ferrum_buffer_release(buffer)
        assert (buffer[0], _native.debug_counts()) == (ffi.NULL, before)


def test_import__library_of_another_abi_names_both_versions(tmp_path: Path) -> None:
    """abetlen/llama-cpp-python#2045 (H9): an ImportError that says what was found and what is needed."""
    other = tmp_path / "libother.so"
    (tmp_path / "t.c").write_text("unsigned ferrum_abi_version(void) { return 999; }\n")
    run("cc", "-shared", "-fPIC", tmp_path / "t.c", "-o", other)
    result = python("import pyferrum", PYFERRUM_LIBRARY=str(other))
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {other} has ABI version 999")
    assert f"needs {_native.constant('FERRUM_ABI_VERSION')}" in error


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_import__library_that_is_not_there_names_the_path(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "libgone.so"
    if content is not None:
        path.write_bytes(content)
    result = python("import pyferrum", PYFERRUM_LIBRARY=str(path))
    assert result.returncode == 1
    assert re.match(rf"ImportError: cannot load {path}: .*PYFERRUM_LIBRARY", result.stderr.splitlines()[-1])
