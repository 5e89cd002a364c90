"""The demonstration behind `make demo`: a real checkpoint, evaluated, asked, and forked."""

from __future__ import annotations

from importlib import resources

import pyferrum as pf
from pyferrum.demo_model import fetch

QUESTION = "What is a tide gauge, and who reads it?"
OPENINGS = (" The keeper", " A storm")


def main() -> None:
    """Perplexity of the text that ships with pyferrum, a streamed answer, and two continuations of one state."""
    model = pf.load(fetch())
    print(model, "\n")

    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
    score = pf.evaluate.perplexity(model, text, progress=None)
    print(
        f"perplexity {score.perplexity:.3f} on tidewatch.txt ({score.scored_tokens} tokens; {score.definition})\n"
        f"{score.tokens_per_second:.0f} tokens/s\n"
    )

    print(f"> {QUESTION}")
    for step in pf.generate(model, [{"role": "user", "content": QUESTION}], max_tokens=96):
        print(step.text, end="", flush=True)
    print(f"\n[{step.generation_tokens} tokens, {step.generation_tps:.1f} tokens/s]\n")

    prompt = "The harbour was quiet that morning, and the water stood higher than anyone remembered."
    shared, _ = model.forward(model.init_state(), model.tokenizer.encode(prompt), last_only=True)
    before = pf.arena_stats()
    print(f"one prompt, {shared.length} tokens, {before['used_pages']} pages in use:\n{prompt}")
    branches = []
    for opening in OPENINGS:
        print(f"  …{opening}", end="", flush=True)
        for step in pf.generate(model, opening, max_tokens=24, state=shared, ignore_eos=True):
            print(step.text.replace("\n", " "), end="", flush=True)
        branches.append(step.state)
        print()
    after = pf.arena_stats()
    print(
        f"two continuations of {branches[0].length} and {branches[1].length} tokens: "
        f"{after['allocated_pages'] - before['allocated_pages']} pages allocated, "
        f"{after['copied_pages'] - before['copied_pages']} of them as copies of a tail; "
        f"the prompt's state still has {shared.length} tokens"
    )


if __name__ == "__main__":
    main()
