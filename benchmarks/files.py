"""The files that are measured: the demonstration model in other formats, kept in the cache folder.

Its matrices are dequantised from Q4_1 and quantised again, so the speeds are those of real shapes; the values do not
matter. Super-blocks of 256 do not fit its rows of 576. For them there is a model of about the same size, 16 layers
768 wide, whose blocks are random bytes under scales that keep its numbers in range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

REQUANTISED = ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
RANDOM = ("Q4_K", "Q5_K", "Q6_K")
FORMATS = ("Q4_1", *REQUANTISED, *RANDOM)

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KEY_VALUE_HEADS = 768, 2048, 16, 12, 4
"""Of the model of random blocks; heads of 64."""


def file_of(demo: Path, name: str) -> Path:
    """The GGUF file of a format, made on first use: the demonstration model itself for Q4_1."""
    if name == "Q4_1":
        return demo
    if name not in FORMATS:
        raise SystemExit(f"format: expected one of {', '.join(FORMATS)}, got {name}")
    path = demo.with_name(f"bench-{name}.gguf")
    if not path.exists():
        part = path.with_suffix(".part")
        _write(part, gguf.GGUFReader(demo), name)
        part.rename(path)
    return path


def _write(path: Path, source: gguf.GGUFReader, name: str) -> None:
    kind = GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(path, "llama")
    changed: dict[str, Any] = {"general.file_type": int(gguf.LlamaFileType.GUESSED)}
    if name in RANDOM:
        changed |= {
            "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FEED_FORWARD, "llama.block_count": LAYERS,
            "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KEY_VALUE_HEADS,
        }  # fmt: skip
    for field in source.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, changed.get(field.name, field.contents()), field.types[0], inner)
    for tensor, data, dtype in _random(source, kind) if name in RANDOM else _requantised(source, kind):
        writer.add_tensor(tensor, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Tensor = tuple[str, np.ndarray[Any, Any], GGMLQuantizationType]


def _requantised(source: gguf.GGUFReader, kind: GGMLQuantizationType) -> Iterator[Tensor]:
    for tensor in source.tensors:
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # The embedding, which is the output matrix as well, stays in 8 bits where the others have fewer.
        embedding = tensor.name == "token_embd.weight" and kind.name.startswith("Q")
        dtype = tensor.tensor_type if wide.ndim == 1 or embedding else kind
        yield tensor.name, gguf.quants.quantize(wide, dtype), dtype


def random_blocks(kind: GGMLQuantizationType, rows: int, width: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes of a matrix of random super-blocks; its numbers have about mean 0 and deviation 1 / sqrt(width)."""
    elements, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, width // elements, size), dtype=np.uint8)
    probe = data[0, :1].copy()

    def scales(blocks: np.ndarray[Any, Any], scale: float, minimum: float) -> None:
        if kind.name == "Q6_K":
            blocks[..., -2:] = np.array([scale], np.float16).view(np.uint8)
        else:
            blocks[..., :4] = np.array([scale, minimum], np.float16).view(np.uint8)

    middle = 2 ** (4 if kind.name == "Q4_K" else 5) / 2 - 0.5
    scales(probe, 2.0**-10, middle * 2.0**-10)
    deviation = float(gguf.quants.dequantize(probe, kind).std()) * 2**10
    scale = 1 / (deviation * math.sqrt(width))
    scales(data, scale, middle * scale)
    return data.reshape(rows, -1)


def _random(source: gguf.GGUFReader, kind: GGMLQuantizationType) -> Iterator[Tensor]:
    rng = np.random.default_rng(0)
    vocabulary = next(t for t in source.tensors if t.name == "token_embd.weight").data.shape[0]
    ones = np.ones(HIDDEN, np.float32)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEY_VALUE_HEADS * 64, HIDDEN), "attn_v": (KEY_VALUE_HEADS * 64, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    yield "token_embd.weight", random_blocks(kind, vocabulary, HIDDEN, rng), kind
    yield "output_norm.weight", ones, GGMLQuantizationType.F32
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", ones, GGMLQuantizationType.F32
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", random_blocks(kind, *shape, rng), kind


def hf_folder(demo: Path) -> Path:
    """A GGUF file's weights in bfloat16 as a Hugging Face folder, for torch and MLX; no tokenizer."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    folder = demo.with_name("bench-bf16-hf")
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    source = gguf.GGUFReader(demo)
    read = {name: field.contents() for name, field in source.fields.items()}
    heads = {"attn_q": read["llama.attention.head_count"], "attn_k": read["llama.attention.head_count_kv"]}
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    tensors = {}
    for tensor in source.tensors:
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.startswith("blk."):
            _, layer, stem, _ = tensor.name.split(".")
            if stem in heads:  # GGUF keeps the two halves of a head interleaved
                wide = wide.reshape(heads[stem], -1, 2, wide.shape[1]).swapaxes(1, 2).reshape(wide.shape)
            name = f"model.layers.{layer}.{names[stem]}.weight"
        else:
            outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            name = outer[tensor.name.removesuffix(".weight")] + ".weight"
        tensors[name] = np.ascontiguousarray(wide).astype(bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": read["llama.embedding_length"], "intermediate_size": read["llama.feed_forward_length"],
        "num_hidden_layers": read["llama.block_count"], "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"], "rms_norm_eps": read["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": read["llama.rope.freq_base"], "max_position_embeddings": read["llama.context_length"],
        "vocab_size": len(tensors["model.embed_tokens.weight"]), "bos_token_id": 1,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
