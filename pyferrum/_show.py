"""How commands print what they found."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> str:
    """JSON text. It has no words for numbers that are not finite; they become null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(value: Mapping[str, Any], as_json: bool) -> None:
    """Print names and values in two columns, or one JSON object."""
    if as_json:
        print(to_json(value))
        return
    width = max(len(key) for key in value)
    for key, entry in value.items():
        shown = f"{entry:,}" if isinstance(entry, int) and not isinstance(entry, bool) else entry
        print(f"{key:<{width}}  {shown}")
