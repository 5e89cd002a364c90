"""From logits to a distribution to sample from, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum._check import whole_number
from pyferrum.errors import InvalidArgument

Float64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Applied in this order: temperature, top_k, top_p, min_p."""

    temp: float = 0.0
    """Logits are divided by it; 0: the most probable token, the lowest id of equals."""
    top_k: int = 0
    """Keep the k most probable; 0: all."""
    top_p: float = 1.0
    """Keep the most probable tokens until their sum reaches it (Holtzman et al. 2019)."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the best."""

    def __post_init__(self) -> None:
        if not self.temp >= 0 or not np.isfinite(self.temp):
            raise InvalidArgument(f"temp: expected a number >= 0, got {self.temp}")
        whole_number(self.top_k, "top_k", 0)
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p: expected 0 < top_p <= 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument(f"min_p: expected 0…1, got {self.min_p}")

    def probabilities(self, logits: np.ndarray[Any, Any]) -> Float64:
        """The distribution of the next token, float64 [vocabulary], from a row of logits."""
        x = np.asarray(logits, np.float64)
        best = np.argmax(x)  # a NaN, if there is one
        check_finite(x[best])
        if self.temp == 0:
            one = np.zeros(len(x))
            one[best] = 1
            return one
        p = np.exp((x - x[best]) / self.temp)
        p /= p.sum()
        if self.top_k or self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            kept = order[: self.top_k] if self.top_k else order
            p = _keep(p, kept)
            # The token that crosses top_p stays; so the best one always does.
            before = np.cumsum(p[kept]) - p[kept]
            p = _keep(p, kept[before < self.top_p])
        if self.min_p:
            p = _keep(p, np.flatnonzero(p >= self.min_p * p.max()))
        return p


def check_finite(numbers: Any) -> None:
    """Refuse what a model whose logits are no numbers gives: NaN or infinity among the largest of them, or scores."""
    if not np.isfinite(numbers).all():
        found = np.ravel(numbers)
        raise InvalidArgument(
            f"logits: expected finite numbers from the model, got {found[~np.isfinite(found)][0]}; its weights may be "
            f"damaged, or too large for its dtype"
        )


def _keep(p: Float64, indices: np.ndarray[Any, Any]) -> Float64:
    """p outside `indices` set to zero, renormalised."""
    kept = np.zeros_like(p)
    kept[indices] = p[indices]
    return kept / kept.sum()


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probabilities of a row of logits, float32 [vocabulary], computed in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max()
    return (x - np.log(np.exp(x).sum())).astype(np.float32)
