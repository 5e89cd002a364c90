"""Rotary frequencies: how many radians a pair of dims turns per position, and the scalings of long-context models.

Formulas after transformers' modeling_rope_utils. Everything is float64; devices build their tables from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum.errors import InvalidArgument

Float64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Above `low_freq_factor`."""
    original_context: int = 8192

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_context")
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvalidArgument(
                f"[Llama3Scaling] high_freq_factor: expected above low_freq_factor={self.low_freq_factor}, got "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: a ramp over dims between interpolation and extrapolation, and a factor on cos and sin."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """At most `beta_fast`."""
    attention_factor: float | None = None
    """None: 0.1 ln(factor) + 1, or 1 where factor is below 1."""
    truncate: bool = True
    """The ramp begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_context", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _check_positive(self, "attention_factor")
        if self.beta_slow > self.beta_fast:
            raise InvalidArgument(
                f"[YarnScaling] beta_slow: expected at most beta_fast={self.beta_fast}, got {self.beta_slow}"
            )


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor for each frequency: GGUF's `rope_freqs.weight`."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for index, divisor in enumerate(self.divisors):
            if not _is_positive(divisor):
                raise InvalidArgument(
                    f"[FrequencyFactors] divisors[{index}]: expected a positive number, got {divisor!r}"
                )


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and bool(0 < value < math.inf)


def _check_positive(scaling: Any, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not _is_positive(value):
            raise InvalidArgument(f"[{type(scaling).__name__}] {name}: expected a positive number, got {value!r}")


def inverse_frequencies(theta: float, rope_dim: int, scaling: Scaling | None = None) -> Float64:
    """Radians per position of each pair: theta^(-2i / rope_dim), scaled. float64 [rope_dim / 2].

    Raises:
        InvalidArgument: a scaling that does not fit theta or rope_dim.
    """
    inverse = np.asarray(theta, np.float64) ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    match scaling:
        case None:
            return inverse
        case LinearScaling(factor):
            return inverse / factor
        case Llama3Scaling(factor, low, high, original):
            wavelength = 2 * np.pi / inverse
            smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
            return (1 - smooth) * inverse / factor + smooth * inverse
        case YarnScaling(factor, original, fast, slow):
            if theta <= 1:
                raise InvalidArgument(f"rope_theta: expected above 1 for YaRN, got {theta}")

            def correction(beta: float) -> float:
                turns = math.log(original) - math.log(beta) - math.log(2 * math.pi)
                return rope_dim * turns / (2 * math.log(theta))

            begin, end = correction(fast), correction(slow)
            if scaling.truncate:
                begin, end = math.floor(begin), math.ceil(end)
            begin, end = max(begin, 0), min(end, rope_dim - 1)
            span = end - begin if end != begin else 0.001
            ramp = np.clip((np.arange(rope_dim // 2) - begin) / span, 0, 1)
            return inverse / factor * ramp + inverse * (1 - ramp)
        case FrequencyFactors(divisors):
            if len(divisors) != rope_dim // 2:
                raise InvalidArgument(
                    f"rope_scaling: expected {rope_dim // 2} frequency factors for rope_dim={rope_dim}, "
                    f"got {len(divisors)}"
                )
            return inverse / np.asarray(divisors, np.float64)
    raise InvalidArgument(f"rope_scaling: expected a scaling of pyferrum.rope, got {scaling!r}")


def attention_factor(scaling: Scaling | None) -> float:
    """What cos and sin are multiplied by: 1 but for YaRN."""
    if isinstance(scaling, YarnScaling):
        return scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1
    return 1.0
