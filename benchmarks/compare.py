"""Engines side by side: prefill, decode, load time and memory on the same files, interleaved.

Every engine runs in a process of its own that stays alive and waits for commands, so nothing but what is measured is in
the timings, and only one of them works at a time. A row is measured in rounds, A B, B A, A B, …: what disturbs the
machine meets all of them. Ratios are medians over the rounds, not quotients of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import resources, util
from pathlib import Path
from typing import Any

import pyferrum as pf
from benchmarks import files
from pyferrum.demo_model import fetch

PREFILL, DECODE = (128, 512, 2048), (32, 1024)
"""Tokens of a prompt, and tokens before those that are decoded."""


class Process:
    """An engine in its process."""

    def __init__(self, engine: str, python: str) -> None:
        self.engine = engine
        command = [python, str(Path(__file__).with_name("engines.py")), engine]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self("version")["version"]

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with {self.process.wait()}"}
        if "error" in answer:
            raise SystemExit(f"{self.engine}: {do}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def interpreters(arguments: argparse.Namespace) -> dict[str, str]:
    """Which engines can run, and with which Python."""
    found = {"pyferrum": sys.executable}
    for engine, option, module in (
        ("llama.cpp", arguments.llama_python, "llama_cpp"),
        ("torch", arguments.torch_python, "transformers"),
        ("mlx", arguments.mlx_python, "mlx_lm"),
    ):
        if option or util.find_spec(module):
            found[engine] = option or sys.executable
    chosen = arguments.engines or [engine for engine in found if engine != "mlx"]
    for engine in chosen:
        if engine not in found:
            raise SystemExit(f"{engine}: not installed here; pip install '.[peers]', or name a Python that has it")
    return {engine: found[engine] for engine in chosen}


def path_for(engine: str, demo: Path, name: str) -> Path | None:
    """What an engine loads for a format. torch and MLX take bfloat16 weights, whatever the file."""
    if engine in ("torch", "mlx"):
        return files.hf_folder(demo) if name not in files.RANDOM else None
    return files.file_of(demo, name)


def rounds(processes: list[Process], work: int, budget: float, command: dict[str, Any]) -> dict[str, Any]:
    """One row: a round after another, at least three and for about `budget` seconds, after one to warm up."""
    best = {p.engine: p(**command)["best"] for p in processes}
    rates: dict[str, list[float]] = {p.engine: [] for p in processes}
    start = time.perf_counter()
    while len(rates[processes[0].engine]) < 3 or (
        time.perf_counter() - start < budget and len(rates[processes[0].engine]) < 25
    ):
        for process in processes if len(rates[processes[0].engine]) % 2 == 0 else reversed(processes):
            time.sleep(0.02)  # until the threads of the one before have gone to sleep
            rates[process.engine].append(work / process(**command)["seconds"])
    return {"rates": rates, "best": best}


def summary(row: dict[str, Any], first: str) -> dict[str, Any]:
    """Medians, spreads and ratios of a row: how many times as fast the first engine is."""
    result: dict[str, Any] = {}
    for engine, rates in row["rates"].items():
        ratios = [a / b for a, b in zip(row["rates"][first], rates, strict=True)]
        result[engine] = {
            "median": statistics.median(rates), "low": min(rates), "high": max(rates),
            "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
        }  # fmt: skip
    return result


def header(engines: list[str]) -> None:
    """The head of the table, in Markdown."""
    cells = ["file", "threads", "row", *engines, *(f"× {engine}" for engine in engines[1:])]
    print("| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|", flush=True)


def show(engines: list[str], cells: list[str], row: dict[str, Any], result: dict[str, Any]) -> None:
    """A line of the table."""
    cells = list(cells)
    for engine in engines:
        s = result.get(engine)
        cells.append("" if s is None else f"{s['median']:.1f} ({s['low']:.0f}–{s['high']:.0f})")
    for engine in engines[1:]:
        s = result.get(engine)
        cells.append("" if s is None else f"{s['ratio']:.2f} ({s['ratio_low']:.2f}–{s['ratio_high']:.2f})")
    different = "" if len(set(row["best"].values())) == 1 else f" next tokens differ: {row['best']}"
    print("| " + " | ".join(cells) + " |" + different, flush=True)


def measure_speed(
    arguments: argparse.Namespace, pythons: dict[str, str], name: str, threads: int, tokens: list[int]
) -> list[dict[str, Any]]:
    """Prefill and decode of one file."""
    paths = {engine: path_for(engine, arguments.model, name) for engine in pythons}
    processes = [Process(engine, python) for engine, python in pythons.items() if paths[engine] is not None]
    results = []
    try:
        longest = max([*arguments.prefill, *(n + arguments.decode_tokens for n in arguments.decode)])
        for process in processes:
            process("load", path=str(paths[process.engine]), threads=threads, context=longest + 64)
        commands: list[tuple[str, int, dict[str, Any]]] = [
            (f"prefill {n}", n, {"do": "prefill", "tokens": tokens[:n]}) for n in arguments.prefill
        ]
        for n in arguments.decode:
            after = tokens[n : n + arguments.decode_tokens]
            command = {"do": "decode", "context": tokens[:n], "tokens": after}
            commands.append((f"decode after {n}", len(after), command))
        for label, work, command in commands:
            row = rounds(processes, work, arguments.budget, command)
            result = summary(row, processes[0].engine)
            show(list(pythons), [name, str(threads), label], row, result)
            results.append({"file": name, "threads": threads, "row": label, **row, "summary": result})
    finally:
        for process in processes:
            process.close()
    return results


def measure_start(
    arguments: argparse.Namespace, pythons: dict[str, str], name: str, threads: int, tokens: list[int]
) -> list[dict[str, Any]]:
    """Fresh processes: load, the first prompt and the first token, and the same again when warm; peak memory."""
    results = []
    for _ in range(arguments.starts):
        for engine, python in pythons.items():
            path = path_for(engine, arguments.model, name)
            if path is None:
                continue
            process = Process(engine, python)
            before = process("peak")["peak_bytes"]
            context, token = tokens[:32], tokens[32:33]
            load = process("load", path=str(path), threads=threads, context=640)["seconds"]
            first = process("prefill", tokens=context)["seconds"]
            step = process("decode", context=context, tokens=token)["seconds"]
            warm = [process("prefill", tokens=context)["seconds"] for _ in range(5)]
            warm_step = [process("decode", context=context, tokens=token)["seconds"] for _ in range(5)]
            process("prefill", tokens=tokens[:512])
            process("decode", context=tokens[:512], tokens=tokens[512 : 512 + 64])
            peak = process("peak")["peak_bytes"]
            process.close()
            results.append(
                {
                    "engine": engine, "file": name, "threads": threads, "load_s": load, "first_prompt_s": first,
                    "first_token_s": step, "warm_prompt_s": statistics.median(warm),
                    "warm_token_s": statistics.median(warm_step), "peak_bytes": peak, "imports_bytes": before,
                }
            )  # fmt: skip
    return results


def show_starts(rows: list[dict[str, Any]]) -> None:
    """Medians of the fresh processes, as a table in Markdown."""
    print("\n| file | threads | engine | load, s | first prompt of 32 (warm), ms | first token (warm), ms "
          "| peak memory (before loading), MB |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for file, threads, engine in dict.fromkeys((r["file"], r["threads"], r["engine"]) for r in rows):
        same = [r for r in rows if (r["file"], r["threads"], r["engine"]) == (file, threads, engine)]
        m = {key: statistics.median(r[key] for r in same) for key in rows[0] if key.endswith(("_s", "_bytes"))}
        print(
            f"| {file} | {threads} | {engine} | {m['load_s']:.3f} | {1e3 * m['first_prompt_s']:.1f} "
            f"({1e3 * m['warm_prompt_s']:.1f}) | {1e3 * m['first_token_s']:.1f} ({1e3 * m['warm_token_s']:.1f}) "
            f"| {m['peak_bytes'] / 1e6:.0f} ({m['imports_bytes'] / 1e6:.0f}) |"
        )


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    command.add_argument("--model", type=Path, help="a GGUF file in Q4_1; the demonstration model if not given")
    command.add_argument("--formats", nargs="+", default=["Q4_1"], metavar="F", help=f"of {' '.join(files.FORMATS)}")
    command.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    command.add_argument("--prefill", nargs="*", type=int, default=list(PREFILL), help="lengths of prompts")
    command.add_argument("--decode", nargs="*", type=int, default=list(DECODE), help="tokens before the decoded ones")
    command.add_argument("--decode-tokens", type=int, default=64)
    command.add_argument("--budget", type=float, default=8.0, help="seconds a row; three rounds at least")
    command.add_argument("--starts", type=int, default=3, help="fresh processes for load time and memory; 0 for none")
    command.add_argument(
        "--engines",
        nargs="+",
        help="of pyferrum llama.cpp torch mlx; if not given, what is installed, but not mlx, which takes minutes here",
    )
    command.add_argument("--llama-python", help="a Python that has llama-cpp-python, if this one has not")
    command.add_argument("--torch-python", help="a Python that has torch and transformers")
    command.add_argument("--mlx-python", help="a Python that has mlx-lm")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and give the numbers."""
    arguments.model = arguments.model or fetch()
    pythons = interpreters(arguments)
    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
    tokens = pf.load(arguments.model).tokenizer.encode(text, add_bos=False)
    longest = max([576, *arguments.prefill, *(n + arguments.decode_tokens for n in arguments.decode)])
    tokens = (tokens * (longest // len(tokens) + 1))[:longest]
    versions = {}
    for engine, python in pythons.items():
        process = Process(engine, python)
        versions[engine] = process.version
        process.close()
        print(f"{engine}: {versions[engine]}")
    print(f"\nTokens a second, median (range) of interleaved rounds; × is {next(iter(pythons))} over that engine\n")
    header(list(pythons))
    result: dict[str, Any] = {"engines": versions, "speed": [], "start": []}
    cases = [(name, threads) for name in arguments.formats for threads in arguments.threads]
    for name, threads in cases:
        result["speed"] += measure_speed(arguments, pythons, name, threads, tokens)
    for name, threads in cases if arguments.starts else ():
        result["start"] += measure_start(arguments, pythons, name, threads, tokens)
    if result["start"]:
        show_starts(result["start"])
    return result
