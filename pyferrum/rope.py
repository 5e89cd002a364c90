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


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: a ramp over dims between interpolation and extrapolation, and a factor on cos and sin."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """None: 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor for each frequency: GGUF's `rope_freqs.weight`."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


def inverse_frequencies(theta: float, rope_dim: int, scaling: Scaling | None = None) -> Float64:
    """Radians per position of each pair: theta^(-2i / rope_dim), scaled. float64 [rope_dim / 2]."""
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

            def correction(beta: float) -> float:
                return rope_dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

            begin = max(math.floor(correction(fast)), 0)
            end = min(math.ceil(correction(slow)), rope_dim - 1)
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
        return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return 1.0
