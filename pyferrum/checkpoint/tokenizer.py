"""Text to token ids and back, from a GGUF file's metadata or a folder of Hugging Face files.

Both sources end in one backend of the `tokenizers` library. What the files say about BOS, about the tokens
that end an answer and about the chat template is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pyferrum.checkpoint.byte_level import RULES, byte_level_bpe
from pyferrum.checkpoint.metadata import strings_value, typed_value
from pyferrum.checkpoint.sentencepiece import DEFAULT_IDS, Pieces, check_settings, sentencepiece_bpe
from pyferrum.checkpoint.stored import read_json
from pyferrum.checkpoint.vocabulary import Vocabulary
from pyferrum.errors import CheckpointError, InvalidArgument

if TYPE_CHECKING:
    import jinja2
    import tokenizers

Message = Mapping[str, Any]


class Tokenizer:
    """A model's tokenizer. Special tokens written out in text, such as `<|im_start|>`, become one id."""

    bos_token_id: int | None
    """The token a sequence begins with, if the model has one (whether `encode` adds it is `add_bos`)."""
    eos_token_id: int | None
    """The first of `eos_token_ids` in the files, if the model has one."""
    eos_token_ids: frozenset[int]
    """Every token that ends an answer: end of text, of turn, of message."""
    add_bos: bool
    """The file's setting: whether `encode` begins with BOS unless told otherwise."""
    chat_template: str | None
    """The Jinja source that renders a conversation, or None."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        *,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        add_bos: bool,
        chat_template: str | None,
        bos_token: str | None,
        eos_token: str | None,
        pieces: Pieces | None = None,
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._path = path
        self.bos_token_id = bos_token_id
        endings = list(eos_token_ids)
        self.eos_token_id = endings[0] if endings else None
        self.eos_token_ids = frozenset(endings)
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        # A template prints None as "None", and an absent variable as nothing.
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: text for name, text in named.items() if text is not None}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: str | Path) -> Tokenizer:
        """Build from `GGUFFile.metadata`; `path` is named in errors.

        Raises CheckpointError if the file has no tokenizer, or one of a kind this reader does not know.
        """
        path = Path(path)
        settings = cls.check_gguf(metadata, path)
        vocabulary, rule = Vocabulary(metadata, path), settings.pop("rule")
        bos, eos = settings.pop("bos_token"), settings.pop("eos_token")
        pieces = None if rule else Pieces(metadata, vocabulary)
        backend = byte_level_bpe(metadata, vocabulary, rule) if rule else sentencepiece_bpe(metadata, vocabulary)
        return cls(
            vocabulary.add_to(backend),
            path,
            pieces=pieces,
            bos_token=None if bos is None else vocabulary.tokens[bos],
            eos_token=None if eos is None else vocabulary.tokens[eos],
            **settings,
        )

    @classmethod
    def check_gguf(cls, metadata: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
        """What `from_gguf` reads beside the vocabulary itself: quick, and where most files that will not do are found.

        Raises what `from_gguf` raises, but for tokens that repeat, are not UTF-8 or do not fit their merges or scores.
        """
        path = Path(path)
        model = typed_value(metadata, path, "tokenizer.ggml.model", str)
        instead = "Use the model's tokenizer.json with Tokenizer.from_files instead"
        if model not in ("gpt2", "llama"):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.model is {model!r}; known: 'gpt2' (byte-level BPE), 'llama' (SentencePiece "
                f"BPE). {instead}"
            )
        name = typed_value(metadata, path, "tokenizer.ggml.pre", str) if model == "gpt2" else None
        if name is not None and name not in RULES:
            raise CheckpointError(
                f"{path}: tokenizer.ggml.pre is {name!r}, a splitting rule this reader does not know; "
                f"known: {', '.join(RULES)}. {instead}"
            )
        rule = None if name is None else RULES[name]
        if rule is None:
            check_settings(metadata, path)
        count = len(strings_value(metadata, path, "tokenizer.ggml.tokens"))

        def token_id(role: str) -> int | None:
            default = DEFAULT_IDS.get(role) if rule is None else None
            value = typed_value(metadata, path, f"tokenizer.ggml.{role}_token_id", int, default)
            if value is not None and not 0 <= value < count:
                raise CheckpointError(f"{path}: the {role} token is {value}, with {count:,} tokens")
            return value

        bos, eos = token_id("bos"), token_id("eos")
        endings = (eos, token_id("eot"), token_id("eom"))
        return {
            "rule": rule,
            "bos_token": bos,
            "eos_token": eos,
            "bos_token_id": bos,
            "eos_token_ids": [ending for ending in endings if ending is not None],
            "add_bos": typed_value(metadata, path, "tokenizer.ggml.add_bos_token", bool, rule is None or rule.add_bos),
            "chat_template": typed_value(metadata, path, "tokenizer.chat_template", str, None),
        }

    @classmethod
    def from_files(cls, folder: str | Path) -> Tokenizer:
        """Build from `tokenizer.json` and the settings in `tokenizer_config.json`, `generation_config.json`.

        Both settings files may be missing. The model's `config.json` may name further tokens that end an answer. A
        `chat_template.jinja` comes before the template in the config. Raises CheckpointError if `tokenizer.json` is
        missing or damaged, or if a file names a token that is not in it.
        """
        import tokenizers

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: the tokenizers library cannot read it: {error}") from error
        # A file saved during training may cut or pad every text.
        backend.no_truncation()
        backend.no_padding()
        config, generation, model = (
            read_json(folder / name) if (folder / name).is_file() else {}
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )

        def settings_of(role: str, *files: Mapping[str, Any]) -> tuple[list[int], str | None]:
            """The ids that all files give for a role, and the token's text."""
            given = (file.get(f"{role}_token_id") for file in files)
            ids = [x for ids in given if ids is not None for x in (ids if isinstance(ids, list) else [ids])]
            text = config.get(f"{role}_token")
            text = text.get("content") if isinstance(text, dict) else text
            if text is not None:
                ids = [backend.token_to_id(text) if isinstance(text, str) else text, *ids]
            if not all(type(i) is int and backend.id_to_token(i) is not None for i in ids):
                raise CheckpointError(f"{folder}: {role} token {text!r}, of ids {ids}: not in {path.name}")
            return ids, text if text is not None or not ids else backend.id_to_token(ids[0])

        (bos_ids, bos_text), (eos_ids, eos_text) = settings_of("bos", generation), settings_of("eos", generation, model)
        bos = bos_ids[0] if bos_ids else None
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
        return cls(
            backend,
            folder,
            bos_token_id=bos,
            eos_token_ids=eos_ids,
            add_bos=bool(add_bos),
            chat_template=_template_in(folder, config),
            bos_token=bos_text,
            eos_token=eos_text,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows, for padding."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_bos: bool | None = None, continued: bool = False) -> list[int]:
        """Token ids of `text`.

        BOS comes first if `add_bos` (None: the file's setting), but never a second one when the text itself
        begins with it. `continued`: the text goes on behind another (see `ends_in_text`), so it does not get the space
        that SentencePiece lets a text begin with. Bytes that a byte-level vocabulary has no token for are dropped, as
        llama.cpp does (the demo model lacks a few control characters). Raises InvalidArgument if BOS is asked of a
        model without one.
        """
        ids: list[int] = self._continued_ids(text) if continued else self._ids(text)
        if add_bos and self.bos_token_id is None:
            raise InvalidArgument(f"add_bos=True, but the tokenizer of {self._path} has no BOS token")
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def ends_in_text(self, ids: Sequence[int]) -> bool:
        """Whether text behind these ids continues one: not behind nothing, BOS alone, or an added token behind which
        this tokenizer begins anew.
        """
        if len(ids) == 0 or list(ids) == [self.bos_token_id]:
            return False
        return ids[-1] not in self._added or self._ids(f"{self._added[ids[-1]]}a")[1:] == self._continued_ids("a")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _continued_ids(self, text: str) -> list[int]:
        """Those of a text without its first space; from its first added token on it is like any other."""
        if self._continuing is self._backend:
            return self._ids(text)
        encoding = self._continuing.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        for at, index in enumerate(ids):
            if index in self._added:
                return ids[:at] + self._ids(text[encoding.offsets[at][0] :])
        return ids

    def ends(self, text: str) -> list[int]:
        """Where the text of each token of `encode(text, add_bos=False)` ends in `text`, counted in characters.

        Tokens that share a character end where it does; the last one ends the text.
        """
        ends: list[int] = []
        for _, end in self._backend.encode(text, add_special_tokens=False).offsets:
            ends.append(max(end, ends[-1] if ends else 0))
        return [*ends[:-1], len(text)] if ends else []

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, special tokens their own text.

        Raises InvalidArgument for a negative id; ids beyond the vocabulary have no text.
        """
        numbers = [int(i) for i in ids]
        if min(numbers, default=0) < 0:
            raise InvalidArgument(f"ids: expected token ids, got {min(numbers)}")
        if self._pieces is not None:
            return self._pieces.text(i for i in numbers if not (skip_special and i in self._special_ids))
        return self._backend.decode(numbers, skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = False, after: Sequence[int] = ()) -> TextStream:
        """A decoder for one sequence that arrives token by token.

        `after`: what it continues, whose text is not given again. SentencePiece drops the space that a text begins
        with, and so begins a text behind a special token; behind others the space stays.
        """
        return TextStream(self, skip_special, self._last_words(after))

    def _last_words(self, ids: Sequence[int]) -> list[int]:
        """A few ids at the end of these that are ordinary text and whole characters in the end, or none."""
        last = list(ids[-8:])
        while last and (self._special_ids.intersection(last) or self.decode(last).endswith("\ufffd")):
            del last[0]
        return last

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The backend without what it puts in front of a text."""
        import tokenizers

        parts = (self._backend.normalizer, self._backend.pre_tokenizer)
        states = [part.__getstate__() for part in parts if part]
        if not any(
            kind in state for state in states for kind in (b"Prepend", b"Metaspace", b'"add_prefix_space":true')
        ):
            return self._backend
        source = json.loads(self._backend.to_str())
        source["normalizer"] = _without_first_space(source["normalizer"])
        source["pre_tokenizer"] = _without_first_space(source["pre_tokenizer"])
        return tokenizers.Tokenizer.from_str(json.dumps(source))

    @cached_property
    def _added(self) -> Mapping[int, str]:
        """Tokens that are found in text before it is cut."""
        return {index: token.content for index, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the model's template writes it; `variables` such as `tools` are passed to it.

        Raises CheckpointError if the model has no usable template, InvalidArgument if the template refuses
        the messages or fails over them.
        """
        known = {"tools": None, "documents": None, **self._special_tokens}
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, **variables}
        template = self._template
        try:
            return template.render(known | given)
        except Exception as error:  # a template is a program, and raises what it likes
            raise InvalidArgument(f"messages: refused by the template of {self._path}: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of the rendered conversation.

        There is one BOS, whether the template writes it or the file's setting asks for it.
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text)

    @cached_property
    def _template(self) -> jinja2.Template:
        import jinja2

        if self.chat_template is None:
            raise CheckpointError(f"{self._path}: no chat template; write the prompt and encode() it")
        try:
            return _template_environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self._path}: the chat template is not valid Jinja: {error}") from error


class TextStream:
    """Text of a token sequence as it grows. All pieces together are `decode` of all the ids (behind those of `after`),
    but for byte tokens of a tokenizer.json that are not UTF-8: `decode` there gives U+FFFD for their neighbours too.

    A piece ends where a character does: bytes of an unfinished one wait for the next token, or for `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, context: list[int]) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        # Decoders may treat the first token differently (a leading space): one finished stretch is kept.
        self._context = context
        self._pending: list[int] = []
        self._sent = 0

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain, which may be empty."""
        self._pending.append(token_id)
        new = self._new_text()
        certain = new.rstrip("\ufffd")
        piece = certain[self._sent :]
        if len(certain) < len(new):
            self._sent = max(self._sent, len(certain))
        else:
            # Without text of its own a stretch (a skipped special token) is no context for the next.
            self._context = self._pending if new else self._context + self._pending
            self._pending, self._sent = [], 0
        return piece

    def flush(self) -> str:
        """The text still held back, U+FFFD for unfinished bytes; the stream then starts afresh."""
        piece = self._new_text()[self._sent :]
        self._context, self._pending, self._sent = [], [], 0
        return piece

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special=self._skip_special)
        return decode(self._context + self._pending, skip_special=self._skip_special)[len(before) :]


def _without_first_space(part: Any) -> Any:
    """A normalizer or a pre-tokenizer of a tokenizer.json that puts no space in front of a text."""
    if not part or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return part | {"add_prefix_space": False}
    for members in ("normalizers", "pretokenizers"):
        if members in part:
            return part | {members: [x for x in map(_without_first_space, part[members]) if x]}
    return part


def _template_in(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a folder: its own file, or a string or a list of named ones in the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: chat_template in tokenizer_config.json should be text")
    return template


def _template_environment() -> jinja2.Environment:
    """The sandbox and helpers that templates are written for (transformers' `chat_template_utils`)."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own tojson escapes for HTML, which would reach the model.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
