"""Explicit random keys: a function that draws takes a key, and gives the same numbers for the same key.

NumPy's Philox does the drawing; a key is its 128-bit key. Split a key to get independent ones, and use each once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pyferrum.errors import InvalidArgument


class Key(NamedTuple):
    """A key of Philox-4x64: two 64-bit words."""

    high: int
    low: int


def key(seed: int) -> Key:
    """The key of a seed: 0…2^64-1."""
    if not 0 <= seed < 1 << 64:
        raise InvalidArgument(f"seed: expected 0…2^64-1, got {seed}")
    return Key(0, int(seed))


def as_key(given: Key | int) -> Key:
    """A key, or the key of a seed."""
    if isinstance(given, Key):
        return given
    if not isinstance(given, (int, np.integer)):
        raise InvalidArgument(f"key: expected a Key, as `key` and `split` give, or a seed, got {given!r}")
    return key(int(given))


def _generator(key: Key) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([key.low, key.high], np.uint64)))


def split(key: Key, count: int = 2) -> tuple[Key, ...]:
    """`count` keys, independent of each other and of `key`, which must not be used again."""
    if not isinstance(key, Key):
        raise InvalidArgument(f"key: expected a Key, as `key` gives for a seed, got {key!r}")
    words = _generator(key).integers(0, 1 << 64, size=(count, 2), dtype=np.uint64)
    return tuple(Key(int(high), int(low)) for high, low in words)


def uniform(key: Key, shape: tuple[int, ...] = ()) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 in [0, 1)."""
    return np.asarray(_generator(key).random(shape))


def categorical(key: Key, probabilities: ArrayLike) -> int:
    """An index drawn with the given probabilities, float [n]; they need not sum to one."""
    cumulative = np.cumsum(np.asarray(probabilities, np.float64))
    if cumulative.size == 0 or not np.isfinite(cumulative[-1]) or cumulative[-1] <= 0:
        raise InvalidArgument("probabilities: expected finite numbers >= 0 with a positive sum")
    # The last index of a flat stretch has probability zero: search from the right of equal values.
    index = np.searchsorted(cumulative, float(uniform(key)) * cumulative[-1], side="right")
    return int(min(index, np.flatnonzero(np.diff(cumulative, prepend=0.0))[-1]))
