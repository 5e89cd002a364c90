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


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The demo checkpoint, SmolLM2-135M-Instruct Q4_1, which `make test` has put in the cache."""
    return fetch()


@pytest.fixture(scope="session")
def model(model_path: Path) -> pf.Model:
    """The demo model with a float32 stream, loaded once."""
    return pf.load(model_path)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The test leaves as many native objects alive as it found."""
    gc.collect()
    before = _native.debug_counts()
    yield
    gc.collect()
    after = _native.debug_counts()
    assert after == before
