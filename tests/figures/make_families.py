"""Make families.npz: what transformers says of tiny random models of each family that pyferrum loads.

The models are those that tests/families.py writes: the same folders go into transformers, whose code shares nothing
with pyferrum's. To re-run, in a virtual environment that has pyferrum (`pip install -e .`) beside:

    pip install torch==2.13.0 transformers gguf tokenizers ml_dtypes
    python -m tests.figures.make_families

The arrays, for each family `name` of tests.families.FAMILIES:

    name          float32 [tokens, vocabulary]   logits of families.TOKENS in float32
    name_weights  string                         SHA-256 of the folder's model.safetensors
    transformers_version, torch_version          strings
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests import families


def main() -> None:
    figures: dict[str, Any] = {}
    for name in families.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = families.write_folder(Path(folder), name)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            with torch.no_grad():
                figures[name] = model(torch.tensor([families.TOKENS])).logits[0].numpy()
            weights = (path / "model.safetensors").read_bytes()
            figures[f"{name}_weights"] = hashlib.sha256(weights).hexdigest()
    versions = {"transformers_version": transformers.__version__, "torch_version": torch.__version__}
    np.savez_compressed(Path(__file__).with_name("families.npz"), **figures, **versions)


if __name__ == "__main__":
    main()
