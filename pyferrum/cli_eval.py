"""`pyferrum eval` and `pyferrum compare`."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import pyferrum as pf
from pyferrum._show import show
from pyferrum.evaluate import METHODS, read_result


def evaluate(arguments: argparse.Namespace) -> None:
    """Perplexity of texts."""
    if arguments.text is None:
        texts = [resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()]
        name = "tidewatch.txt (ships with pyferrum)"
    else:
        texts, name = [Path(path).read_text(encoding="utf-8") for path in arguments.text], ", ".join(arguments.text)
    model = pf.load(arguments.model, dtype=arguments.dtype)
    documents: list[Any] = texts
    if arguments.limit is not None:
        documents = [model.tokenizer.encode(text, add_bos=False)[: arguments.limit] for text in texts]
    bos: Any = {"auto": "auto", "never": None, "always": model.tokenizer.bos_token_id}[arguments.bos]
    with ExitStack() as stack:
        executor = None
        if arguments.dask is not None:
            executor = stack.enter_context(_client(arguments.dask))
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
    if arguments.output is not None:
        result.save(arguments.output, nlls=not arguments.no_token_nlls)
    times = {"seconds": result.seconds, "tokens_per_second": result.tokens_per_second}
    show({"text": name, **_shown(result.to_dict(), arguments.json), **times}, arguments.json)


def compare(arguments: argparse.Namespace) -> None:
    """How two results of `eval --output` differ: in how they were measured, and by how much."""
    result = pf.evaluate.compare(read_result(arguments.a), read_result(arguments.b))
    print(json.dumps(result.to_dict()) if arguments.json else result)


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    command.add_argument("--text", nargs="+", help="UTF-8 files, each a document; else a text that ships with pyferrum")
    command.add_argument("--method", choices=METHODS, default="stream", help="what perplexity means")
    command.add_argument("--window", type=int, default=512, help="tokens fed at a time")
    command.add_argument("--stride", type=int, help="tokens between strided windows; half a window if not given")
    command.add_argument("--limit", type=int, help="use the first so many tokens of each document only")
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
    shown = {name: value for name, value in values.items() if value is not None or name == "bos"}
    for name in ("text_sha256", "scored_sha256"):
        shown[name] = shown[name][:16]
    return shown | {
        "model": f"{model['name']} ({model['architecture']}), SHA-256 {model['sha256'][:16]}",
        "devices": "; ".join(f"{d['name']} {d['instruction_set']}, build {d['build'][:16]}" for d in devices),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
