"""The byte-level BPE vocabulary of a GGUF file as a backend of the `tokenizers` library.

A GGUF file names only *which* rule its vocabulary was trained to cut text with (`tokenizer.ggml.pre`); the
rules are those of the models' own `tokenizer.json` and of llama.cpp's `llama-vocab.cpp`. A rule that is not
in the table is an error, never a default: a wrong one still gives ids, and a quietly worse model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyferrum.checkpoint.metadata import typed_value
from pyferrum.checkpoint.vocabulary import Vocabulary
from pyferrum.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers


class Rule(NamedTuple):
    """How a family of byte-level BPE vocabularies cuts text before merging."""

    split: str | None = None
    """A regular expression whose matches are the words; None is GPT-2's own, built into the library."""
    single_digits: bool = False
    """Every digit is a word of its own before the words are cut."""
    nfc: bool = False
    """Text is brought to Unicode form C first, as the model's tokenizer.json does (llama.cpp does not)."""
    whole_words: bool = False
    """A word that is in the vocabulary is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """What `tokenizer.ggml.add_bos_token` means when the file leaves it out."""


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{number}"
    r"| ?[^\s{mark}\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = Rule(_WORDS.format(letter=r"\p{L}", number=r"\p{N}{1,3}", mark=""), whole_words=True, add_bos=True)
RULES: Mapping[str, Rule] = {
    "gpt-2": Rule(),
    "smollm": Rule(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Rule(_WORDS.format(letter=r"\p{L}", number=r"\p{N}", mark=""), nfc=True),
    "qwen35": Rule(_WORDS.format(letter=r"[\p{L}\p{M}]", number=r"\p{N}", mark=r"\p{M}"), nfc=True),
}


def byte_level_bpe(metadata: Mapping[str, Any], vocabulary: Vocabulary, rule: Rule) -> tokenizers.Tokenizer:
    """A backend over the vocabulary and `tokenizer.ggml.merges`. Raises CheckpointError if they do not fit."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    ids, merges = vocabulary.ids, list[tuple[str, str]]()
    for merge in typed_value(metadata, vocabulary.path, "tokenizer.ggml.merges", list[str]):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=rule.whole_words))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{vocabulary.path}: tokenizer.ggml.merges does not fit the tokens: {error}") from error
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if rule.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        cuts.append(pre_tokenizers.Split(tokenizers.Regex(rule.split), "isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend
