"""Tasks of lm-evaluation-harness, with a result that says how they were measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from typing import Any

from pyferrum.errors import InvalidArgument, UnsupportedError
from pyferrum.evaluate.provenance import device_facts, model_facts, versions
from pyferrum.models.model import Model


def evaluate_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    include_path: str | PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int | str = "auto",
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    executor: Any = None,
    checkpoint: str | PathLike[str] | None = None,
) -> dict[str, Any]:
    """Run tasks through the harness (extra `eval`).

    Args:
        model: the model.
        tasks: names or patterns of tasks and groups.
        include_path: a folder with more tasks.
        num_fewshot: examples in front of each question; None for the task's own number.
        limit: documents of each task: a number, or a fraction below 1. None for all.
        batch_size: what runs together. No score depends on it.
        apply_chat_template: put prompts into the model's chat template.
        system_instruction: system message of the template.
        executor: where log-likelihoods are computed, as in `pyferrum.evaluate.evaluate`.
        checkpoint: the beginning of the name of a database that keeps responses, to go on from if it is there. Model
            and build follow in the name, so that responses of another model are never taken.

    Returns:
        Plain data for JSON, the same for the same measurement: metrics of each task, settings, model, device, versions.
        Standard errors of metrics that are no means are from 1,000 resamplings, with the harness's own seeds.

    Raises:
        InvalidArgument: no task of that name, or a `num_fewshot` or `limit` out of its range.
        UnsupportedError: the extra is not installed.
    """
    if num_fewshot is not None and num_fewshot < 0:
        raise InvalidArgument(f"num_fewshot: expected at least 0, got {num_fewshot}")
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit % 1 == 0)):
        raise InvalidArgument(f"limit: expected a whole number of documents, or a fraction of them, got {limit}")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from pyferrum.lm_eval import PyferrumLM
    except ImportError as error:
        raise UnsupportedError(f"tasks: {error}; pip install 'pyferrum[eval]'") from error
    manager = None
    if include_path is not None:  # reading the harness's own thousands takes seconds
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if manager is None or _unknown(manager, tasks):
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := _unknown(manager, tasks):
        raise InvalidArgument(f"tasks: expected names of tasks, got {unknown[0]!r}, which the harness does not know")
    facts, device = model_facts(model), device_facts(model)
    cache = None
    if checkpoint is not None:
        cache = f"{checkpoint}-{facts['sha256'][:16]}-{model.dtype}-{device['build'][:16]}"
    # Its remarks on defaults of every task's configuration say nothing about the result.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = lm_eval.simple_evaluate(
        model=PyferrumLM(model, batch_size=batch_size, executor=executor),
        tasks=manager.match_tasks(list(tasks)),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        use_cache=cache,
        bootstrap_iters=1000,
        log_samples=False,
    )
    return {
        "kind": "tasks",
        "tasks": {task: _metrics(row) for task, row in found["results"].items()},
        "documents": {task: row["sample_len"] for task, row in found["results"].items() if "sample_len" in row},
        "task_versions": dict(found["versions"]),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "chat_template": apply_chat_template,
        "system_instruction": system_instruction,
        "residual_stream": str(model.dtype),
        "model": facts,
        "devices": [device],
        "versions": versions(),
    }


def _unknown(manager: Any, tasks: Sequence[str]) -> list[str]:
    return [name for name in tasks if not manager.match_tasks([name])]


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """`metric,filter` and `metric_stderr,filter` that are numbers."""
    result = {}
    for name, value in row.items():
        if "," in name and not isinstance(value, str):
            result[name] = float(value)
    return result
