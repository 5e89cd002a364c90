"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks import compare, kernels


def machine() -> dict[str, Any]:
    """Where this ran."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    root = Path(__file__).parent.parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {
        "processor": name, "cores": cores,
        "system": platform.platform(), "python": platform.python_version(), "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=benchmarks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write every number")
    commands = parser.add_subparsers(dest="command", required=True)
    compare.add_arguments(commands.add_parser("compare", help="pyferrum and its peers"))
    kernels.add_arguments(commands.add_parser("kernels", help="single functions"))
    arguments = parser.parse_args(argv)
    result = {"machine": machine(), "arguments": {name: str(value) for name, value in vars(arguments).items()}}
    result |= {"compare": compare, "kernels": kernels}[arguments.command].run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
