"""A loaded draft model beside its target: context in, proposed tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pyferrum import _random as random
from pyferrum import dflash2, ops
from pyferrum.checkpoint import open_gguf, open_safetensors
from pyferrum.errors import CheckpointError, InvalidArgument, UnsupportedError
from pyferrum.models import dflash, dflash_files
from pyferrum.models.loading import TensorLoader, check_unquantised
from pyferrum.models.model import Model
from pyferrum.sampling import Sampling

logger = logging.getLogger("pyferrum")


class Proposal(NamedTuple):
    """A draft for one lane."""

    tokens: list[int]
    candidates: np.ndarray[Any, Any]
    """[tokens, k]: what each token was chosen from; the probabilities of one that is there twice add up."""
    probabilities: np.ndarray[Any, Any]
    """[tokens, k]: with which probability each candidate was drawn; rows sum to 1, and no token's own is 0."""


NO_PROPOSAL = Proposal([], np.zeros((0, 1), int), np.zeros((0, 1)))


@runtime_checkable
class Drafter(Protocol):
    """What `speculative_generate` asks of a draft model; its states are immutable."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual stream is its context; may be empty."""

    @property
    def block_size(self) -> int:
        """Rows of a block it was made for."""

    def init_state(self, lanes: int) -> Any:
        """Before any context."""

    def extend(self, state: Any, tokens: Sequence[Sequence[int]], features: Sequence[np.ndarray[Any, Any]]) -> Any:
        """With new tokens of each lane as context, and the target's taps of them [tokens, taps * hidden]."""

    def propose(
        self, state: Any, anchors: Sequence[int], rows: Sequence[int], temperature: float, keys: Sequence[random.Key]
    ) -> list[Proposal]:
        """rows[lane] - 1 tokens behind each lane's anchor, which is not part of the context yet.

        They never reach past the target's context. A lane with one row is not asked: it has ended, or is about to; its
        proposal is empty. A lane's draws come from its own key, so that no other lane changes them.
        """


@dataclass(frozen=True)
class DraftModel:
    """A DFlash or DFlash 2 draft model beside its target. Made by `load_draft`."""

    config: dflash.DFlashConfig
    params: dflash.DraftParams
    target: Model
    mask_embedding: Any
    """bfloat16 [hidden], scaled."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual stream is its context."""
        return self.config.target_layers

    @property
    def block_size(self) -> int:
        """Rows of a block it was trained for."""
        return self.config.block_size

    def init_state(self, lanes: int = 1) -> dflash.DraftState:
        """Before any context."""
        return dflash.init_draft_state(self.config, lanes, device=self.target.device)

    def extend(
        self, state: dflash.DraftState, tokens: Sequence[Sequence[int]], features: Sequence[np.ndarray[Any, Any]]
    ) -> dflash.DraftState:
        """With new context behind each lane; see `dflash.extend`."""
        if any(len(t) != len(f) for t, f in zip(tokens, features, strict=True)):
            raise InvalidArgument("features: expected the taps of every token of the context")
        return dflash.extend(self.params, self.config, state, features)

    def scores(self, state: dflash.DraftState, anchors: Sequence[int], rows: int) -> tuple[Any, Any]:
        """(hidden states, logits) of every row of a block but the anchors': [B * (rows - 1), …]."""
        config, embedding = self.config, self.target.params.embedding
        x = np.asarray(ops.embed(np.repeat(np.asarray(anchors, np.int32), rows), embedding))
        scaled = x if config.embedding_scale == 1 else x * np.float32(config.embedding_scale)
        block = dflash2.dflash2_mask_rows(scaled, self.mask_embedding, len(anchors), rows)
        hidden = dflash.forward(self.params, config, state, block, rows)
        return dflash.logits(config, hidden, self.target.params.output, len(anchors))

    def propose(
        self,
        state: dflash.DraftState,
        anchors: Sequence[int],
        rows: Sequence[int],
        temperature: float,
        keys: Sequence[random.Key],
    ) -> list[Proposal]:
        """rows[lane] - 1 tokens behind each anchor: the selector's walk, or each row's own choice without one."""
        result = [NO_PROPOSAL] * len(anchors)
        # A row sees its whole block, so a lane that wants fewer rows than others, near its end, has a pass of those.
        for count in set(rows) - {1}:
            asked = {lane: keys[lane] for lane, n in enumerate(rows) if n == count}
            for lane, proposal in zip(asked, self._block(state, anchors, count, temperature, asked), strict=True):
                result[lane] = proposal
        return result

    def _block(
        self,
        state: dflash.DraftState,
        anchors: Sequence[int],
        rows: int,
        temperature: float,
        keys: Mapping[int, random.Key],
    ) -> list[Proposal]:
        """Proposals for the lanes that have a key here."""
        hidden, scores = self.scores(state, anchors, rows)
        lanes, steps, p = len(anchors), rows - 1, self.params
        if not self.config.is_second:
            x = np.asarray(scores).reshape(lanes, steps, -1)
            return [self._plain(x[lane], temperature, key) for lane, key in keys.items()]
        uniforms = np.zeros((lanes, steps), np.float32)
        if temperature:
            for lane, key in keys.items():
                uniforms[lane] = random.uniform(key, (steps,))
        tokens, candidates, q = (
            np.asarray(a)
            for a in dflash2.dflash2_select(
                scores,
                ops.linear(hidden, p.selector_hidden, dtype=np.float32),
                anchors,
                p.predecessor,
                p.successor,
                k=self.config.selector_top_k,
                temperature=temperature,
                uniforms=uniforms,
            )
        )
        return [Proposal(tokens[lane].tolist(), candidates[lane], q[lane]) for lane in keys]

    def _plain(self, scores: np.ndarray[Any, Any], temperature: float, key: random.Key) -> Proposal:
        if temperature == 0:
            best = np.asarray(ops.argmax(scores))
            return Proposal(best.tolist(), best[:, None], np.ones((len(best), 1)))
        q = np.array([Sampling(temperature).probabilities(row) for row in scores])
        tokens = [random.categorical(use, row) for use, row in zip(random.split(key, len(q)), q, strict=True)]
        return Proposal(tokens, np.broadcast_to(np.arange(q.shape[1]), q.shape), q)


def make_draft(config: dflash.DFlashConfig, params: dflash.DraftParams, target: Model) -> DraftModel:
    """A draft model from parts, checked against its target.

    Raises:
        CheckpointError: a setting that no draft model of this target can have.
    """
    _check(config.architecture, config, target)
    return _made(config, params, target)


def _made(config: dflash.DFlashConfig, params: dflash.DraftParams, target: Model) -> DraftModel:
    logger.info("draft model %s", config)
    return DraftModel(config, params, target, dflash.mask_embedding(config, target.params.embedding))


