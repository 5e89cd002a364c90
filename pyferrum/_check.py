"""Checks of arguments that several functions take."""

from __future__ import annotations

import operator
from typing import Any

from pyferrum.errors import InvalidArgument


def whole_number(value: Any, name: str, least: int, most: int | None = None) -> int:
    """A whole number in a range, whatever its type; nothing else passes for one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}: expected a whole number, got {value!r}") from None
    if number < least or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least}…{most}"
        raise InvalidArgument(f"{name}: expected {expected}, got {number}")
    return number
