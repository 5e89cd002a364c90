"""A tiny random model of each family of decoders that pyferrum loads, as transformers and llama.cpp store them.

A name of FAMILIES is a setting of a family: what its config.json has beside or instead of tiny.CONFIG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny

TOKENS = tiny.ids("The tide turns twice a day, and so do we.", bos=True)
"""What transformers' logits in figures/families.npz are of."""

_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | _WINDOW,
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 0.1,
        "rope_theta": 500.0,
    },
}
GGUF = ("llama", "qwen2", "qwen3")
"""Those that a GGUF file has all of, for it has no windows; they are its `general.architecture`."""


def weights(name: str) -> dict[str, np.ndarray]:
    """Random weights by their names in a safetensors file."""
    config = tiny.CONFIG | FAMILIES[name]
    dim, family = config.get("head_dim", tiny.HEAD_DIM), config["model_type"]
    rng = np.random.default_rng(7)
    result = tiny.tensors(head_dim=dim)
    for i in range(tiny.LAYERS):
        attention = f"model.layers.{i}.self_attn"
        for part in {"llama": "qkvo", "qwen2": "qkv"}.get(family, ""):
            rows = len(result[f"{attention}.{part}_proj.weight"])
            result[f"{attention}.{part}_proj.bias"] = rng.standard_normal(rows).astype(np.float32)
        for part in "qk" if family == "qwen3" else "":
            result[f"{attention}.{part}_norm.weight"] = (1 + rng.standard_normal(dim) / 2).astype(np.float32)
    if config["tie_word_embeddings"]:
        del result["lm_head.weight"]
    return result


def write_folder(folder: Path, name: str, **config: Any) -> Path:
    """The model as a folder of safetensors; `config` changes config.json further."""
    return tiny.write_tiny(folder, weights=weights(name), config=FAMILIES[name] | config)


def write_gguf(path: Path, name: str) -> Path:
    """The model as a GGUF file."""
    config = tiny.CONFIG | FAMILIES[name]
    keys: dict[str, Any] = {
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        keys |= {f"{name}.attention.{x}_length": config["head_dim"] for x in ("key", "value")}
    return tiny.write_tiny_gguf(path, weights=weights(name), keys=keys, architecture=name, permuted=name == "llama")