def _check(source: str, config: dflash.DFlashConfig, target: Model) -> None:
    """Raise CheckpointError unless a draft model of this target can be so."""
    c, hidden, vocabulary = config, target.config.hidden_size, target.config.vocabulary
    dflash_files.check_targets(source, c.target_layers, target.config.layers)
    rows, largest = min(c.block_size, dflash2.MAX_ROWS), float(np.finfo(np.float32).max)
    window = min((w for w in c.windows if w is not None), default=rows + 1)
    grouped = c.key_value_heads >= 1 and c.query_heads >= 1 and c.query_heads % c.key_value_heads == 0
    rules: list[tuple[str, Any, bool, str]] = [
        ("num_hidden_layers", c.layers, c.layers >= 1, "at least 1"),
        ("hidden_size", c.hidden_size, c.hidden_size == hidden, f"{hidden}, the target's"),
        ("target_hidden_size", c.target_hidden_size, c.target_hidden_size == hidden, f"{hidden}, the target's"),
        ("intermediate_size", c.intermediate_size, c.intermediate_size >= 1, "at least 1"),
        ("num_attention_heads", c.query_heads, grouped, f"a multiple of num_key_value_heads={c.key_value_heads}"),
        ("mask_token_id", c.mask_token, 0 <= c.mask_token < vocabulary, f"0…{vocabulary - 1}"),
        ("block_size", c.block_size, c.block_size >= 2, "at least 2"),
        ("sliding_window", window, window > rows, f"at least {rows + 1}, more than the rows of a block"),
        ("conv_kernel_size", c.conv_taps, 0 <= c.conv_taps <= dflash2.MAX_TAPS, f"0…{dflash2.MAX_TAPS}"),
        ("rms_norm_eps", c.epsilon, 0 < c.epsilon <= largest, "a positive number"),
        ("rope_theta", c.rope_theta, 0 < c.rope_theta <= largest, "a positive number"),
        ("input_embedding_scale", c.embedding_scale, abs(c.embedding_scale) <= largest, "a number"),
        ("output_multiplier", c.logit_scale, abs(c.logit_scale) <= largest, "a number"),
        ("final_logit_softcapping", c.softcap, 0 <= c.softcap <= largest, "0 or a positive number"),
    ]
    if c.is_second:
        group, most = c.conv_group_size, min(dflash2.MAX_CANDIDATES, vocabulary)
        books = c.selector_vocabulary
        rules += [
            ("conv_group_size", group, group >= 1 and hidden % group == 0, f"a divisor of hidden_size={hidden}"),
            ("selector_rank", c.selector_rank, c.selector_rank >= 1, "at least 1"),
            ("selector_top_k", c.selector_top_k, 1 <= c.selector_top_k <= most, f"1…{most}"),
            ("selector_vocab_size", books, books == vocabulary, f"{vocabulary}, the target's"),
        ]
    for name, value, holds, expected in rules:
        if not holds:
            raise CheckpointError(f"{source}: {name}: expected {expected}, got {value}")
    try:  # what rings and rotation take, which know their own limits
        dflash.init_draft_state(c, 1, device=target.device)
        dflash.angles(c, [0])
    except InvalidArgument as error:
        raise CheckpointError(f"{source}: {error}") from error


def load_draft(path: str | PathLike[str], target: Model, *, target_layers: Sequence[int] | None = None) -> DraftModel:
    """A draft model from a safetensors folder or a GGUF file.

    Args:
        path: what to load.
        target: the model it drafts for; it lends embedding and output matrix.
        target_layers: the tapped layers, counted from 0, in place of the file's: for files that count them otherwise.

    Raises:
        CheckpointError: damaged files, a tensor too few or too many, settings missing or not the target's.
        UnsupportedError: an architecture or a variant that is not built.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    names: Callable[[str], str]
    try:
        if path.suffix == ".gguf":
            file = open_gguf(path)
            if (architecture := file.get("general.architecture", str)) != "dflash":
                raise UnsupportedError(f"{path}: architecture {architecture!r} is not a draft model; known: dflash")
            config = dflash_files.gguf_config(file, target.config.vocabulary, target.config.hidden_size)
            loader = TensorLoader(path, file.tensors, file.files, target.device)
            loader.use("rope_freqs.weight")
            names = dflash_files.gguf_name
        else:
            files = open_safetensors(path)
            check_unquantised(files)
            config = dflash_files.hf_config(files, target.config.vocabulary)
            loader = TensorLoader(path, files.tensors, files.files, target.device)
            names = dflash_files.hf_name(files)
        if target_layers is not None:
            config = replace(config, target_layers=tuple(int(layer) for layer in target_layers))
        _check(str(path), config, target)
        return _made(config, dflash_files.load_params(config, loader, names), target)
    except InvalidArgument as error:  # sizes from the file that nothing can have
        raise CheckpointError(f"{path}: {error}") from error
