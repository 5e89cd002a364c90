"""Single functions: achieved GB/s and GOP/s beside what this machine can do, what a call costs, and what forks cost.

The limits come from `limits.c`, which only reads, or only multiplies, on as many threads. Bytes are what a function has
to read once; operations count a multiplication and an addition as two. Timings are medians, limits the best of a few.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import pyferrum as pf
from benchmarks.files import random_blocks
from pyferrum.formats import DTYPES, FORMATS
from pyferrum.weights import prepare


def median_seconds(
    call: Callable[[int], Any], budget: float, least: int = 5, between: Callable[[], None] = lambda: None
) -> float:
    """Of calls numbered 0, 1, …, for about so many seconds; one to warm up. `between` runs after each, untimed."""
    call(0)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(times) + 1)
        times.append(time.perf_counter() - start)
        between()
    return statistics.median(times)


class Limits:
    """What this machine does on so many threads: reads of memory, 16-bit dots, float32 multiply-adds."""

    def __init__(self, threads: int, megabytes: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            source = Path(__file__).with_name("limits.c")
            subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
            self.c = ctypes.CDLL(str(library))
        self.c.limits_read.restype = ctypes.c_uint64
        self.c.limits_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.ready = threading.Barrier(threads)
        self.memory = mmap.mmap(-1, megabytes << 20)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.data = np.frombuffer(self.memory, np.uint8)
        self.data[:] = 1
        self.at = 0

    def together(self, work: Callable[[int], Any]) -> tuple[float, list[Any]]:
        """Seconds from the first thread's start to the last one's end, and what the threads give; they start as one."""

        def timed(i: int) -> tuple[float, float, Any]:
            self.ready.wait()
            start = time.perf_counter()
            result = work(i)
            return start, time.perf_counter(), result

        runs = list(self.pool.map(timed, range(self.threads)))
        return max(end for _, end, _ in runs) - min(start for start, _, _ in runs), [result for _, _, result in runs]

    def read_seconds(self, size: int) -> float:
        """Reads the next so many bytes of a large array, a share a thread."""
        share = min(size, self.data.nbytes) // self.threads // 256 * 256
        if self.at + share * self.threads > self.data.nbytes:
            self.at = 0
        begin = self.data.ctypes.data + self.at
        self.at += share * self.threads
        return self.together(lambda i: self.c.limits_read(begin + i * share, share))[0]

    def measure(self) -> dict[str, float]:
        """GB/s of reading, GOP/s of dots and of multiply-adds: the best of a few runs each."""
        size = self.data.nbytes // 4
        result = {"read_gb_s": size / min(self.read_seconds(size) for _ in range(28)) / 1e9}
        for name, function in (("dot16_gop_s", self.c.limits_dot16), ("fma_gop_s", self.c.limits_fma)):
            function.restype = ctypes.c_double
            function.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
            sinks = np.ones(16 * self.threads, np.int32)

            def work(i: int, function: Any = function, sinks: Any = sinks) -> float:
                return float(function(2_000_000, sinks.ctypes.data + 64 * i))

            runs = [self.together(work) for _ in range(5)]
            result[name] = max(sum(done) / seconds for seconds, done in runs) / 1e9
        return result


def matrices(name: str, width: int, megabytes: int, rng: np.random.Generator, device: pf.Device) -> list[Any]:
    """A square matrix in a format, as many times in memory as make up so many MiB, and once more."""
    x = rng.standard_normal((width, width), np.float32) / np.sqrt(width)
    if name in DTYPES:
        data = x.astype(DTYPES[name])
        arrays = [pf.array(data, device=device) for _ in range((megabytes << 20) // data.nbytes + 1)]
        for array in arrays:
            prepare(array)  # as the loader of a checkpoint does
        return arrays
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, width, width, rng) if name.endswith("_K") else gguf.quants.quantize(x, kind)
    count = (megabytes << 20) // data.nbytes + 1
    return [pf.block_array(data, name, (width, width), device=device) for _ in range(count)]


def linear(
    device: pf.Device, name: str, width: int, rows: list[int], budget: float, megabytes: int
) -> Iterator[dict[str, Any]]:
    """`linear` over matrices of one format, taken in turn, that are more than the caches hold."""
    rng = np.random.default_rng(0)
    weights = matrices(name, width, megabytes, rng, device)
    size = weights[0].nbytes
    for count in rows:
        x = pf.array(rng.standard_normal((count, width)).astype(np.float16), device=device)

        def call(i: int, x: Any = x) -> None:
            pf.linear(x, weights[i % len(weights)]).block_until_ready()

        seconds = median_seconds(call, budget, least=len(weights) if count == 1 else 5)
        yield {
            "function": "linear", "format": name, "rows": count, "us": 1e6 * seconds,
            "gb_s": size / seconds / 1e9, "gop_s": 2 * count * width * width / seconds / 1e9,
        }  # fmt: skip


def attention_case(device: pf.Device, context: int, query_heads: int, key_value_heads: int, head_dim: int) -> Any:
    """A layer with narrow projections, and a state of random keys and values."""
    hidden = 64
    config = pf.AttentionConfig(
        hidden_size=hidden, query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim,
        maximum_context_tokens=context + 64,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> pf.Array:
        made = pf.array((rng.standard_normal(shape) / 8).astype(np.float16), device=device)
        prepare(made)  # as a loaded model's are
        return made

    wide = query_heads * head_dim
    weights = pf.AttentionWeights(
        pf.array(np.ones(hidden, np.float32), device=device), weight(wide, hidden),
        weight(key_value_heads * head_dim, hidden), weight(key_value_heads * head_dim, hidden), weight(hidden, wide),
    )  # fmt: skip
    state = pf.init_state(config, device=device)
    for start in range(0, context, 8192):
        shape = (min(8192, context - start), key_value_heads, head_dim)
        state = state.append(*(rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(2)))
    return state, weights, pf.array(rng.standard_normal((16, hidden), np.float32), device=device)


def attention(device: pf.Device, contexts: list[int], budget: float, limits: Limits) -> Iterator[dict[str, Any]]:
    """One row of a layer with four query heads a key head, behind a long context. Each call is followed by a plain read
    of as many bytes: what memory gives changes from one second to the next."""
    for context in contexts:
        state, weights, x = attention_case(device, context, 16, 4, 128)
        size = context * state.config.bytes_per_token
        reads: list[float] = []

        def call(_: int, state: Any = state, weights: Any = weights, x: Any = x) -> None:
            pf.causal_attention(state, x[:1], weights)[1].block_until_ready()

        def read(size: int = size, reads: list[float] = reads) -> None:
            reads.append(limits.read_seconds(size))

        seconds = median_seconds(call, 3 * budget, least=15, between=read)
        yield {
            "function": "causal_attention", "context": context, "us": 1e6 * seconds,
            "gb_s": size / seconds / 1e9, "read_gb_s": size / statistics.median(reads) / 1e9,
            "gop_s": 4 * context * 16 * 128 / seconds / 1e9,
        }  # fmt: skip


def overheads(device: pf.Device, budget: float) -> Iterator[dict[str, Any]]:
    """Calls with next to nothing to compute: what Python and the ABI cost."""
    state, weights, x = attention_case(device, 0, 1, 1, 64)
    one, norm = x[:1], pf.array(np.ones(64, np.float32), device=device)
    half = one.astype(np.float16)
    calls: dict[str, Callable[[int], Any]] = {
        "causal_attention": lambda _: pf.causal_attention(state, one, weights),
        "linear": lambda _: pf.linear(half, weights.k_proj),
        "rms_norm": lambda _: pf.rms_norm(one, norm),
    }
    for name, call in calls.items():
        yield {"function": f"{name}, 64 wide", "us": 1e6 * median_seconds(call, budget)}


def forks(device: pf.Device, context: int, branches: int) -> Iterator[dict[str, Any]]:
    """Forking a long state, and a tree of many branches of one token over it."""
    state, weights, x = attention_case(device, context, 4, 1, 64)
    fork = median_seconds(lambda _: state.truncate(state.length), 0.05, least=100)
    # Cut inside a page: the first branch would otherwise find free slots and copy nothing.
    prompt = state.truncate(context - 1)
    before = device.arena_stats()
    start = time.perf_counter()
    tree = [pf.causal_attention(prompt, x[i % 16 : i % 16 + 1], weights)[0] for i in range(branches)]
    seconds = time.perf_counter() - start
    after = device.arena_stats()
    assert {branch.length for branch in tree} == {context}
    pages = prompt.pages
    yield {"function": f"fork of {context} tokens", "us": 1e6 * fork, "prompt_pages": pages, "new_pages": 0}
    yield {
        "function": f"branch of one token, {branches} over {context} tokens", "us": 1e6 * seconds / branches,
        "prompt_pages": pages, "new_pages": after["used_pages"] - before["used_pages"],
        "copied_pages": after["copied_pages"] - before["copied_pages"],
    }  # fmt: skip


def measure(device: pf.Device, arguments: argparse.Namespace, limits: Limits) -> Iterator[dict[str, Any]]:
    """Every row, one after another."""
    yield from overheads(device, arguments.budget / 3)
    yield from forks(device, arguments.fork_context, arguments.branches)
    yield from attention(device, arguments.contexts, arguments.budget, limits)
    for name in arguments.formats:
        yield from linear(device, name, arguments.width, arguments.rows, arguments.budget, arguments.megabytes)


def show(row: dict[str, Any], limit: dict[str, float]) -> None:
    """A line of the table."""
    name = row["function"]
    name += f" {row['format']}, {row['rows']} rows" if "format" in row else ""
    name += f", {row['context']} tokens before" if "context" in row else ""
    cells = [name, f"{row['us']:,.1f}"]
    if "gb_s" in row:
        read = row.get("read_gb_s", limit["read_gb_s"])
        note = f" of {read:.1f}" if "read_gb_s" in row else ""
        cells.append(f"{row['gb_s']:.1f} ({row['gb_s'] / read:.0%}{note})")
        # Blocks are multiplied as 16-bit integers, everything else as float32.
        most = limit["fma_gop_s" if row.get("format", "F32") in DTYPES else "dot16_gop_s"]
        share = f" ({row['gop_s'] / most:.0%})" if most else ""
        cells.append(f"{row['gop_s']:.0f}{share}")
    elif "new_pages" in row:
        cells += [f"{row['prompt_pages']} pages shared, {row['new_pages']} new", ""]
    else:
        cells += ["", ""]
    print("| " + " | ".join(cells) + " |", flush=True)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options."""
    known = list(FORMATS)
    command.add_argument("--formats", nargs="*", default=known, metavar="F", help=f"of {' '.join(known)}")
    command.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 256])
    command.add_argument("--width", type=int, default=4096, help="of the square matrices of linear")
    command.add_argument("--contexts", nargs="*", type=int, default=[32768, 131072])
    command.add_argument("--fork-context", type=int, default=100_000)
    command.add_argument("--branches", type=int, default=1000)
    command.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    command.add_argument("--budget", type=float, default=0.3, help="seconds a row")
    command.add_argument("--megabytes", type=int, default=256, help="of weights read in turn; of the limit four times")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and give the numbers."""
    results: dict[str, Any] = {"limits": {}, "kernels": {}}
    for threads in arguments.threads:
        limits = Limits(threads, 4 * arguments.megabytes)
        limit = limits.measure()
        results["limits"][threads] = limit
        print(
            f"\n{threads} threads: this machine reads {limit['read_gb_s']:.1f} GB/s, multiplies "
            f"{limit['dot16_gop_s']:.0f} GOP/s of 16-bit integers and {limit['fma_gop_s']:.0f} of float32\n"
        )
        print("| function | µs a call | GB/s (of reading) | GOP/s (of the limit) |\n|---|---|---|---|")
        with pf.Device(threads=threads) as device:
            rows = []
            for row in measure(device, arguments, limits):
                show(row, limit)
                rows.append(row)
            results["kernels"][threads] = rows
    return results
