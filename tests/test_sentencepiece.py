"""SentencePiece vocabularies of GGUF files, against SentencePiece itself, trained here on the evaluation text."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import resources
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pyferrum.checkpoint import Tokenizer, open_gguf
from pyferrum.errors import CheckpointError

TEXT = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
TEXTS = (
    TEXT,
    "",
    " ",
    "   ",
    " both sides  ",
    "lines\r\n\n\tand tabs",
    "1234567890 3.14",
    "na\u00efve caf\u00e9, e\u0301, \ufb01, \u65e5\u672c\u8a9e, \U0001f642",
    "\x00\x01\x7f",
    "\u2581a\u2581 b",
    "x" * 100,
)

Write = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def theirs() -> Any:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        control_symbols=["[INST]"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def write(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """The vocabulary as a GGUF file has it; `keys` change metadata, `change` tokens, scores or types by id."""

    def build(change: dict[str, dict[int, Any]] | None = None, **keys: Any) -> Tokenizer:
        ids = range(theirs.vocab_size())
        kinds = {"is_unknown": 2, "is_control": 3, "is_byte": 6}
        lists: dict[str, list[Any]] = {
            "tokens": [theirs.id_to_piece(i) for i in ids],
            "scores": [theirs.get_score(i) for i in ids],
            "token_type": [next((kind for name, kind in kinds.items() if getattr(theirs, name)(i)), 1) for i in ids],
        }
        lists["token_type"][theirs.piece_to_id("<tool>")] = 4
        for name, values in (change or {}).items():
            for i, value in values.items():
                lists[name][i : i + 1] = [] if value is None else [value]
        path = tmp_path_factory.mktemp("sentencepiece") / "t.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("llama")
        for name, values in lists.items():
            writer.add_array(f"tokenizer.ggml.{name}", values)
        writer.add_bos_token_id(theirs.bos_id())
        writer.add_eos_token_id(theirs.eos_id())
        for key, value in keys.items():
            {bool: writer.add_bool, str: writer.add_string}[type(value)](f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        file = open_gguf(path)
        return Tokenizer.from_gguf(file.metadata, file.path)

    return build


@pytest.fixture(scope="module")
def ours(write: Write) -> Tokenizer:
    return write()


def same(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text, add_bos=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("\u2581", " ")
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == ours.decode(ids)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids__are_those_of_sentencepiece(ours: Tokenizer, theirs: Any, text: str) -> None:
    same(ours, theirs, text)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.one_of(st.sampled_from(" \n\u00e9tide."), st.characters(exclude_categories=["Cs"]))))
def test_ids__of_any_text_are_those_of_sentencepiece(ours: Tokenizer, theirs: Any, text: str) -> None:
    same(ours, theirs, text)


def test_stream__behind_a_text_keeps_its_space(ours: Tokenizer) -> None:
    prompt, rest = ours.encode("The tide"), ours.encode("turns twice", add_bos=False)

    def streamed(after: list[int]) -> str:
        stream = ours.stream(after=after)
        return "".join(map(stream.push, rest)) + stream.flush()

    assert streamed(prompt) == " turns twice"
    assert streamed([]) == streamed(ours.encode("")) == streamed(ours.encode("The tide[INST]")) == "turns twice"
    unfinished = ours.encode("\U0001f642", add_bos=False)[:-2]
    assert ours.decode(unfinished).endswith("\ufffd")
    assert streamed(unfinished) == "turns twice"


def test_ends__cover_the_text(ours: Tokenizer) -> None:
    text = TEXT[:2000]
    ends = ours.ends(text)
    assert len(ends) == len(ours.encode(text, add_bos=False))
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for count in (1, 5, 40, 200):
        assert ours.decode(ours.encode(text, add_bos=False)[:count]) == text[: ends[count - 1]]


def test_special__tokens_are_found_in_text(ours: Tokenizer, theirs: Any) -> None:
    """As llama.cpp does: behind one of them a text begins anew, with its space."""
    control, tool = theirs.piece_to_id("[INST]"), theirs.piece_to_id("<tool>")
    hi = theirs.encode("hi")
    assert ours.encode("[INST]hi<tool>hi") == [theirs.bos_id(), control, *hi, tool, *hi]
    assert ours.encode("<s>hi") == ours.encode("hi") == [theirs.bos_id(), *hi]
    assert ours.decode([control, tool, *hi], skip_special=True).replace(" ", "") == "<tool>hi"


def test_settings__of_the_file_hold(write: Write, theirs: Any) -> None:
    bare = write(add_space_prefix=False, add_bos_token=False)
    assert bare.encode(" tide") == theirs.encode("tide")
    assert bare.encode("tide") != theirs.encode("tide")
    assert bare.decode(bare.encode("tide")) == "tide"
    assert bare.decode(bare.encode(" tide")) == " tide"


def test_damage__is_named(write: Write, theirs: Any) -> None:
    for change, message in (
        ({"scores": {5: None}}, r"tokenizer\.ggml\.scores should have 900 entries"),
        ({"scores": {5: float("nan")}}, r"tokenizer\.ggml\.scores: expected finite numbers"),
        ({"token_type": {5: None}}, r"tokenizer\.ggml\.token_type should have 900 entries"),
        ({"tokens": {800: "<s>"}}, "are both '<s>'"),
        ({"tokens": {theirs.piece_to_id("<0x41>"): "<0x4G>"}}, r"'<0x4G>' is of the type of bytes"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write(change)
    for keys in ({"precompiled_charsmap": "x"}, {"remove_extra_whitespaces": True}):
        with pytest.raises(CheckpointError, match=f"{next(iter(keys))}: text that is changed first is not built"):
            write(**keys)
