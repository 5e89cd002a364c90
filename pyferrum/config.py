"""The shape of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyferrum import _native, _native_attention
from pyferrum.device import Device
from pyferrum.errors import InvalidArgument
from pyferrum.rope import Scaling, attention_factor, inverse_frequencies

_MAX_HEAD_DIM = _native.constant("FERRUM_MAX_HEAD_DIM")


@dataclass(frozen=True)
class AttentionConfig:
    """Everything about an attention layer but its weights. Frozen and hashable.

    Checked when a device first sees it: `init_state`, `causal_attention` and `plan_attention` raise
    InvalidArgument naming the field.
    """

    hidden_size: int
    query_heads: int
    """A multiple of `key_value_heads`."""
    key_value_heads: int
    head_dim: int
    """At most 256."""
    rope_dim: int | None = None
    """Leading dims of a head that are rotated; even. None: all of them."""
    maximum_context_tokens: int = 8192
    """Tokens a state may grow to: at most 16,384 pages of keys and values."""
    epsilon: float = 1e-5
    """Of every RMS norm in the layer."""
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    rope_interleaved: bool = False
    """True: pairs (2i, 2i+1), as llama-arch GGUF files have it. False: pairs (i, i + rope_dim / 2)."""
    output_gate: bool = False
    """True: `q_proj` also gives a gate; the context is multiplied by its sigmoid."""
    sliding_window: int | None = None
    """Keys a query sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: as they are."""
    scale: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""

    @property
    def rotary_dim(self) -> int:
        """`rope_dim`, or head_dim where that is None."""
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def query_projection_features(self) -> int:
        """Rows of `q_proj`."""
        return self.query_heads * self.head_dim * (2 if self.output_gate else 1)

    @property
    def kv_features(self) -> int:
        """Rows of `k_proj` and of `v_proj`."""
        return self.key_value_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return 4 * self.kv_features

    def inverse_frequencies(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Radians per position of each rotated pair, scaling applied: float64 [rope_dim / 2]."""
        return inverse_frequencies(self.rope_theta, self.rotary_dim, self.rope_scaling)

    @property
    def rope_attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return attention_factor(self.rope_scaling)

    def native(self, device: Device) -> Any:
        """The device's validated operation for this configuration, made once."""
        return device.cached(self, lambda: self._make(device))

    def _make(self, device: Device) -> Any:
        numbers = {
            "maximum_context_tokens": self.maximum_context_tokens,
            "hidden_size": self.hidden_size,
            "query_heads": self.query_heads,
            "key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "rope_dim": self.rotary_dim,
            "sliding_window": self.sliding_window or 0,
        }
        for name, value in numbers.items():
            bits = 63 if name == "maximum_context_tokens" else 32
            if not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
                raise InvalidArgument(f"[attention_config] {name}: expected a whole number, got {value!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidArgument("[attention_config] sliding_window: expected at least 1 or None, got 0")
        if self.softcap is not None and not np.float32(self.softcap) > 0:
            raise InvalidArgument(f"[attention_config] softcap: expected > 0 in float32 or None, got {self.softcap}")
        if self.scale and np.float32(self.scale) == 0:
            raise InvalidArgument(f"[attention_config] scale: expected a number that float32 has, got {self.scale}")
        if not 0 < self.rope_theta < float("inf"):
            raise InvalidArgument(f"[attention_config] rope_theta: expected a positive number, got {self.rope_theta}")
        if self.rotary_dim < 2:
            raise InvalidArgument(f"[attention_config] rope_dim: expected at least 2, got {self.rotary_dim}")
        config = numbers | {
            "output_gate": int(self.output_gate),
            "rope_interleaved": int(self.rope_interleaved),
            "epsilon": self.epsilon,
            "scale": self.scale or 0.0,
            "softcap": self.softcap or 0.0,
            "rope_attention_factor": self.rope_attention_factor,
        }
        # The device checks sizes before it reads a frequency: of sizes it will refuse, none are made.
        taken = self.rotary_dim <= self.head_dim <= _MAX_HEAD_DIM
        frequencies = self.inverse_frequencies() if taken else np.empty(0)
        return _native_attention.attention_new(device.handle, config, np.ascontiguousarray(frequencies))
