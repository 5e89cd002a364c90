"""The SentencePiece BPE vocabulary of a GGUF file, as Llama 2 and Mistral have one, in the `tokenizers` library.

SentencePiece merges, again and again, the two neighbours whose union is the token of the highest score. That is BPE
whose merges are all cuts of a token into two, in the order of their unions' scores. Details are those of llama.cpp's
`llm_tokenizer_spm` and of transformers' converter of such vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyferrum.checkpoint.metadata import typed_value
from pyferrum.checkpoint.vocabulary import BYTE, NORMAL, UNKNOWN, Vocabulary
from pyferrum.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"  # what a space is in a token


def check_settings(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if the scores are missing, or if text is to be changed before it is cut."""
    if "tokenizer.ggml.scores" not in metadata:
        raise CheckpointError(f"{path}: the file lacks the metadata key 'tokenizer.ggml.scores', which is needed here")
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}: text that is changed first is not built")


def sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A backend over the vocabulary and `tokenizer.ggml.scores`.

    A character that is no token becomes the tokens of its bytes, `<0x00>` to `<0xFF>`, or the unknown token where there
    are none. Raises CheckpointError for scores that are no numbers and for bytes that are none.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    path = vocabulary.path
    scores = typed_value(metadata, path, "tokenizer.ggml.scores", list[float])
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{path}: tokenizer.ggml.scores: expected finite numbers")
    for token in vocabulary.of_type(BYTE):
        if not re.fullmatch("<0x[0-9A-F]{2}>", token):
            raise CheckpointError(f"{path}: token {token!r} is of the type of bytes: expected <0x00> to <0xFF>")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary, scores),
            unk_token=next(iter(vocabulary.of_type(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    first = typed_value(metadata, path, "tokenizer.ggml.add_space_prefix", bool, True)  # a text begins with a space
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if first else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if first else steps)
    return backend


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of a token into two, highest score first; of equal scores, the lower id."""
    words = set(vocabulary.of_type(NORMAL))
    cuts = [
        (-scores[index], index, at, token[:at], token[at:])
        for index, token in enumerate(vocabulary.tokens)
        if token in words
        for at in range(1, len(token))
        if token[:at] in words and token[at:] in words
    ]
    cuts.sort(key=lambda cut: cut[:3])
    return [(left, right) for *_, left, right in cuts]
