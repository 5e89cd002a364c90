"""Sizes that the operations beside attention are run with."""

from __future__ import annotations

SHAPES = [(1, 1), (1, 16), (3, 17), (5, 576), (33, 2561)]
"""Rows and width."""

VOCABULARIES = [1, 15, 16, 97, 1024, 49152]
"""Logits of a row, for cross-entropy."""

TOP_K_WIDTHS = [1, 2, 50, 49152]
"""Values of a row, for argmax and top-k."""

LINEAR_SHAPES = [(1, 33, 256), (3, 16, 512), (7, 40, 768), (70, 17, 2560)]
"""Rows, outputs, inputs."""
