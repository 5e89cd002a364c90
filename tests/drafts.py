"""Draft models for tests: random ones on disk for a target, and two that know what the target will say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np

import pyferrum as pf
from pyferrum.checkpoint.safetensors import save_safetensors
from pyferrum.models import dflash, dflash_files
from pyferrum.models.draft import NO_PROPOSAL
from pyferrum.sampling import Sampling

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "num_target_layers": 64,
    "max_position_embeddings": 262144,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
"""config.json of the published draft model of Qwen3.8-27B (FACTS D.4)."""


def settings(hidden: int, *, second: bool, windows: Sequence[int | None] = (24, 24), **nested: Any) -> dict[str, Any]:
    """A small config.json for a target of this width."""
    sizes = {"hidden_size": hidden, "intermediate_size": 96, "num_hidden_layers": len(windows)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    inner: dict[str, Any] = {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [0, 1]}
    if second:
        inner |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    return PUBLISHED | sizes | heads | {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "sliding_window": max((w for w in windows if w), default=None),
        "num_target_layers": None,
        "rope_theta": 10000.0,
        "dflash_config": inner | nested,
    }  # fmt: skip


def random_tensors(config: dflash.DFlashConfig, seed: int = 0, dtype: Any = pf.bfloat16) -> dict[str, np.ndarray]:
    """Random weights of every tensor."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return (1 + 0.1 * rng.standard_normal(shape)).astype(dtype)
        scale = 0.3 if "conv" in name else 1.0
        x = scale * rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) == 2 else 1)
        if len(shape) == 3:
            x[:, 0] += 1
        return x.astype(dtype)

    return {name: draw(name, shape) for name, shape in dflash_files.tensor_shapes(config).items()}


