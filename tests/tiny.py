"""Small things for tests: a random layer, a fresh interpreter, and a random Llama on disk.

The Llama has 2 layers, hidden 64, 4 heads and 97 tokens: BOS, EOS and the printable ASCII characters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import pyferrum as pf
from pyferrum.checkpoint.safetensors import save_safetensors

ROOT = Path(__file__).resolve().parent.parent
LAYER = pf.AttentionConfig(32, 2, 1, 16, maximum_context_tokens=8192)
"""A layer for `layer` and `rows`; 1,024 tokens a page."""

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 4, 2, 16, 96
BOS, EOS = 0, 1
# Byte-level spelling of characters 32…126: a space is written Ġ, the others stand for themselves.
TOKENS = ["<s>", "</s>", *(chr(code).replace(" ", "Ġ") for code in range(32, 127))]
VOCABULARY = len(TOKENS)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def ids(text: str, *, bos: bool = False) -> list[int]:
    """What the tokenizer makes of printable ASCII."""
    return [BOS] * bos + [ord(character) - 32 + 2 for character in text]


def tensors(seed: int = 0, dtype: Any = np.float16, *, head_dim: int = HEAD_DIM) -> dict[str, np.ndarray]:
    """Random weights by their names in a safetensors file; projections give about unit variance."""
    rng = np.random.default_rng(seed)

    def matrix(out: int, into: int) -> np.ndarray:
        return (rng.standard_normal((out, into)) / np.sqrt(into)).astype(dtype)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)

    result = {"model.embed_tokens.weight": (matrix(VOCABULARY, HIDDEN) * 8).astype(dtype)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        result |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return result | {"model.norm.weight": norm(), "lm_head.weight": matrix(VOCABULARY, HIDDEN) * 2}


def write_tiny(
    folder: Path,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """The folder, with model.safetensors, config.json, tokenizer.json and tokenizer_config.json in it.

    `config` and `tokenizer` change or add settings of config.json and tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / "model.safetensors", weights or tensors())
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(tokenizer or {})))
    return folder


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter stores them, for interleaved rotation (FACTS F.3)."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_tiny_gguf(
    path: Path,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    keys: Mapping[str, str | int | float | list[Any]] | None = None,
    permuted: bool = True,
    architecture: str = "llama",
) -> Path:
    """The same weights as a GGUF file, q and k rows and their biases permuted as converted for `llama`; no tokenizer.

    `keys` change or add metadata.
    """
    writer = gguf.GGUFWriter(path, architecture)
    given = {
        "block_count": LAYERS,
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "rope.freq_base": CONFIG["rope_theta"],
    }
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in ({f"{architecture}.{key}": x for key, x in given.items()} | dict(keys or {})).items():
        add[type(value)](key, value)
    for name, weight in (weights or tensors()).items():
        owner, _, kind = name.rpartition(".")
        head, _, part = owner.removeprefix("model.layers.").partition(".")
        target = f"blk.{head}.{_GGUF_NAMES[part]}" if part in _GGUF_NAMES else _GGUF_NAMES.get(owner, owner)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(target.rpartition(".")[2], 0)
        stored = f"{target}.{kind}" if target != owner else name
        moved = heads and permuted and kind in ("weight", "bias")
        writer.add_tensor(stored, permute(weight, heads) if moved else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer(config: pf.AttentionConfig = LAYER, device: pf.Device | None = None) -> pf.AttentionWeights:
    """Random weights of one attention layer, with every optional one."""
    rng = np.random.default_rng(0)

    def random(*shape: int, dtype: Any = np.float16) -> pf.Array:
        return pf.array((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype), device=device)

    hidden, query, kv, dim = config.hidden_size, config.query_projection_features, config.kv_features, config.head_dim
    matrices = random(query, hidden), random(kv, hidden), random(kv, hidden), random(hidden, query)
    return pf.AttentionWeights(
        random(hidden), *matrices, random(dim), random(dim), random(query), random(kv), random(kv), random(hidden)
    )


def rows(tokens: int, seed: int = 1, *, width: int = LAYER.hidden_size, dtype: Any = np.float32) -> np.ndarray:
    """Random hidden states."""
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(dtype)


def python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """`code` as a script in a fresh interpreter; a hang is an exit code of its own, and ends with all its children."""
    command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=12)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            stderr += "hangs"
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024
