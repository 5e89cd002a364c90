"""The command line: `pyferrum info | run | eval | compare | inspect | bench`. Flags are spelled as in mlx-lm."""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pyferrum as pf
from pyferrum import cli_eval
from pyferrum._check import whole_number
from pyferrum._show import show
from pyferrum.dflash2 import MAX_ROWS
from pyferrum.models.llama import LlamaParams
from pyferrum.speculative import plain_tps


def _load(arguments: argparse.Namespace) -> pf.Model:
    return pf.load(arguments.model, dtype=arguments.dtype)


def info(arguments: argparse.Namespace) -> None:
    """Device, library and arena."""
    arena = {f"arena_{name}": value for name, value in pf.arena_stats().items()}
    show({"pyferrum": pf.__version__} | pf.device_info() | arena, arguments.json)


def run(arguments: argparse.Namespace) -> None:
    """Generate from a prompt, streaming."""
    if arguments.num_draft_tokens is not None and arguments.draft_model is None:
        raise pf.InvalidArgument("--num-draft-tokens: goes with --draft-model only")
    if arguments.system_prompt is not None and arguments.ignore_chat_template:
        raise pf.InvalidArgument("--system-prompt: does not go with --ignore-chat-template")
    prompt: Any = _stdin() if arguments.prompt == "-" else arguments.prompt
    model = _load(arguments)
    if arguments.system_prompt is not None and model.tokenizer.chat_template is None:
        raise pf.InvalidArgument(f"--system-prompt: {model.path} has no chat template to put it in")
    if not arguments.ignore_chat_template and model.tokenizer.chat_template is not None:
        system = [{"role": "system", "content": arguments.system_prompt}] if arguments.system_prompt else []
        prompt = [*system, {"role": "user", "content": prompt}]
    options = {name: getattr(arguments, name) for name in ("max_tokens", "top_p", "top_k", "min_p")}
    options["key"] = arguments.seed
    steps: Iterator[pf.GenerationResponse]
    if arguments.draft_model is None:
        steps = pf.generate(model, prompt, temp=arguments.temp, **options)
    else:
        drafter = pf.load_draft(arguments.draft_model, model)
        block = None if arguments.num_draft_tokens is None else arguments.num_draft_tokens + 1
        steps = pf.speculative_generate(model, drafter, prompt, block=block, temp=arguments.temp, **options)
    text, last, places = "", None, []
    for last in steps:
        text += last.text
        places.append((last.state, last.token))
        if not arguments.json:
            print(last.text, end="", flush=True)
    assert last is not None  # at least one token was asked for
    plain, speedup = None, None
    if isinstance(last, pf.SpeculativeResponse) and last.histogram:
        sampling = {name: getattr(arguments, name) for name in ("temp", "top_p", "top_k", "min_p")}
        plain = plain_tps(model, *places[len(places) // 2 - 1], **sampling)
        # The first token came with the prompt, in no time; plain_tps has none of that kind.
        speedup = last.generation_tps * (1 - 1 / last.generation_tokens) / plain
    if arguments.json:
        fields = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory")
        result = {name: getattr(last, name) for name in fields}
        if isinstance(last, pf.SpeculativeResponse):
            result |= {"accepted_histogram": last.histogram, "plain_tps": plain, "speedup": speedup}
        show({"text": text, **result, "finish_reason": last.finish_reason}, True)
        return
    print()
    print(
        f"[{last.prompt_tokens} prompt tokens, {last.prompt_tps:.1f} tokens/s; {last.generation_tokens} generated, "
        f"{last.generation_tps:.1f} tokens/s; peak memory {last.peak_memory:.2f} GB]",
        file=sys.stderr,
    )
    if isinstance(last, pf.SpeculativeResponse) and plain is not None:
        rounds = sum(last.histogram.values())
        mean = sum(accepted * count for accepted, count in last.histogram.items()) / rounds
        print(
            f"[{rounds} rounds, {mean:.2f} drafts accepted in each: {dict(sorted(last.histogram.items()))}; plain "
            f"decoding {plain:.1f} tokens/s in this run, drafting {speedup:.2f} times that]",
            file=sys.stderr,
        )


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise pf.InvalidArgument(f"--prompt: expected UTF-8 on standard input: {error}") from error


def inspect(arguments: argparse.Namespace) -> None:
    """What a checkpoint holds, and the plan of one decode step of a layer."""
    model = _load(arguments)
    config, attention = model.config, model.config.attention
    formats = Counter(_formats(model.params))
    context = min(512, attention.maximum_context_tokens - 1) if arguments.context is None else arguments.context
    plan = pf.plan_attention(attention, 1, starts=context, dtype=model.dtype, weights=model.params.layers[0].attention)
    summary = {
        "model": str(arguments.model),
        "architecture": config.architecture,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocabulary": config.vocabulary,
        "tied_embeddings": config.tied_embeddings,
        "query_heads": attention.query_heads,
        "key_value_heads": attention.key_value_heads,
        "head_dim": attention.head_dim,
        "rope": f"theta {attention.rope_theta:g}, {attention.rotary_dim} dims, "
        + ("interleaved" if attention.rope_interleaved else "half-split")
        + f", scaling {attention.rope_scaling}",
        "sliding_window": attention.sliding_window,
        "maximum_context_tokens": attention.maximum_context_tokens,
        "state_bytes_per_token": attention.bytes_per_token * config.layers,
        "weights": ", ".join(f"{count} {name}" for name, count in formats.most_common()),
        **model.memory(),
    }
    show(summary, arguments.json)
    if not arguments.json:
        print(f"\nOne token of decode in one layer, {context} tokens before it:\n{plan}")


def _formats(params: LlamaParams) -> list[str]:
    flat = [params.embedding, params.norm, *([] if params.output is params.embedding else [params.output])]
    for layer in params.layers:
        flat += [*layer.attention, *layer[1:]]
    return [weight.format for weight in flat if weight is not None]


def bench(arguments: argparse.Namespace) -> None:
    """Tokens per second of prefill and decode on random tokens: medians over trials."""
    model = _load(arguments)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocabulary, arguments.prompt_tokens)
    prefill, decode = [], []
    for _ in range(arguments.num_trials + 1):  # the first one warms up
        start = time.perf_counter()
        state, logits = model.forward(model.init_state(), prompt, last_only=True)
        logits.block_until_ready()
        prefill.append(len(prompt) / (time.perf_counter() - start))
        start = time.perf_counter()
        for token in rng.integers(0, model.config.vocabulary, arguments.generation_tokens):
            state, logits = model.forward(state, [token], last_only=True)
            logits.block_until_ready()
        decode.append(arguments.generation_tokens / (time.perf_counter() - start))
    result = {"model": str(arguments.model), "threads": pf.device_info()["threads"]}
    for name, count, rates in (
        ("prefill", arguments.prompt_tokens, prefill[1:]),
        ("decode", arguments.generation_tokens, decode[1:]),
    ):
        result |= {
            f"{name}_tokens": count,
            f"{name}_tps": round(statistics.median(rates), 1),
            f"{name}_tps_spread": [round(min(rates), 1), round(max(rates), 1)],
        }
    show(result, arguments.json)


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number in a range."""

    def number(text: str) -> int:
        try:
            return whole_number(int(text), "wrong value", least, most)
        except pf.InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    number.__name__ = "whole number"  # in argparse's own message
    return number


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    root = argparse.ArgumentParser(prog="pyferrum", description=pf.__doc__.splitlines()[0])
    root.add_argument("--version", action="version", version=f"pyferrum {pf.__version__}")
    root.add_argument("--verbose", action="store_true", help="log what the loader does")
    commands = root.add_subparsers(dest="command", required=True)

    def add(name: str, action: Any, model: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=action.__doc__, description=action.__doc__)
        command.set_defaults(action=action)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if model:
            command.add_argument("--model", required=True, type=Path, help="a .gguf file or a safetensors folder")
            command.add_argument(
                "--dtype", choices=("float32", "float16"), default="float32", help="of the residual stream"
            )
        return command

    add("info", info, model=False)

    command = add("run", run)
    command.add_argument("--prompt", "-p", default="hello", help='text, "hello" if not given; "-": from standard input')
    command.add_argument("--system-prompt", help="system message of the chat template")
    command.add_argument("--ignore-chat-template", action="store_true", help="give the prompt as it is")
    command.add_argument("--max-tokens", "-m", type=int, default=256)
    command.add_argument("--temp", type=float, default=0.0, help="0: the most probable token")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--draft-model",
        type=Path,
        help="a DFlash or DFlash 2 draft model: the same text, sooner; with --temp another of the same distribution",
    )
    command.add_argument(
        "--num-draft-tokens", type=_whole(1, MAX_ROWS - 1), help="proposed at a time; as trained if not given"
    )

    cli_eval.add_options(add("eval", cli_eval.evaluate))
    cli_eval.add_compare_options(add("compare", cli_eval.compare, model=False))

    command = add("inspect", inspect)
    command.add_argument(
        "--context", type=_whole(0), help="tokens before the planned step; 512, or what the model has room for"
    )

    command = add("bench", bench)
    command.add_argument("--prompt-tokens", "-p", type=_whole(1), default=512)
    command.add_argument("--generation-tokens", "-g", type=_whole(1), default=64)
    command.add_argument("--num-trials", "-n", type=_whole(1), default=5)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 it failed (one line on stderr), 2 wrong usage, 130 interrupted, 141 nobody
    reads on."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(message)s")
    try:
        arguments.action(arguments)
    except BrokenPipeError:  # whoever read what we print has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (pf.FerrumError, MemoryError, OSError) as error:
        print(f"pyferrum: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pyferrum: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
