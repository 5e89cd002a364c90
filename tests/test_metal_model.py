"""The demo model on the Metal device, which on Linux runs in software: the same program in two processes, one a device.

SoftMetal is part of another library, so each device has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DECODE = """
import sys
import numpy as np
import pyferrum as pf
model = pf.load(sys.argv[1])
tokens = model.tokenizer.encode("The keeper of the tide gauge wrote")
state, logits = model.forward(model.init_state(), tokens)
rows = [np.asarray(logits)]
for token in model.tokenizer.encode(" down the height"):
    state, logits = model.forward(state, [token])
    rows.append(np.asarray(logits))
keys = np.asarray(state.layers[0].keys())
np.savez(sys.argv[2], logits=np.concatenate(rows), keys=keys, name=pf.device_info()["name"])
"""

LIBRARY = "build/softmetal/libferrum.so"


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS the device metal is the real one")
def test_model__decodes_on_metal_as_on_the_cpu(model_path: Path, tmp_path: Path) -> None:
    results = {}
    for device, extra in (("cpu", {}), ("metal", {"PYFERRUM_LIBRARY": LIBRARY})):
        out = tmp_path / f"{device}.npz"
        environment = os.environ | {"PYFERRUM_DEVICE": device} | extra
        subprocess.run([sys.executable, "-c", DECODE, str(model_path), str(out)], env=environment, check=True)
        results[device] = np.load(out)
    cpu, metal = results["cpu"], results["metal"]
    assert (str(cpu["name"]), str(metal["name"])) == ("cpu", "metal")
    np.testing.assert_array_equal(cpu["logits"].argmax(axis=1), metal["logits"].argmax(axis=1))
    # Both round at the same points; thirty layers of such roundings in another order of sums.
    np.testing.assert_allclose(metal["logits"], cpu["logits"], atol=0.15)
    np.testing.assert_allclose(metal["keys"], cpu["keys"], atol=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS the device metal is the real one")
def test_plan__one_token_of_a_long_context_fills_a_gpu() -> None:
    """At 32k tokens and above, attention of one token has at least 80 threadgroups: two for each of 40 cores."""
    environment = os.environ | {"PYFERRUM_DEVICE": "metal", "PYFERRUM_LIBRARY": LIBRARY}
    script = [sys.executable, "benchmarks/metal_plan.py"]
    table = subprocess.run(script, env=environment, check=True, capture_output=True, text=True).stdout
    rows = [line.split(" | ") for line in table.splitlines() if "attention_split" in line]
    groups = {row[0].strip("| "): int(row[2].replace(",", "")) for row in rows}
    assert set(groups) == {"32k", "256k"} and min(groups.values()) >= 80
