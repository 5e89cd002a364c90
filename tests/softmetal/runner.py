"""Builds the emulator's programs and runs shaders in them, each run in a process of its own (emulator/run.cpp)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SOFT = ROOT / "build" / "softmetal"
VARIANTS = ("plain", "asan", "tsan")

# A sanitizer ends the program with its own status; a failed dispatch with another.
FAILED_DISPATCH = 3
ASAN_STATUS = 55
TSAN_STATUS = 66
ENVIRONMENT = {
    "ASAN_OPTIONS": f"exitcode={ASAN_STATUS}:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"exitcode={TSAN_STATUS}:halt_on_error=1",
}


@cache
def make(*targets: str) -> None:
    """Builds targets of softmetal.mk, once a session."""
    command = ["make", "-j2", "-f", "tests/softmetal/softmetal.mk", f"PYTHON={sys.executable}", *targets]
    # Of a make that runs the tests, nothing is inherited.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@dataclass
class Result:
    status: int
    message: str  # stderr
    outputs: dict[str, np.ndarray] = field(default_factory=dict)


class Program:
    """A run of `program` being written down: buffers, dispatches, and what to bring back."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.commands: list[str] = []
        self.saved: dict[str, np.dtype] = {}

    def order(self, seed: int) -> None:
        self.commands.append(f"order {seed}")

    def buffer(self, name: str, values: np.ndarray) -> None:
        np.ascontiguousarray(values).tofile(self.folder / f"{name}.in")
        self.commands.append(f"buffer {name} {name}.in")

    def zeros(self, name: str, count: int, dtype: type = np.float32) -> None:
        self.commands.append(f"zeros {name} {count * np.dtype(dtype).itemsize}")

    def table(self, name: str, *pages: str) -> None:
        self.commands.append(f"table {name} {' '.join(pages)}")

    def dispatch(
        self,
        kernel: str,
        groups: tuple[int, ...],
        threads: tuple[int, ...],
        bindings: dict[int, str],
        constants: int = 0,
        threadgroup_bytes: int = 0,
    ) -> None:
        sizes = [str(n) for shape in (groups, threads) for n in (*shape, 1, 1)[:3]]
        bound = [f"{slot}={name}" for slot, name in bindings.items()]
        self.commands.append(" ".join(["dispatch", kernel, str(constants), str(threadgroup_bytes), *sizes, *bound]))

    def save(self, name: str, dtype: type = np.float32, as_name: str = "") -> None:
        self.commands.append(f"save {name} {as_name or name}.out")
        self.saved[as_name or name] = np.dtype(dtype)

    def run(self) -> Result:
        done = subprocess.run(
            [self.program, self.folder],
            input="\n".join(self.commands) + "\n",
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 2, done.stderr
        result = Result(done.returncode, done.stderr)
        if done.returncode == 0:
            for name, dtype in self.saved.items():
                result.outputs[name] = np.fromfile(self.folder / f"{name}.out", dtype)
        return result
