"""Speculative decoding of SmolLM2 against plain decoding, logits bit for bit: `python -m tests.lossless`.

In full it takes long: 20 prompts of 200 tokens, four drafters, every block size from 2 to 16, then every chunk size of
every prompt. Options cut it into parts. A line for each drafter and block, a verdict at the end; exit code 1 if any
token or any bit of its logits differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import pyferrum as pf
from pyferrum.demo_model import fetch
from tests.drafts import Scripted, settings, write_draft

DRAFTERS = ("random", "random2", "right", "wrong")
"""A DFlash and a DFlash 2 draft model of random weights, one that is always right, and one that always is wrong."""

Steps = list[tuple[int, bytes]]
"""Tokens, each with a digest of the logits it was chosen from."""


@contextlib.contextmanager
def digests() -> Iterator[None]:
    """Inside, `logprobs` of every response is a digest of the raw logits, bit for bit, not a softmax of them."""

    def digest(row: Any) -> bytes:
        row = np.ascontiguousarray(row)
        assert row.dtype == np.float32 and row.ndim == 1
        return hashlib.blake2b(row.tobytes(), digest_size=16).digest()

    with contextlib.ExitStack() as stack:
        for name in ("pyferrum.generate", "pyferrum.speculative"):
            stack.enter_context(mock.patch.object(sys.modules[name], "log_softmax", digest))
        yield


def prompts(model: pf.Model, count: int) -> list[list[int]]:
    """Pieces of a text, of 9, 11, 13, … tokens."""
    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
    tokens = model.tokenizer.encode(text, add_bos=False)
    return [tokens[i * 70 : i * 70 + 9 + 2 * i] for i in range(count)]


def plain(model: pf.Model, prompt: list[int], tokens: int) -> Steps:
    """What decoding one token at a time gives."""
    with digests():
        steps = pf.generate(model, prompt, max_tokens=tokens, ignore_eos=True)
        return [(s.token, s.logprobs) for s in steps]  # type: ignore[misc]


def drafter_for(kind: str, model: pf.Model, folder: Path) -> Any:
    """A draft model of random weights; those that know the future are made for each prompt."""
    if not kind.startswith("random"):
        return kind
    config = settings(model.config.hidden_size, second=kind == "random2", target_layer_ids=[3, 20])
    return pf.load_draft(write_draft(folder / kind, model, config=config), model)


def compare(
    model: pf.Model, drafter: Any, prompt: list[int], expected: Steps, block: int, chunk: int
) -> tuple[int | None, Counter[int]]:
    """(the first token that differs, or None; rounds by drafts accepted)."""
    if isinstance(drafter, str):
        drafter = Scripted([[token for token, _ in expected]], [len(prompt)], wrong=int(drafter == "wrong"))
    options: dict[str, Any] = {"block": block, "max_tokens": len(expected), "ignore_eos": True, "chunk": chunk}
    with digests():
        steps = list(pf.speculative_generate(model, drafter, prompt, **options))
    ours: Any = [(s.token, s.logprobs) for s in steps]
    if ours == expected:
        return None, Counter(steps[-1].histogram)
    first = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), len(ours))
    return first, Counter(steps[-1].histogram)


def expected_counts(kind: str, histogram: Counter[int], block: int, tokens: int) -> bool:
    """Whether a drafter that is always right, or always wrong, was found to be so."""
    if kind == "wrong":
        return set(histogram) <= {0}
    # Whole blocks, and a last one of what was left.
    return kind != "right" or all(n in (block - 1, (tokens - 1) % block - 1) for n in histogram)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and say whether everything was equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.lossless", description=__doc__)
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--blocks", nargs="+", type=int, default=range(2, 17))
    parser.add_argument("--prompts", type=int, default=20, help="how many, 20 at most")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--chunkings", type=int, metavar="N", help="of the first N prompts; all if not given")
    arguments = parser.parse_args(argv)
    model = pf.load(fetch())
    given = prompts(model, min(arguments.prompts, 20))
    start = time.perf_counter()
    expected = [plain(model, prompt, arguments.tokens) for prompt in given]
    print(f"plain decoding: {len(given)} prompts × {arguments.tokens} tokens, {time.perf_counter() - start:.1f} s")
    failures, compared = 0, 0

    def line(name: str, cases: list[tuple[str, Any, int, int, int, int]]) -> None:
        nonlocal failures, compared
        start, histogram, wrong = time.perf_counter(), Counter[int](), []
        for kind, drafter, index, block, chunk, tokens in cases:
            first, rounds = compare(model, drafter, given[index], expected[index][:tokens], block, chunk)
            histogram += rounds
            if first is not None:
                wrong.append(f"prompt {index}, chunk {chunk}: token {first} or its logits differ")
            elif not expected_counts(kind, rounds, block, tokens):
                wrong.append(f"prompt {index}: accepted {dict(rounds)}")
            compared += tokens
        failures += len(wrong)
        mean = sum(n * count for n, count in histogram.items()) / max(sum(histogram.values()), 1)
        verdict = "; ".join(wrong) or "equal"
        print(f"{name}: {verdict}; {mean:.2f} drafts accepted a round, {time.perf_counter() - start:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.drafter:
            drafter = drafter_for(kind, model, Path(folder))
            for block in arguments.blocks:
                cases = [
                    (kind, drafter, i, block, 1 + (7 * block + 5 * i) % len(prompt), arguments.tokens)
                    for i, prompt in enumerate(given)
                ]
                line(f"{kind:<7} block {block:>2}", cases)
        drafter = drafter_for("random2", model, Path(folder))
        for i, prompt in enumerate(given[: arguments.chunkings]):
            chunks = range(1, len(prompt) + 1)
            cases = [("random2", drafter, i, 5, chunk, min(8, arguments.tokens)) for chunk in chunks]
            line(f"chunks of 1…{len(prompt)} tokens, block 5", cases)
    print(
        f"{'DIFFERENT' if failures else 'EQUAL'}: {compared} tokens and their logits compared, {failures} cases differ"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
