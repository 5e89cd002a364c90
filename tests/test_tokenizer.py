"""The tokenizer: a vocabulary's own splitting rule, one BOS, whole characters in a stream, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from pyferrum.checkpoint import Tokenizer, open_gguf
from pyferrum.errors import CheckpointError, InvalidArgument

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "123 4", "a b", "Ġ a"]
SPECIAL = ["<s>", "</s>", "<|eot|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}\n"
    "[{{ m.role }}]{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

Make = Callable[..., Tokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a tokenizer from a small GGUF file: `make(pre, tokens=[…], bos=…, add_bos=…, template=…)`."""

    def build(
        pre: str | None = "gpt-2",
        *,
        model: str = "gpt2",
        tokens: Sequence[str] = (),
        merges: Sequence[str] = tuple(MERGES),
        bos: int | None = 0,
        add_bos: bool | None = None,
        template: str | None = None,
        types: Sequence[int] | None = None,
    ) -> Tokenizer:
        vocabulary = [*SPECIAL, "<tool>", *ALPHABET, *(m.replace(" ", "") for m in MERGES), *tokens]
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary)
        writer.add_token_types(types or [3, 3, 3, 4] + [1] * (len(vocabulary) - 4))
        writer.add_token_merges(merges)
        if bos is not None:
            writer.add_bos_token_id(bos)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(2)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if template is not None:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        file = open_gguf(tmp_path / "t.gguf")
        return Tokenizer.from_gguf(file.metadata, file.path)

    return build


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_bos=False)]


def test_gguf__special_and_added_tokens_are_found_in_text(make: Make) -> None:
    tokenizer = make()
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.vocab_size == 4 + 256 + len(MERGES)
    assert pieces(tokenizer, "ab<|eot|><tool> ab") == ["ab", "<|eot|>", "<tool>", " ", "ab"]
    assert tokenizer.encode("<|eot|><tool>") == [2, 3]
    assert tokenizer.decode([2, 3], skip_special=True) == "<tool>"


def test_gguf__each_rule_cuts_its_own_way(make: Make) -> None:
    expected = {
        "gpt-2": ["1234"],
        "smollm": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "qwen2": ["1", "2", "3", "4"],
        "qwen35": ["1", "2", "3", "4"],
    }
    assert {pre: pieces(make(pre), "1234") for pre in expected} == expected


def test_gguf__llama3_keeps_whole_words_and_qwen_composes(make: Make) -> None:
    """Llama 3's `ignore_merges`: a word of the vocabulary is one token although no merge makes it."""
    assert pieces(make("llama-bpe", tokens=["xyz"]), "xyz") == ["xyz"]
    assert pieces(make("gpt-2", tokens=["xyz"]), "xyz") == ["x", "y", "z"]
    assert make("qwen2").encode("e\u0301") == make("qwen2").encode("é")
    assert make("llama-bpe").encode("e\u0301") != make("llama-bpe").encode("é")


def test_gguf__unknown_kinds_are_named_never_guessed(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"t\.gguf.*'tekken'.*known: gpt-2, smollm"):
        make("tekken")
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre"):
        make(None)
    with pytest.raises(CheckpointError, match=r"'t5'.*'gpt2'.*'llama'"):
        make(model="t5")
    with pytest.raises(CheckpointError, match=r"lacks the metadata key 'tokenizer\.ggml\.scores'"):
        make(model="llama")


def test_gguf__damaged_vocabulary_is_a_named_error(make: Make) -> None:
    with pytest.raises(CheckpointError, match="are both 'ab'"):
        make(tokens=["ab"])
    with pytest.raises(CheckpointError, match=r"t\.gguf.*merges"):
        make(merges=["nothing such"])
    with pytest.raises(CheckpointError, match=r"t\.gguf.*merges"):
        make(merges=["unsplit"])
    with pytest.raises(CheckpointError, match="token_type"):
        make(types=[1])
    with pytest.raises(CheckpointError, match="bos token is 99999"):
        make(bos=99999)


