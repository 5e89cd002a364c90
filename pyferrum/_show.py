"""How commands print what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def show(value: Mapping[str, Any], as_json: bool) -> None:
    """Print names and values in two columns, or one JSON object."""
    if as_json:
        print(json.dumps(value))
        return
    width = max(len(key) for key in value)
    for key, entry in value.items():
        shown = f"{entry:,}" if isinstance(entry, int) and not isinstance(entry, bool) else entry
        print(f"{key:<{width}}  {shown}")
