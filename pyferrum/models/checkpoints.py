"""Checkpoint files to a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from pyferrum import _native
from pyferrum.checkpoint import Tokenizer, open_gguf, open_safetensors
from pyferrum.device import Device, default_device
from pyferrum.errors import CheckpointError, InvalidArgument, UnsupportedError
from pyferrum.formats import hidden_format
from pyferrum.models import llama_files
from pyferrum.models.llama import LlamaConfig
from pyferrum.models.llama_files import FAMILIES
from pyferrum.models.loading import TensorLoader, check_unquantised
from pyferrum.models.model import Model
from pyferrum.rope import YarnScaling

logger = logging.getLogger("pyferrum")

_PAGE_BYTES = _native.constant("FERRUM_PAGE_BYTES")
_MAX_STATE_PAGES = _native.constant("FERRUM_MAX_STATE_PAGES")


def load(
    path: str | PathLike[str],
    *,
    dtype: DTypeLike = np.float32,
    device: Device | None = None,
    strict: bool = False,
) -> Model:
    """A model from a GGUF file, or from a folder (or file) of safetensors with its config.json.

    Weights are multiplied in the format they are stored in: from the memory-mapped file, or from a copy that the
    device prepares (`Model.memory` says how large).

    Args:
        path: what to load.
        dtype: of the residual stream: float32 (the float32-master ops) or float16.
        device: None for the default device.
        strict: a tensor that the model does not use is an error instead of a line in the log.

    Raises:
        CheckpointError: damaged or incomplete files; the message names file and tensor.
        UnsupportedError: an architecture or a feature that is not built; the message names it.
    """
    path = Path(path)
    device = device or default_device()
    hidden_format(dtype, "dtype")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    try:
        if path.suffix == ".gguf":
            return _load_gguf(path, dtype, device, strict)
        return _load_safetensors(path, dtype, device, strict)
    except InvalidArgument as error:  # sizes from the file that no layer can have
        raise CheckpointError(f"{path}: {error}") from error


def _load_gguf(path: Path, dtype: DTypeLike, device: Device, strict: bool) -> Model:
    file = open_gguf(path)
    architecture = file.get("general.architecture", str)
    family = next((one for one in FAMILIES if one.gguf == architecture), None)
    if family is None:
        known = ", ".join(one.gguf for one in FAMILIES if one.gguf)
        raise UnsupportedError(f"{path}: architecture {architecture!r} is not built; known: {known}")
    config = _with_context(llama_files.gguf_config(file, family), path)
    config.attention.native(device)
    loader = TensorLoader(path, file.tensors, file.files, device)
    params = llama_files.gguf_params(family, config, loader)
    loader.finish(strict)
    tokenizer = None
    if "tokenizer.ggml.model" in file.metadata:
        Tokenizer.check_gguf(file.metadata, path)
        tokenizer = partial(Tokenizer.from_gguf, file.metadata, path)
    return Model(config, params, tokenizer, path=path, dtype=dtype, device=device, memory=_memory(loader))


def _load_safetensors(path: Path, dtype: DTypeLike, device: Device, strict: bool) -> Model:
    files = open_safetensors(path)
    architectures = (files.config or {}).get("architectures")
    family = next((one for one in FAMILIES if [one.hf] == architectures), None)
    if family is None:
        named = f"{architectures} is not built" if architectures else "is not named in config.json"
        known = ", ".join(one.hf for one in FAMILIES)
        raise UnsupportedError(f"{path}: architecture {named}; known: {known}")
    check_unquantised(files)
    config = _with_context(llama_files.hf_config(files, family), path)
    config.attention.native(device)
    loader = TensorLoader(path, files.tensors, files.files, device)
    params = llama_files.hf_params(files, family, config, loader)
    loader.finish(strict)
    folder = path if path.is_dir() else path.parent
    tokenizer = partial(Tokenizer.from_files, folder) if (folder / "tokenizer.json").is_file() else None
    return Model(config, params, tokenizer, path=path, dtype=dtype, device=device, memory=_memory(loader))


def _with_context(config: LlamaConfig, path: Path) -> LlamaConfig:
    """The configuration with its whole context: as far as YaRN goes, if a state has the pages."""
    attention = config.attention
    longest, scaling = attention.maximum_context_tokens, attention.rope_scaling
    if isinstance(scaling, YarnScaling) and longest > 0:
        longest = max(longest, round(min(scaling.factor, 2.0**31) * min(scaling.original_context, 2**31)))
    most = _MAX_STATE_PAGES * (_PAGE_BYTES // max(1, attention.bytes_per_token))
    if 0 < most < longest:  # none: such heads are refused by name
        logger.warning("%s: a state holds %d tokens of the model's context of %d", path, most, longest)
        longest = most
    return replace(config, attention=replace(attention, maximum_context_tokens=longest))


def _memory(loader: TensorLoader) -> dict[str, int]:
    return {name: getattr(loader, name) for name in ("mapped_bytes", "expanded_bytes", "prepared_bytes")}
