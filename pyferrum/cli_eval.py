"""`pyferrum eval` and `pyferrum compare`."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import pyferrum as pf
from pyferrum._show import show, to_json
from pyferrum.evaluate import METHODS, read_result
from pyferrum.evaluate.results import write_json


def evaluate(arguments: argparse.Namespace) -> None:
    """Perplexity of texts, or tasks of lm-evaluation-harness (--tasks)."""
    _check(arguments)
    with ExitStack() as stack:
        executor = None if arguments.dask is None else stack.enter_context(_client(arguments.dask))
        if arguments.tasks:
            _tasks(arguments, executor)
        else:
            _perplexity(arguments, executor)


PERPLEXITY_ONLY: dict[str, Any] = {
    "text": None,
    "method": "stream",
    "window": 512,
    "stride": None,
    "bos": "auto",
    "no_token_nlls": False,
}
TASKS_ONLY: dict[str, Any] = {
    "include_path": None,
    "num_fewshot": None,
    "batch_size": None,
    "apply_chat_template": False,
    "system_instruction": None,
}
"""Options with their defaults."""


def _check(arguments: argparse.Namespace) -> None:
    """What would be ignored, or could not be written when all is done."""
    for option, default in (PERPLEXITY_ONLY if arguments.tasks else TASKS_ONLY).items():
        if getattr(arguments, option) != default:
            reason = "does not go with --tasks" if arguments.tasks else "goes with --tasks only"
            raise pf.InvalidArgument(f"--{option.replace('_', '-')}: {reason}")
    if arguments.no_token_nlls and arguments.output is None:
        raise pf.InvalidArgument("--no-token-nlls: goes with --output only")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise pf.InvalidArgument(f"--output: there is no folder {arguments.output.parent}")
    if arguments.output is not None and arguments.output.is_dir():
        raise pf.InvalidArgument(f"--output: expected the name of a file, got the folder {arguments.output}")


def _read(path: str) -> str:
    """A text as its bytes say: line ends stay what they are."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise pf.InvalidArgument(f"--text: expected UTF-8, got {path}: {error}") from error


def _perplexity(arguments: argparse.Namespace, executor: Any) -> None:
    if arguments.text is None:
        texts = [resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()]
        name = "tidewatch.txt (ships with pyferrum)"
    else:
        texts, name = [_read(path) for path in arguments.text], ", ".join(arguments.text)
    model = pf.load(arguments.model, dtype=arguments.dtype)
    documents: list[Any] = texts
    if arguments.limit is not None:
        if arguments.limit < 1 or arguments.limit % 1:
            raise pf.InvalidArgument(f"--limit: expected a number of tokens, got {arguments.limit:g}")
        documents = [model.tokenizer.encode(text, add_bos=False)[: int(arguments.limit)] for text in texts]
        print("pyferrum: with --limit, words and bytes are not counted", file=sys.stderr)
    if arguments.bos == "always" and model.tokenizer.bos_token_id is None:
        raise pf.InvalidArgument(f"--bos: expected auto or never, for {model.path} has no BOS; got always")
    bos: Any = {"auto": "auto", "never": None, "always": model.tokenizer.bos_token_id}[arguments.bos]
    result = pf.evaluate.evaluate(
        model,
        documents,
        method=arguments.method,
        window=arguments.window,
        stride=arguments.stride,
        bos=bos,
        executor=executor,
        checkpoint=arguments.checkpoint,
        progress=False if arguments.json else None,
    )
    times = {"seconds": result.seconds, "tokens_per_second": result.tokens_per_second}
    show({"text": name, **_shown(result.to_dict(), arguments.json), **times}, arguments.json)
    if arguments.output is not None:  # what was found is shown by then, should this fail
        result.save(arguments.output, nlls=not arguments.no_token_nlls)


def _tasks(arguments: argparse.Namespace, executor: Any) -> None:
    limit = arguments.limit
    result = pf.evaluate.evaluate_tasks(
        pf.load(arguments.model, dtype=arguments.dtype),
        arguments.tasks,
        include_path=arguments.include_path,
        num_fewshot=arguments.num_fewshot,
        limit=int(limit) if limit and limit % 1 == 0 else limit,
        batch_size=arguments.batch_size or "auto",
        apply_chat_template=arguments.apply_chat_template,
        system_instruction=arguments.system_instruction,
        executor=executor,
        checkpoint=arguments.checkpoint,
    )
    _show_tasks(result, arguments.json)
    if arguments.output is not None:
        write_json(arguments.output, result)


def _show_tasks(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show(result, True)
        return
    for task, metrics in result["tasks"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{filtered}")
                print(f"{task:<24} {metric:<20} {value:.6g}" + ("" if error is None else f" ± {error:.2g}"))
    print()
    show(_shown({name: value for name, value in result.items() if name != "tasks"}, False), False)


def compare(arguments: argparse.Namespace) -> None:
    """How two results of `eval --output` differ: in how they were measured, and by how much."""
    result = pf.evaluate.compare(read_result(arguments.a), read_result(arguments.b))
    print(to_json(result.to_dict()) if arguments.json else result)


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    command.add_argument("--tasks", nargs="+", help="tasks of lm-evaluation-harness, in place of a text's perplexity")
    command.add_argument("--include-path", type=Path, help="a folder with more tasks")
    command.add_argument(
        "--num-fewshot", type=int, help="examples in a task's prompts; the task's own number if not given"
    )
    command.add_argument("--batch-size", help="of tasks; no score depends on it")
    command.add_argument(
        "--apply-chat-template", action="store_true", help="put a task's prompts into the chat template"
    )
    command.add_argument("--system-instruction", help="system message of the chat template")
    command.add_argument("--text", nargs="+", help="UTF-8 files, each a document; else one that ships with pyferrum")
    command.add_argument("--method", choices=METHODS, default="stream", help="what perplexity means")
    command.add_argument("--window", type=int, default=512, help="tokens fed at a time")
    command.add_argument("--stride", type=int, help="tokens between strided windows; half a window if not given")
    command.add_argument(
        "--limit",
        type=float,
        help="first so many tokens of each text, words and bytes uncounted, or documents of a task",
    )
    command.add_argument("--bos", choices=("auto", "always", "never"), default="auto")
    command.add_argument("--output", type=Path, help="write the result to a JSON file, without timings")
    command.add_argument("--no-token-nlls", action="store_true", help="leave the NLL of each token out of the file")
    command.add_argument("--checkpoint", type=Path, help="keep what is scored in this file, and go on from it")
    command.add_argument("--dask", metavar="ADDRESS", help="score on the cluster of this dask.distributed scheduler")


def add_compare_options(command: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)


def _client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise pf.UnsupportedError("--dask: needs the extra `pyferrum[cluster]` (distributed)") from error
    return Client(address)


def _shown(values: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """For people, without hashes' tails and what does not apply."""
    if as_json:
        return values
    model, devices = values.pop("model"), values.pop("devices")
    versions = values.pop("versions")
    shown = {n: value for n, value in values.items() if (value is not None and value is not False) or n == "bos"}
    shown |= {name: shown[name][:16] for name in ("text_sha256", "scored_sha256") if name in shown}
    return shown | {
        "model": f"{model['name']} ({model['architecture']}), SHA-256 {model['sha256'][:16]}",
        "devices": "; ".join(f"{d['name']} {d['instruction_set']}, build {d['build'][:16]}" for d in devices),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
