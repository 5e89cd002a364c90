"""The SentencePiece BPE vocabulary of a GGUF file, as Llama 2 and Mistral have one, in the `tokenizers` library.

SentencePiece merges, again and again, the two neighbours whose union is the token of the highest score. That is BPE
whose merges are all cuts of a token into two, in the order of their unions' scores. Details are those of llama.cpp's
`llm_tokenizer_spm` and of transformers' converter of such vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyferrum.checkpoint.metadata import typed_value
from pyferrum.checkpoint.vocabulary import BYTE, NORMAL, UNKNOWN, Vocabulary
from pyferrum.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"  # what a space is in a token
_LONGEST = 1024  # characters of a token; published ones have a few dozen
DEFAULT_IDS = {"bos": 1, "eos": 2}
"""What llama.cpp takes where a file of this kind does not say."""


def check_settings(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if scores or types are missing, or if text is to be changed before it is cut."""
    for key in ("scores", "token_type"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise CheckpointError(
                f"{path}: the file lacks the metadata key 'tokenizer.ggml.{key}', which is needed here"
            )
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap", ())
    if np.size(charsmap) or typed_value(metadata, path, "tokenizer.ggml.remove_extra_whitespaces", bool, False):
        key = "precompiled_charsmap" if np.size(charsmap) else "remove_extra_whitespaces"
        raise CheckpointError(f"{path}: tokenizer.ggml.{key}: text that is changed first is not built")


def sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A backend over the vocabulary and `tokenizer.ggml.scores`, which encodes; `Pieces` decodes.

    A character that is no token becomes the tokens of its bytes, `<0x00>` to `<0xFF>`, or the unknown token where one
    of those is missing. Raises CheckpointError if there are neither, and for scores that are none.
    """
    import tokenizers
    from tokenizers import models, normalizers

    path, unknown = vocabulary.path, next(iter(vocabulary.of_type(UNKNOWN)), None)
    scores = typed_value(metadata, path, "tokenizer.ggml.scores", list[float])
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{path}: {len(vocabulary.tokens):,} tokens, {len(scores):,} in tokenizer.ggml.scores")
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{path}: tokenizer.ggml.scores: expected finite numbers")
    if unknown is None and len(vocabulary.of_type(BYTE)) < 256:
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type: expected 256 tokens of bytes, or an unknown one")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    first = _adds_space(metadata, path)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if first else spaces
    return backend


class Pieces:
    """The bytes of every token. (The library's decoder makes U+FFFD of bytes beside those that are no UTF-8.)"""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        self._adds_space = _adds_space(metadata, vocabulary.path)
        self._bytes: list[bytes] = []
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
            if kind != BYTE:
                self._bytes.append(token.replace(_SPACE, " ").encode())
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                self._bytes.append(bytes.fromhex(token[3:5]))
            else:
                raise CheckpointError(
                    f"{vocabulary.path}: token {token!r} is of the type of bytes: expected <0x00> to <0xFF>"
                )

    def text(self, ids: Iterable[int]) -> str:
        """The text of tokens, without the space that a text begins with; what is not UTF-8 becomes U+FFFD."""
        text = b"".join(self._bytes[i] for i in ids if i < len(self._bytes)).decode(errors="replace")
        return text.removeprefix(" ") if self._adds_space else text


def _adds_space(metadata: Mapping[str, Any], path: Path) -> bool:
    return typed_value(metadata, path, "tokenizer.ggml.add_space_prefix", bool, True)


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of a token into two, highest score first; of equal scores, the lower id."""
    words = set(vocabulary.of_type(NORMAL))
    longest = max(map(len, words), default=0)
    if longest > _LONGEST:
        raise CheckpointError(f"{vocabulary.path}: a token has {longest:,} characters; expected at most {_LONGEST:,}")
    cuts = [
        (-scores[index], index, at, token[:at], token[at:])
        for index, token in enumerate(vocabulary.tokens)
        if token in words
        for at in range(1, len(token))
        if token[:at] in words and token[at:] in words
    ]
    cuts.sort(key=lambda cut: cut[:3])
    return [(left, right) for *_, left, right in cuts]
