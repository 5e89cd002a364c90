"""Make smollm2_tidewatch.npz: what Hugging Face's Llama says about pyferrum's evaluation text.

The same weights (Q4_1, Q8_0 embedding, F32 norms), dequantised to float32, run through an implementation
that shares no code with pyferrum (gguf + tokenizers + torch + transformers), so that a test can compare
perplexity, top-1 tokens and KL divergence with it. To re-run, in a virtual environment of its own:

    pip install torch==2.13.0 transformers gguf tokenizers numpy
    python tests/figures/make_smollm2.py --model "$(python pyferrum/demo_model.py)" \\
        --text pyferrum/data/tidewatch.txt --out tests/figures/smollm2_tidewatch.npz

It takes about half a minute and 2 GB of memory on two cores.

The arrays, for the first n = min(2048, length) tokens as one context, positions from 0, no BOS:

    tokens        int32   [n]       token ids
    nll           float32 [n-1]     -ln p(token i+1 | tokens 0..i), float64 log-softmax of float32 logits
    argmax        int32   [n]       most likely next token after tokens 0..i
    margin        float32 [n]       largest minus second-largest logit at i
    kl_positions  int32   [380]     evenly spaced positions, first and last included
    kl_hidden     float32 [380,576] final-normed hidden state at each kl position: the logits are
                                    E @ hidden, with E the dequantised token embedding [49152,576]
    perplexity    float64           exp(mean nll), the mean taken in float64
    gguf_sha256, text_sha256, torch_version, transformers_version    strings
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

CONTEXT = 2048
KL_POSITIONS = 380
BLOCK = 128

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def field(reader: gguf.GGUFReader, key: str) -> Any:
    """The value of one metadata key; KeyError if the file lacks it."""
    return reader.fields[key].contents()


def hf_name(name: str) -> str:
    """The transformers name of a GGUF tensor name; KeyError if it has none."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
    return f"{TOP_NAMES[parts[0]]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama-arch GGUF's row order of a q or k matrix [heads*D, in] (RoPE pairs 2i, 2i+1 -> i, i+D/2)."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def load_model(reader: gguf.GGUFReader) -> transformers.LlamaForCausalLM:
    """The float32 model in eval mode, with eager attention; RuntimeError if a weight is missing or extra."""
    arch = field(reader, "general.architecture")
    if arch != "llama":
        raise ValueError(f"expected a llama-arch GGUF, got {arch!r}")
    heads = field(reader, "llama.attention.head_count")
    kv_heads = field(reader, "llama.attention.head_count_kv")
    hidden = field(reader, "llama.embedding_length")
    theta = float(field(reader, "llama.rope.freq_base"))
    config = transformers.LlamaConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        hidden_act="silu",
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    config._attn_implementation = "eager"
    state = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = unpermute(weight, heads if ".attn_q." in tensor.name else kv_heads)
        state[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    return model.eval()


def byte_level_bpe(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """The GGUF's byte-level BPE, which adds no BOS."""
    vocab = {token: index for index, token in enumerate(field(reader, "tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def tokenise(reader: gguf.GGUFReader, text: str) -> list[int]:
    """Token ids of `text`; ValueError if they do not decode back."""
    tokenizer = byte_level_bpe(reader)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise ValueError("the tokens do not decode back to the text")
    return ids


@torch.no_grad()
def hidden_states(model: transformers.LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Final-normed hidden states, float32 [n, hidden], of `ids` as one context that starts at position 0."""
    return model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def score(model: transformers.LlamaForCausalLM, hidden: torch.Tensor, ids: list[int]) -> dict[str, np.ndarray]:
    """`nll` float64 [n-1] in nats, `argmax` int32 [n] and `margin` float32 [n] from hidden [n, hidden]."""
    nll, argmax, margin = [], [], []
    for start in range(0, len(ids), BLOCK):
        logits = model.lm_head(hidden[start : start + BLOCK])
        top = logits.topk(2, dim=-1)
        argmax.append(top.indices[:, 0])
        margin.append(top.values[:, 0] - top.values[:, 1])
        targets = torch.tensor(ids[start + 1 : start + 1 + len(logits)])
        log_p = torch.log_softmax(logits.double(), dim=-1)[: len(targets)]
        nll.append(-log_p.gather(1, targets[:, None])[:, 0])
    return {
        "nll": torch.cat(nll).numpy(),
        "argmax": torch.cat(argmax).numpy().astype(np.int32),
        "margin": torch.cat(margin).numpy().astype(np.float32),
    }


def main() -> None:
    """Read the arguments, run the model, write the .npz and print its figures."""
    parser = argparse.ArgumentParser(description="Make the Hugging Face reference figures.")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct Q4_1 GGUF")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 evaluation text")
    parser.add_argument("--out", type=Path, required=True, help=".npz to write")
    args = parser.parse_args()

    text = args.text.read_bytes()
    reader = gguf.GGUFReader(args.model)
    model = load_model(reader)
    every_id = tokenise(reader, text.decode())
    ids = every_id[:CONTEXT]
    hidden = hidden_states(model, ids)
    scored = score(model, hidden, ids)
    perplexity = float(np.exp(scored["nll"].mean()))
    positions = np.linspace(0, len(ids) - 1, min(KL_POSITIONS, len(ids))).round().astype(np.int32)
    np.savez_compressed(
        args.out,
        tokens=np.array(ids, np.int32),
        nll=scored["nll"].astype(np.float32),
        argmax=scored["argmax"],
        margin=scored["margin"],
        kl_positions=positions,
        kl_hidden=hidden.numpy()[positions],
        gguf_sha256=hashlib.sha256(args.model.read_bytes()).hexdigest(),
        text_sha256=hashlib.sha256(text).hexdigest(),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        perplexity=perplexity,
    )
    size = args.out.stat().st_size
    print(f"{len(ids)} of {len(every_id)} tokens, perplexity {perplexity:.9f}, {size} bytes")


if __name__ == "__main__":
    main()