def test_bos__never_twice(make: Make) -> None:
    """abetlen/llama-cpp-python#1501, #1561, #1439; InfiniTensor/InfiniLM#388;
    EleutherAI/lm-evaluation-harness#3333 (G1): template and tokenizer both want a BOS; there is one."""
    with_setting, without = make(add_bos=True, template=TEMPLATE), make(add_bos=False, template=TEMPLATE)
    assert with_setting.encode("ab") == [0, *without.encode("ab")]
    assert with_setting.encode("ab", add_bos=False) == without.encode("ab")
    assert without.encode("ab", add_bos=True) == with_setting.encode("ab")
    assert with_setting.encode("<s>ab") == without.encode("<s>ab", add_bos=True) == with_setting.encode("ab")
    assert with_setting.encode("") == [0]
    messages = [{"role": "user", "content": "ab"}]
    template_without = make(add_bos=True, template=TEMPLATE.replace("{{ bos_token }}", ""))
    for tokenizer in (with_setting, without, template_without):
        ids = tokenizer.encode_chat(messages)
        assert (ids[0], ids.count(0)) == (0, 1)
        assert ids == tokenizer.encode(tokenizer.apply_chat_template(messages))


def test_bos__absent_setting_is_the_rules(make: Make) -> None:
    assert make("llama-bpe").encode("a")[0] == 0
    assert make("gpt-2").encode("a")[0] != 0
    no_bos = make(bos=None, add_bos=True, template=TEMPLATE)
    assert no_bos.bos_token_id is None
    assert no_bos.encode("a") == make().encode("a")
    assert no_bos.apply_chat_template([], add_generation_prompt=False) == ""
    with pytest.raises(InvalidArgument, match="no BOS token"):
        no_bos.encode("a", add_bos=True)


def test_template__renders_as_transformers_does(make: Make) -> None:
    tokenizer = make(template=TEMPLATE)
    messages = [{"role": "user", "content": "hé"}]
    assert tokenizer.apply_chat_template(messages) == "<s>[user]hé\n[assistant]"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s>[user]hé\n"
    template = "{% if tools is none %}{{ {'<': 'é'}|tojson }}{{ x }}{{ strftime_now('%%') }}{% endif %}"
    assert make(template=template).apply_chat_template([], x=5) == '{"<": "é"}5%'


def test_template__errors_say_whose_fault(make: Make) -> None:
    tokenizer = make(template=TEMPLATE)
    with pytest.raises(InvalidArgument, match="no such role"):
        tokenizer.apply_chat_template([{"role": "bad", "content": ""}])
    with pytest.raises(InvalidArgument, match="content"):
        make(template="{{ messages[0]['content'] + 'x' }}").apply_chat_template([{"role": "user"}])
    with pytest.raises(InvalidArgument, match="unsafe"):
        make(template="{{ ''.__class__.__mro__ }}").apply_chat_template([])
    for failing in ("{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}"):
        with pytest.raises(InvalidArgument, match=r"messages: refused by the template of .*t\.gguf"):
            make(template=failing).apply_chat_template([])
    with pytest.raises(CheckpointError, match=r"t\.gguf.*not valid Jinja"):
        make(template="{% for %}").apply_chat_template([])
    with pytest.raises(CheckpointError, match=r"t\.gguf: no chat template"):
        make().apply_chat_template([])


def test_stream__gives_whole_characters_only(make: Make) -> None:
    tokenizer = make()
    ids = tokenizer.encode("a€😀b")
    stream = tokenizer.stream()
    assert [stream.push(i) for i in ids] == ["a", "", "", "€", "", "", "", "😀", "b"]
    assert stream.flush() == ""
    assert [stream.push(i) for i in ids[:3]] == ["a", "", ""]
    assert stream.flush() == "\ufffd" == tokenizer.decode(ids[1:3])
    assert stream.push(ids[0]) == "a"


