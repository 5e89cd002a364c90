"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import benchmarks
from benchmarks import compare
from pyferrum.demo_model import fetch


def main() -> None:
    """Run one benchmark, or both."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=benchmarks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("compare", help="pyferrum and its peers")
    command.add_argument("--model", type=Path, help="a GGUF file in Q4_1; the demonstration model if not given")
    command.add_argument("--json", type=Path, help="where to write every number")
    compare.add_arguments(command)
    arguments = parser.parse_args()
    arguments.model = arguments.model or fetch()
    result = {"machine": compare.machine(), "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    result |= compare.run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
