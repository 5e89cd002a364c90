"""What one token of decode in one layer takes on the Metal device, computed from the plan: the table of docs/metal.md.

    PYFERRUM_LIBRARY=build/softmetal/libferrum.so PYFERRUM_DEVICE=metal python benchmarks/metal_plan.py

Nothing is run. "DRAM bytes" is what has to be read or written once, whatever the caches do.
"""

from __future__ import annotations

import math

import pyferrum as pf
from pyferrum.formats import FORMATS

# The full-attention layers of Qwen3.5-4B.
CONFIG = pf.AttentionConfig(
    hidden_size=2560,
    query_heads=16,
    key_value_heads=4,
    head_dim=256,
    rope_dim=64,
    maximum_context_tokens=262144,
    epsilon=1e-6,
    output_gate=True,
)
FORMAT = "Q4_K"


def dram_bytes(launch: pf.plan.Launch) -> int:
    """Bytes of weights, keys, values and partials that the launch reads or writes, plus its rows."""
    p = launch.params
    if launch.kernel.startswith("linear"):
        rows = p["rows"] * 2 * (p["in_features"] + p["out_features"])
        return p["weight_row_bytes"] * p["out_features"] + rows
    if "attention" not in launch.kernel:
        return p["rows"] * p["width"] * (6 if "norm" in launch.kernel else 10)
    rows = 2 * p["tokens"] * p["query_heads"] * p["head_dim"]
    keys = (p["position_start"] + p["tokens"]) * 4 * p["key_value_heads"] * p["head_dim"]
    partials = 4 * p["tokens"] * p["query_heads"] * p["spans"] * p["partial_stride"]
    if "prepare" in launch.kernel:
        return 2 * rows + 8 * p["tokens"] * p["key_value_heads"] * p["head_dim"]
    if "combine" in launch.kernel:
        return partials + rows
    return keys + rows + (partials if "split" in launch.kernel else rows)


def operations(launch: pf.plan.Launch) -> int:
    """Multiply-adds counted as two."""
    p = launch.params
    if launch.kernel.startswith("linear"):
        return 2 * p["rows"] * p["in_features"] * p["out_features"]
    if "attention" not in launch.kernel:
        return p["rows"] * p["width"] * (4 if "norm" in launch.kernel else 1)
    heads = p["tokens"] * p["query_heads"] * p["head_dim"]
    if "prepare" in launch.kernel:
        return 12 * heads
    if "combine" in launch.kernel:
        return 3 * heads * p["spans"]
    return 4 * heads * (p["position_start"] + p["tokens"])


def main() -> None:
    """Print the table."""
    _, elements, size = FORMATS[FORMAT]
    print(f"Weights in {FORMAT} ({8 * size / elements:.4g} bits), device {pf.device_info()['name']}\n")
    print("| context | kernel | threadgroups | threads | DRAM bytes | operations | operations a byte |")
    print("|---|---|---|---|---|---|---|")
    for context in (1024, 32768, 262144):
        plan = pf.plan_attention(CONFIG, 1, starts=context - 1, formats=FORMAT)
        for launch in plan.launches:
            size, count = dram_bytes(launch), operations(launch)
            groups, threads = math.prod(launch.grid), math.prod(launch.threads)
            print(
                f"| {context // 1024}k | {launch.kernel} | {groups:,} | {threads} | {size:,} | {count:,} "
                f"| {count / size:.2g} |"
            )


if __name__ == "__main__":
    main()
