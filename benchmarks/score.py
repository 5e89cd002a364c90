"""200 continuations of one context of 500 tokens: `pf.score` beside scoring each from scratch, in one run.

    python benchmarks/score.py

From scratch means the context's prefill without logits, then the continuation's tokens, for each of the 200 anew. The
shared runs lie between the others, so that what the machine does meanwhile falls on both. Takes about two minutes.
"""

from __future__ import annotations

import statistics
import time
from importlib import resources

import numpy as np

import pyferrum as pf
from pyferrum.demo_model import fetch

CONTINUATIONS, CONTEXT, TOKENS, ROUNDS = 200, 500, 4, 5


def main() -> None:
    """Print seconds of both ways and whether all log-probabilities are the same bits."""
    model = pf.load(fetch())
    words = model.tokenizer.encode(resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text())
    context = words[:CONTEXT]
    continuations = [words[CONTEXT + i : CONTEXT + i + TOKENS] for i in range(CONTINUATIONS)]
    pf.score(model, context, continuations[:2])
    shared, scratch, equal = [], [], True
    for part in range(ROUNDS):
        start = time.perf_counter()
        results = pf.score(model, context, continuations)
        shared.append(time.perf_counter() - start)
        for i in range(part, CONTINUATIONS, ROUNDS):
            start = time.perf_counter()
            state, first = model.forward(model.init_state(), context, last_only=True)
            _, rest = model.forward(state, continuations[i][:-1])
            rows = np.concatenate([first, rest])
            losses = np.asarray(pf.cross_entropy(rows, continuations[i]))
            scratch.append(time.perf_counter() - start)
            equal &= np.array_equal(-losses, results[i].token_logprobs)
    total, once = sum(scratch), statistics.median(shared)
    print(f"{model}\n{CONTINUATIONS} continuations of {TOKENS} tokens, {CONTEXT} tokens of context")
    print(f"from scratch  {total:8.2f} s")
    print(f"pf.score      {once:8.2f} s   median of {ROUNDS}, {min(shared):.2f}…{max(shared):.2f}")
    print(f"ratio         {total / once:8.1f}     same bits: {equal}")


if __name__ == "__main__":
    main()
