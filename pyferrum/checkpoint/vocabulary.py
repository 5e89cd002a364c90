"""The tokens of a GGUF file, whatever cuts text into them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyferrum.checkpoint.metadata import typed_value
from pyferrum.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens, as llama.cpp numbers them."""


class Vocabulary:
    """`tokenizer.ggml.tokens` and their types. Raises CheckpointError if these are not as many."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.tokens = typed_value(metadata, path, "tokenizer.ggml.tokens", list[str])
        self.types = typed_value(metadata, path, "tokenizer.ggml.token_type", list[int], [NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"{path}: {len(self.tokens):,} tokens, {len(self.types):,} in tokenizer.ggml.token_type"
            )

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token. Raises CheckpointError if two are the same."""
        ids = {token: index for index, token in enumerate(self.tokens)}
        if len(ids) != len(self.tokens):
            index, token = next((i, t) for i, t in enumerate(self.tokens) if ids[t] != i)
            raise CheckpointError(f"{self.path}: tokens {index} and {ids[token]} are both {token!r}")
        return ids

    def of_type(self, *types: int) -> list[str]:
        """The tokens of these types."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def add_to(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """`backend`, which now finds tokens in text that are no words: control tokens are special, the user's added."""
        import tokenizers

        for special, names in (True, self.of_type(UNKNOWN, CONTROL)), (False, self.of_type(USER_DEFINED)):
            added = [tokenizers.AddedToken(name, special=special, normalized=False) for name in names if name]
            (backend.add_special_tokens if special else backend.add_tokens)(added)
        return backend
