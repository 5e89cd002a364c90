"""Fixtures shared by all tests. Freed pages and buffers are filled with NaN, so that a stale read shows."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("PYFERRUM_DEBUG_POISON", "1")

import pytest

import pyferrum as pf
from pyferrum import _native
from pyferrum.demo_model import fetch
from tests import tiny


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The demo checkpoint, SmolLM2-135M-Instruct Q4_1, which `make test` has put in the cache."""
    return fetch()


@pytest.fixture(scope="session")
def model(model_path: Path) -> pf.Model:
    """The demo model with a float32 stream, loaded once."""
    return pf.load(model_path)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    """A tiny model of random weights, for draft models to be of."""
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("target")))


def _forget_recordings() -> None:
    for model in [candidate for candidate in gc.get_objects() if isinstance(candidate, pf.Model)]:
        model._programs.clear()


def settled_counts() -> dict[str, int]:
    """Live native objects once garbage is gone, without the configurations and recordings that are remembered."""
    pf.default_device()._cache.clear()
    _forget_recordings()
    gc.collect()
    pf.arena_stats()  # waits: on an asynchronous device, calls under way hold what they use
    return _native.debug_counts()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The test leaves as many native objects alive as it found."""
    before = settled_counts()
    yield
    assert settled_counts() == before
