"""Two results beside each other: what differs in how they were measured, and by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum.errors import InvalidArgument
from pyferrum.evaluate.results import OUTCOME, Evaluation


@dataclass(frozen=True)
class Difference:
    """One number in both results. Differences are B less A."""

    name: str
    a: float
    b: float
    difference: float
    standard_error: float | None
    """Of the difference; None where the results do not say enough."""
    paired: bool
    """Whether the standard error is of differences token by token."""

    def __str__(self) -> str:
        text = f"{self.name:<28} {self.a:>12.6g} {self.b:>12.6g} {self.difference:>+12.4g}"
        if self.standard_error is None:
            return text
        return f"{text}  ± {self.standard_error:.2g}{' (paired)' if self.paired else ''}"


@dataclass(frozen=True)
class Comparison:
    """How two results differ."""

    measured_differently: Mapping[str, tuple[Any, Any]]
    """Settings that are not the same, by name: (A's, B's)."""
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        lines = ["measured alike" if not self.measured_differently else "measured differently:"]
        lines += [f"  {name}: {a!r} | {b!r}" for name, (a, b) in self.measured_differently.items()]
        lines += [f"{'':<28} {'A':>12} {'B':>12} {'B - A':>12}", *(str(difference) for difference in self.differences)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "measured_differently": {name: list(pair) for name, pair in self.measured_differently.items()},
            "differences": [dict(vars(difference)) for difference in self.differences],
        }


def compare(a: Evaluation | Mapping[str, Any], b: Evaluation | Mapping[str, Any]) -> Comparison:
    """Compare two results: `Evaluation`s, or what `read_result` gives.

    The standard error of a difference of mean NLLs is of the differences token by token where both results have the
    NLLs of the same tokens, which is much smaller than that of two results by themselves; else it is of two
    independent means.

    Raises:
        InvalidArgument: one is a perplexity and the other of tasks, they have no task in common, or their NLLs are not
            as many though they say that they are of the same tokens.
    """
    a, b = (value.to_dict(nlls=True) if isinstance(value, Evaluation) else value for value in (a, b))
    if a["kind"] != b["kind"]:
        raise InvalidArgument(f"b: expected a result of kind {a['kind']!r} like a, got {b['kind']!r}")
    kept = {"kind", "token_nlls", "tasks", "samples", *OUTCOME}
    flat_a, flat_b = (_flat({name: value for name, value in x.items() if name not in kept}) for x in (a, b))
    names = dict.fromkeys([*flat_a, *flat_b])
    different = {n: (flat_a.get(n), flat_b.get(n)) for n in names if flat_a.get(n) != flat_b.get(n)}
    differences = _perplexities(a, b) if a["kind"] == "perplexity" else _tasks(a["tasks"], b["tasks"])
    return Comparison(different, tuple(differences))


def _perplexities(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    paired = a["scored_sha256"] == b["scored_sha256"] and "token_nlls" in a and "token_nlls" in b
    errors = a["standard_error"], b["standard_error"]
    error = None
    if paired:
        nlls_a, nlls_b = (np.asarray(x["token_nlls"], np.float64) for x in (a, b))
        if nlls_a.shape != nlls_b.shape:
            raise InvalidArgument(
                f"b: token_nlls: expected {len(nlls_a)} of them, for a's tokens (scored_sha256), got {len(nlls_b)}"
            )
        gaps = nlls_b - nlls_a
        error = float(gaps.std()) / (len(gaps) - 1) ** 0.5 if len(gaps) > 1 else None
    elif None not in errors:
        error = sum(e**2 for e in errors) ** 0.5
    known = {"mean_nll": (error, paired)}
    return [
        Difference(name, a[name], b[name], b[name] - a[name], *known.get(name, (None, False)))
        for name in ("mean_nll", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        if a[name] is not None and b[name] is not None
    ]


def _tasks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    result = []
    for task in a:
        for name, value in a[task].items():
            other = b.get(task, {}).get(name)
            if name.partition(",")[0].endswith("_stderr") or not _number(value) or not _number(other):
                continue
            metric, _, filtered = name.partition(",")
            errors = [side[task].get(f"{metric}_stderr,{filtered}") for side in (a, b)]
            known = all(_number(error) for error in errors)
            error = sum(e**2 for e in errors) ** 0.5 if known else None
            result.append(Difference(f"{task} {metric}", value, other, other - value, error, False))
    if not result:
        raise InvalidArgument(f"b: expected a task in common with a ({', '.join(a)}), got {', '.join(b)}")
    return result


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            result |= _flat(entry, f"{prefix}{key}.")
        else:
            result[prefix + key] = entry
    return result
