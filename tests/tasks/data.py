"""The documents of the harness's tasks in this folder, wherever it lies: no network, no cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def _load(name: str) -> dict[str, Any]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines.splitlines()])}


def choice(**_: Any) -> dict[str, Any]:
    return _load("choice.jsonl")


def pages(**_: Any) -> dict[str, Any]:
    return _load("pages.jsonl")


def answers(**_: Any) -> dict[str, Any]:
    return _load("answers.jsonl")


def counts(doc: dict[str, Any], results: Any) -> dict[str, Any]:
    """Log-likelihood of a page with its words and bytes."""
    (loglikelihood,) = results
    words, size = len(doc["page"].split()), len(doc["page"].encode())
    return {
        "word_perplexity": (loglikelihood, words),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