def write_draft(
    folder: Path,
    target: pf.Model,
    *,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
) -> Path:
    """The folder, with config.json and model.safetensors in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_safetensors(folder / "model.safetensors", weights or random_tensors(parsed(config, target), seed))
    return folder


def parsed(config: Mapping[str, Any], target: pf.Model | None = None) -> dflash.DFlashConfig:
    """What the loader makes of a config.json."""
    files: Any = SimpleNamespace(path="config", config=config, tensors={})
    return dflash_files.hf_config(files, target.config.vocabulary if target else 248320)


def write_draft_gguf(
    path: Path,
    config: dflash.DFlashConfig,
    weights: Mapping[str, np.ndarray],
    *,
    target_layers: Sequence[int] | None = None,
    mask_key: str = "tokenizer.ggml.mask_token_id",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """The same model as a GGUF file; `keys` change or add metadata of `dflash`."""
    writer = gguf.GGUFWriter(path, "dflash")
    window = next((w for w in config.windows if w), 0)
    numbers = {
        "block_count": config.layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.query_heads,
        "attention.head_count_kv": config.key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.sliding_window": window,
        "block_size": config.block_size,
        "conv_kernel_size": config.conv_taps,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }
    others = {
        "attention.layer_norm_rms_epsilon": config.epsilon,
        "rope.freq_base": config.rope_theta,
        "attention.causal": config.causal[0],
        "attention.sliding_window_pattern": [w is not None for w in config.windows],
        "target_layers": [i + 1 for i in config.target_layers] if target_layers is None else target_layers,
    }
    add = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in (numbers | others | dict(keys or {})).items():
        add[type(value)](f"dflash.{key}", value)
    writer.add_uint32(mask_key, config.mask_token)
    for name, weight in weights.items():
        stored = name if name == "rope_freqs.weight" else dflash_files.gguf_name(name)
        writer.add_tensor(stored, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Scripted:
    """Proposes what it was told will come, or, if `wrong`, something else. Its state: the length of each lane."""

    taps: tuple[int, ...] = ()
    block_size = 8

    def __init__(self, continuations: Sequence[Sequence[int]], prompts: Sequence[int], *, wrong: int = 0) -> None:
        self.continuations, self.prompts, self.wrong = continuations, prompts, wrong

    def init_state(self, lanes: int) -> tuple[int, ...]:
        return (0,) * lanes

    def extend(self, state: tuple[int, ...], tokens: Any, features: Any) -> tuple[int, ...]:
        return tuple(n + len(t) for n, t in zip(state, tokens, strict=True))

    def propose(
        self, state: tuple[int, ...], anchors: Any, rows: Sequence[int], temperature: float, keys: Any
    ) -> list[pf.Proposal]:
        result = []
        for lane, (length, count) in enumerate(zip(state, rows, strict=True)):
            start = length - self.prompts[lane] + 1
            known = self.continuations[lane][start : start + count - 1]
            tokens = np.array([*known, *[0] * count])[: count - 1] ^ self.wrong
            result.append(pf.Proposal(tokens.tolist(), tokens[:, None], np.ones((count - 1, 1))))
        return result


class Itself:
    """The target as its own draft model; its state: the tokens of each lane."""

    taps: tuple[int, ...] = ()
    block_size = 8

    def __init__(self, model: pf.Model) -> None:
        self.model = model

    def init_state(self, lanes: int) -> tuple[tuple[int, ...], ...]:
        return ((),) * lanes

    def extend(self, state: Any, tokens: Any, features: Any) -> Any:
        return tuple((*old, *new) for old, new in zip(state, tokens, strict=True))

    def propose(
        self, state: Any, anchors: Any, rows: Sequence[int], temperature: float, keys: Any
    ) -> list[pf.Proposal]:
        result = []
        sampling = Sampling(temperature)
        for tokens, anchor, count, key in zip(state, anchors, rows, keys, strict=True):
            if count == 1:
                result.append(NO_PROPOSAL)
                continue
            at, logits = self.model.forward(self.model.init_state(), [*tokens, anchor], last_only=True)
            chosen, q = [], []
            for draw in pf.random.split(key, count - 1):
                q.append(sampling.probabilities(np.asarray(logits)[0]))
                chosen.append(pf.random.categorical(draw, q[-1]))
                if len(chosen) < count - 1:
                    at, logits = self.model.forward(at, chosen[-1:], last_only=True)
            result.append(pf.Proposal(chosen, np.tile(np.arange(len(q[0])), (count - 1, 1)), np.array(q)))
        return result


class Chain:
    """A target of six tokens whose logits are random numbers of the last one: what the loop asks of a model."""

    size = 6
    tokenizer = SimpleNamespace(eos_token_ids=frozenset(), stream=lambda after: SimpleNamespace(push=str, flush=str))
    config = SimpleNamespace(attention=SimpleNamespace(maximum_context_tokens=1 << 40), vocabulary=size)

    def __init__(self, seed: int) -> None:
        self.rows = np.random.default_rng(seed).standard_normal((self.size, self.size)).astype(np.float32)

    @dataclass(frozen=True)
    class State:
        length: int = 0

        def truncate(self, length: int) -> Chain.State:
            return Chain.State(length)

    def init_state(self) -> Chain.State:
        return Chain.State()

    def forward(self, state: Any, tokens: Any, *, last_only: bool = False, chunk: int = 512, taps: Any = None) -> Any:
        if isinstance(state, list):
            pairs = [self.forward(s, t) for s, t in zip(state, tokens, strict=True)]
            return [s for s, _ in pairs], [rows for _, rows in pairs]
        rows = self.rows[np.asarray(tokens)]
        return Chain.State(state.length + len(tokens)), rows[-1:] if last_only else rows


class ChainDrafter:
    """Another chain over the first four tokens, which draws its drafts one after another."""

    taps: tuple[int, ...] = ()
    block_size = 6

    def __init__(self, seed: int) -> None:
        rows = np.random.default_rng(seed).standard_normal((Chain.size, 4))
        self.q = np.array([Sampling(1.0).probabilities(row) for row in rows])

    def init_state(self, lanes: int) -> None:
        return None

    def extend(self, state: None, tokens: Any, features: Any) -> None:
        return None

    def propose(
        self, state: None, anchors: Any, rows: Sequence[int], temperature: float, keys: Any
    ) -> list[pf.Proposal]:
        result = []
        for token, count, key in zip(anchors, rows, keys, strict=True):
            tokens, q = [], []
            for u in pf.random.uniform(key, (count - 1,)):
                q.append(self.q[token])
                token = min(int(np.searchsorted(np.cumsum(q[-1]), u, side="right")), 3)
                tokens.append(token)
            result.append(pf.Proposal(tokens, np.tile(np.arange(4), (count - 1, 1)), np.array(q)))
        return result


def drafter_for(model: pf.Model, folder: Path, second: bool, **options: Any) -> pf.DraftModel:
    """A random one in a folder, of `settings` for the model's width."""
    config = settings(model.config.hidden_size, second=second, **options)
    return pf.load_draft(write_draft(folder, model, config=config), model)
