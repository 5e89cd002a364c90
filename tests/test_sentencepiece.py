"""SentencePiece vocabularies of GGUF files, against SentencePiece itself, trained here on the evaluation text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import pyferrum as pf
from pyferrum.checkpoint import Tokenizer, open_gguf
from pyferrum.errors import CheckpointError
from pyferrum.score import encode_pair
from tests import tiny
from tests.drafts import Itself

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
        for key, value in keys.items():
            {bool: writer.add_bool, list: writer.add_array}[type(value)](f"tokenizer.ggml.{key}", value)
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
    assert streamed(ours.encode("The \u65e5\u672c\u8a9e")) == " turns twice", "the last ids begin inside a character"
    unfinished = ours.encode("\U0001f642", add_bos=False)[:-2]
    assert ours.decode(unfinished).endswith("\ufffd")
    assert streamed(unfinished[1:]) == "turns twice"


def test_pairs__and_continuations_are_the_text_that_was_given(ours: Tokenizer, theirs: Any) -> None:
    """A continuation encoded alone must not get a space of its own."""
    for context, continuation in (("The t", "ide"), ("A: un", "happy"), ("The tide", "s"), ("", "tide"), ("x", " y")):
        head, tail = encode_pair(ours, context, continuation)
        assert ours.decode([*head, *tail], skip_special=True) == context + continuation
        assert head[0] == ours.bos_token_id
    head, tail = encode_pair(ours, "", "ide", add_bos=False, continued=True)
    assert (head, ours.decode([theirs.piece_to_id("t"), *tail])) == ([], "tide")


def test_ids__follow_scores_not_places(write: Write, theirs: Any) -> None:
    """The same tokens in another order; those of training are in the order of their scores."""
    first = theirs.piece_to_id("<0xFF>") + 1
    places = [*range(first), *range(theirs.vocab_size() - 1, first - 1, -1)]
    moved = write(
        {
            "tokens": {i: theirs.id_to_piece(place) for i, place in enumerate(places)},
            "scores": {i: theirs.get_score(place) for i, place in enumerate(places)},
        }
    )
    assert [places[i] for i in moved.encode(TEXT, add_bos=False)] == theirs.encode(TEXT)


def test_continued__text_gets_no_space(ours: Tokenizer, theirs: Any, tmp_path: Path) -> None:
    """Of a GGUF file as of a tokenizer.json, in both of its spellings."""
    backend = json.loads(ours._backend.to_str())
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    for name, parts in (
        ("prepend", {"normalizer": backend["normalizer"]}),
        ("metaspace", {"normalizer": None, "pre_tokenizer": metaspace}),
        ("sequence", {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [metaspace]}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(backend | parts))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    for tokenizer in (ours, *(Tokenizer.from_files(tmp_path / x) for x in ("prepend", "metaspace", "sequence"))):
        for text in ("s", "happy tide", "\n", " and"):
            begun = tokenizer.encode(text, add_bos=False)
            assert begun == theirs.encode(text) or text == " and"  # Metaspace puts no second space in front
            continued = tokenizer.encode(text, add_bos=False, continued=True)
            assert ours.decode([theirs.piece_to_id("a"), *continued]) == "a" + text
            assert tokenizer.encode("a", add_bos=False, continued=True) == [theirs.piece_to_id("a")]
        for text in ("s</s>s", "</s> s", "a[INST]b<tool>b</s>\n"):  # only what comes first is continued
            whole, line = (tokenizer.encode(x, add_bos=False) for x in ("\n" + text, "\n"))
            assert tokenizer.encode(text, add_bos=False, continued=True) == whole[len(line) :]
        assert tokenizer.ends_in_text(begun)
        assert not tokenizer.ends_in_text([])
        assert not tokenizer.ends_in_text([theirs.bos_id()])
        for name in ("[INST]", "<tool>"):
            behind = [*begun, theirs.piece_to_id(name)]
            running = tokenizer.encode(f"{name}a", add_bos=False)[1:]
            goes_on = tokenizer.ends_in_text(behind)
            assert tokenizer.encode("a", add_bos=False, continued=goes_on) == running


def test_decode__keeps_what_stands_beside_a_byte_that_is_no_text(ours: Tokenizer, theirs: Any) -> None:
    newline, first = theirs.piece_to_id("<0x0A>"), theirs.piece_to_id("<0xE6>")
    day, a = theirs.encode("\u65e5")[1:], theirs.encode("a")
    for ids in ([newline, first, *a], [*day, first, *a], [first, newline], [newline, *day]):
        assert ours.decode(ids) == theirs.decode(ids).removeprefix(" ")
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == ours.decode(ids)


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
    assert ours.decode([control, tool, *hi], skip_special=True) == "<tool> hi"


def test_settings__of_the_file_hold(write: Write, theirs: Any) -> None:
    bare = write(add_space_prefix=False, add_bos_token=False)
    assert bare.encode(" tide") == theirs.encode("tide")
    assert bare.encode("tide") != theirs.encode("tide")
    assert bare.decode(bare.encode("tide")) == "tide"
    assert bare.decode(bare.encode(" tide")) == " tide"


def test_damage__is_named(write: Write, theirs: Any) -> None:
    changes: tuple[tuple[dict[str, dict[int, Any]], str], ...] = (
        ({"scores": {5: None}}, r"tokenizer\.ggml\.scores should have 900 entries"),
        ({"scores": {5: float("nan")}}, r"tokenizer\.ggml\.scores: expected finite numbers"),
        ({"token_type": {5: None}}, r"tokenizer\.ggml\.token_type should have 900 entries"),
        ({"tokens": {800: "<s>"}}, "are both '<s>'"),
        ({"tokens": {theirs.piece_to_id("<0x41>"): "<0x4G>"}}, r"'<0x4G>' is of the type of bytes"),
    )
    for change, message in changes:
        with pytest.raises(CheckpointError, match=message):
            write(change)
    many: dict[str, dict[int, Any]] = {"token_type": {i: 1 for i in range(theirs.vocab_size()) if theirs.is_byte(i)}}
    assert write(many).encode("\u65e5", add_bos=False)[-1] == theirs.unk_id()
    many["token_type"][theirs.unk_id()] = 3
    with pytest.raises(CheckpointError, match="expected 256 tokens of bytes, or an unknown one"):
        write(many)
    with pytest.raises(CheckpointError, match="a token has 5,000 characters; expected at most 1,024"):
        write({"tokens": {800: "x" * 5000}})
    for keys in ({"precompiled_charsmap": [1, 2]}, {"remove_extra_whitespaces": True}):
        with pytest.raises(CheckpointError, match=f"{next(iter(keys))}: text that is changed first is not built"):
            write(**keys)


@pytest.fixture(scope="module")
def model(ours: Tokenizer, theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    """A random model over the vocabulary."""
    rng, size = np.random.default_rng(5), theirs.vocab_size()
    rows = {
        name: rng.standard_normal((size, tiny.HIDDEN)).astype(np.float16)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    folder = tmp_path_factory.mktemp("model")
    loaded = pf.load(tiny.write_tiny(folder, weights=tiny.tensors() | rows, config={"vocab_size": size}))
    return pf.Model(loaded.config, loaded.params, ours, path=folder, device=loaded.device)


def test_generate__text_joins_the_prompt(model: pf.Model, ours: Tokenizer) -> None:
    starts = 0
    for key in range(20):
        options: dict[str, Any] = {"max_tokens": 8, "temp": 2.0, "key": key}
        for steps in (
            list(pf.generate(model, "The tide", ignore_eos=True, **options)),
            list(pf.speculative_generate(model, Itself(model), "The tide", ignore_eos=True, **options)),
        ):
            ids = [*ours.encode("The tide", add_bos=False), *(step.token for step in steps)]
            text = "".join(step.text for step in steps)
            assert "The tide" + text == ours.decode(ids)
            starts += text.startswith(" ")
    assert starts, "some go on with a new word"


def test_state__is_continued_without_a_space(model: pf.Model, ours: Tokenizer) -> None:
    state = next(iter(pf.generate(model, "The tide", max_tokens=1))).state
    for text in ("s", " and"):
        ids = ours.encode(text, add_bos=False, continued=True)
        assert ids != ours.encode(text, add_bos=False)
        one, other = (next(iter(pf.generate(model, prompt, state=state))) for prompt in (text, ids))
        assert one.prompt_tokens == len(ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        for context, expected in (
            (ours.encode("The tide"), ids),
            ([ours.bos_token_id], ours.encode(text, add_bos=False)),
        ):
            assert list(pf.score(model, context, [text])[0].tokens) == expected