def write_files(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama-2's arrangement in small: words begin with ▁, unknown characters fall back to byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abé", "▁a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    return backend


def test_files__settings_come_from_all_three(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    folder = write_files(
        tmp_path,
        backend,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE},
        generation_config={"bos_token_id": 1, "eos_token_id": [2, 3]},
    )
    tokenizer = Tokenizer.from_files(folder)
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.eos_token_ids == {2, 3}
    assert tokenizer.decode(tokenizer.encode("a ab €", add_bos=False)) == "a ab €"
    assert tokenizer.encode("a") == [1, backend.token_to_id("▁a")]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_files(folder).apply_chat_template([]) == "own file"


def test_files__every_end_that_a_file_names_is_one(tmp_path: Path) -> None:
    """FACTS H.1 (17): config.json's list too. A BOS that only config.json names is none of the tokenizer's."""
    both = {2, 3}
    for config, ends in (({"eos_token_id": [2, 3], "bos_token_id": 1}, both), ({"eos_token_id": 3}, both), ({}, {2})):
        folder = write_files(tmp_path, sentencepiece_like(), tokenizer_config={"eos_token": "</s>"}, config=config)
        tokenizer = Tokenizer.from_files(folder)
        assert (tokenizer.eos_token_ids, tokenizer.eos_token_id, tokenizer.bos_token_id) == (ends, 2, None)


def test_files__config_overrides_and_may_be_missing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_files(write_files(tmp_path, sentencepiece_like()))
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (None, None)
    assert tokenizer.eos_token_ids == frozenset()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {"bos_token": "<s>", "add_bos_token": False, "chat_template": named}
    tokenizer = Tokenizer.from_files(write_files(tmp_path, sentencepiece_like(), tokenizer_config=config))
    assert (tokenizer.add_bos, tokenizer.chat_template) == (False, "yes")


def test_files__damage_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_files(tmp_path)
    for name, content in (
        ("tokenizer_config", {"eos_token": "<absent>"}),
        ("generation_config", {"eos_token_id": [2, 99999]}),
        ("generation_config", {"eos_token_id": "2"}),
    ):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="eos token"):
            Tokenizer.from_files(write_files(folder, sentencepiece_like(), **{name: content}))


def test_files__stream_of_byte_fallback_is_decode(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_files(write_files(tmp_path, sentencepiece_like()))
    ids = tokenizer.encode("a é😀😀 ab€ <end> a")
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)


@lru_cache(maxsize=1)
def demo(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(path).metadata, path)


def test_demo_model__facts(model_path: Path) -> None:
    tokenizer = demo(model_path)
    assert (tokenizer.bos_token_id, tokenizer.add_bos, tokenizer.vocab_size) == (1, False, 49152)
    assert tokenizer.eos_token_ids == {2}
    assert pieces(tokenizer, "In 2024: 3.14") == ["In", " ", "2", "0", "2", "4", ":", " ", "3", ".", "1", "4"]
    assert tokenizer.encode("<|im_start|>") == [1]


def test_demo_model__chat_is_chatml_with_one_bos(model_path: Path) -> None:
    tokenizer = demo(model_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(messages)
    assert ids[:2] == [1, tokenizer.encode("system")[0]]
    assert (ids.count(1), ids.count(2), tokenizer.decode(ids)) == (3, 2, text)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=60))
def test_demo_model__any_text_round_trips(model_path: Path, text: str) -> None:
    """Of all characters in use: the vocabulary lacks some control characters and two lead bytes."""
    tokenizer = demo(model_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids) + stream.flush() == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=20), skip=st.booleans())
def test_demo_model__any_stream_is_decode(model_path: Path, ids: list[int], skip: bool) -> None:
    """Ids as a model may emit them, broken UTF-8 and all."""
    stream = demo(model_path).stream(skip_special=skip)
    expected: Any = demo(model_path).decode(ids, skip_special=skip)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == expected
