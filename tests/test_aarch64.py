"""NEON and the portable kernels on an emulated aarch64 give the bits that the kernels of this machine give.

The tables of tests/cases run here and are written down as calls of the C ABI with their results
(tests/aarch64/trace.py); a program built for aarch64 repeats the calls under qemu-user and compares every byte.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyferrum as pf
from tests.aarch64.tables import write_tables
from tests.aarch64.trace import Trace

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="no cross compiler and qemu-user here; on aarch64 test_invariance.py runs the kernels themselves",
)

ROOT = Path(__file__).resolve().parent.parent
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]


@pytest.fixture(scope="module")
def programs() -> None:
    """build/replay and build/aarch64/replay with their libraries."""
    names = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    command = ["make", "-j2", f"PYTHON={sys.executable}", "aarch64"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aarch64") / "trace"
    with path.open("wb") as file:
        recorded = Trace(file, pf.default_device())
        write_tables(recorded)
    header = (ROOT / "native/include/ferrum.h").read_text()
    declared = re.findall(r"^int32_t ferrum_(\w+)\([^;]*ferrum_(?:buffer|state|ring) \*\*", header, re.M)
    replayed = re.findall(r"RECORD\((\w+)\),", (ROOT / "tests/aarch64/replay.cpp").read_text())
    # Every call that makes something is in the trace, but for buffers themselves and programs, which repeat such calls.
    assert set(declared) - {"buffer_new", "buffer_wrap", "program_run"} <= recorded.names
    assert set(replayed) <= recorded.names
    return path


def replay(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_trace__says_what_happened_here(programs: None, trace: Path) -> None:
    assert ", 0 outputs differ" in replay(ROOT / "build/replay", trace, "portable", "2")


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("instruction_set", ["neon", "portable"])
def test_aarch64__has_the_bits_of_this_machine(programs: None, trace: Path, instruction_set: str, threads: str) -> None:
    out = replay(*QEMU, ROOT / "build/aarch64/replay", trace, instruction_set, threads)
    assert out.startswith(f"{instruction_set}, {threads} threads: ")


def test_replay__finds_one_wrong_bit(programs: None, trace: Path, tmp_path: Path) -> None:
    spoilt = bytearray(trace.read_bytes())
    spoilt[-8] ^= 1  # of the last result
    (tmp_path / "trace").write_bytes(spoilt)
    done = subprocess.run([ROOT / "build/replay", tmp_path / "trace", "", "1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "dflash2, rounding: ring_read, output 2: 1 of" in done.stderr
