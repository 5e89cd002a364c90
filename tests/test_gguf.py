"""The GGUF reader: what it gives for good files, and that every kind of bad one is a named error."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyferrum.checkpoint import GGUFFile, open_gguf
from pyferrum.errors import CheckpointError

F32, F16, Q4_K, U32, STRING, ARRAY = 0, 1, 12, 4, 8, 9
BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: Iterable[int], kind: int = F32, offset: int = 0) -> bytes:
    dims = tuple(dims)
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A GGUF file byte by byte, so that a test can lie anywhere in it."""
    keys, tensors = list(keys), list(tensors)
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def opened(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def write_tiny(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A file by the gguf package's own writer, with every kind of metadata; returns its F32 tensors."""
    tensors = {
        "token_embd.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "rope_freqs.weight": np.array([1, 0.5], np.float32),
        "output_norm.weight": np.ones(4, np.float32),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_add_bos_token(False)
    writer.add_head_count_kv([3, 1])
    writer.add_token_list(["a", "b", "é"])
    writer.add_array("test.flags", [True, False])
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_open__reads_what_the_reference_writer_wrote(tmp_path: Path) -> None:
    """vllm-project/vllm#7268 (D5): `rope_freqs.weight` is a tensor like any other, not an unexpected one."""
    path = tmp_path / "tiny.gguf"
    expected = write_tiny(path)
    model = open_gguf(path)
    assert list(model.tensors) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(model.tensors[name].array(), array)
        np.testing.assert_array_equal(model.tensors[name].dequantize(), array)
        stored = model.tensors[name]
        assert stored.data.tobytes() == array.tobytes()
        assert model.data[stored.offset :][: stored.nbytes].tobytes() == array.tobytes()
    assert model.data.tobytes() == path.read_bytes()
    assert model.get("llama.block_count", int) == 2
    assert model.get("llama.attention.layer_norm_rms_epsilon", float) == pytest.approx(1e-5)
    assert model.get("tokenizer.ggml.add_bos_token", bool) is False
    assert model.get("llama.attention.head_count_kv", list[int]) == [3, 1]
    assert model.get("tokenizer.ggml.tokens", list[str]) == ["a", "b", "é"]
    assert model.get("test.flags", list[bool]) == [True, False]
    assert model.get("absent", int, 7) == 7
    assert model.get("absent", str, None) is None


def test_open__shares_the_map_and_cannot_be_written(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    model = open_gguf(tmp_path / "tiny.gguf")
    stored = model.tensors["output_norm.weight"]
    assert np.shares_memory(stored.data, model.data)
    assert np.shares_memory(stored.array(), model.data)
    with pytest.raises(ValueError, match="read-only"):
        stored.array()[0] = 2


def test_get__wrong_type_names_key_and_file(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    model = open_gguf(tmp_path / "tiny.gguf")
    wrong: list[tuple[str, Any]] = [
        ("llama.block_count", float),
        ("llama.block_count", bool),
        ("tokenizer.ggml.add_bos_token", int),
        ("llama.attention.head_count_kv", list[float]),
        ("llama.attention.head_count_kv", int),
        ("tokenizer.ggml.tokens", list[int]),
        ("absent", int),
    ]
    for name, kind in wrong:
        with pytest.raises(CheckpointError, match=rf"tiny\.gguf.*{name}"):
            model.get(name, kind)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_tensor__blocks_are_bytes_until_dequantized(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 60, (3, 2 * size), np.uint8)
    stored = opened(tmp_path, file_of([], [tensor("w", (2 * block, 3), kind)], rows.tobytes())).tensors["w"]
    assert (stored.format, stored.shape, stored.nbytes) == (name, (3, 2 * block), rows.size)
    np.testing.assert_array_equal(stored.dequantize(), gguf.dequantize(rows, kind))
    with pytest.raises(CheckpointError, match=rf"'w'.*{name}"):
        stored.array()


def test_tensor__bf16_scalar_and_empty(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#25596 (F4): a tensor with a zero dimension is allowed, and has no bytes."""
    ones = np.ones((2, 2), ml_dtypes.bfloat16)
    model = opened(
        tmp_path,
        file_of(
            [],
            [tensor("scalar", ()), tensor("empty", (3, 0), F32, 32), tensor("bf16", (2, 2), 30, 32)],
            struct.pack("<f", 2.5) + bytes(28) + ones.tobytes(),
        ),
    )
    assert model.tensors["scalar"].array() == np.float32(2.5)
    assert model.tensors["empty"].array().shape == model.tensors["empty"].dequantize().shape == (0, 3)
    np.testing.assert_array_equal(model.tensors["bf16"].array(), ones)


def test_open__truncated_file_names_tensor_and_bytes(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#6774, #6885; ollama/ollama#6228 (F1): found at open, not by SIGBUS."""
    content = file_of([], [tensor("first", (64,)), tensor("last", (64,), offset=256)], bytes(512))
    assert set(opened(tmp_path, content).tensors) == {"first", "last"}
    with pytest.raises(CheckpointError, match=r"model\.gguf.*'last'.*needs 256 bytes.*and 156 are present"):
        opened(tmp_path, content[:-100])
    with pytest.raises(CheckpointError, match=r"'first'.*needs 256 bytes.*and 212 are present"):
        opened(tmp_path, content[:-300])


def test_open__row_length_must_be_whole_blocks(tmp_path: Path) -> None:
    """WestWaters/pollard-weights#103; ggml-org/llama.cpp#11976 (C4): rows of 896 cannot be Q4_K."""
    with pytest.raises(CheckpointError, match=r"'w'.*rows of 896.*256 in a Q4_K block"):
        opened(tmp_path, file_of([], [tensor("w", (896, 4), Q4_K)], bytes(4096)))


alignment = [key("general.alignment", U32, struct.pack("<I", value)) for value in (0, 3, 4, 1 << 30)]
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not gguf": (b"PK\3\4" + bytes(64), "not a GGUF file"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "only magic": (b"GGUF", "version needs 4 bytes"),
    "version 1": (file_of(version=1), "version 1"),
    "version 9": (file_of(version=9), "0x9"),
    "big-endian": (file_of(version=0x03000000), "big-endian"),
    "key count": (file_of(n_keys=1 << 60), "key count"),
    "tensor count": (file_of(n_tensors=1 << 60), "tensor count"),
    "string length": (file_of([key("k", STRING, struct.pack("<Q", 1 << 40))]), "'k'.*1,099,511,627,776"),
    "key length": (file_of([struct.pack("<QQ", (1 << 64) - 1, 0)], n_keys=1), "name of metadata key 0"),
    "array length": (file_of([key("k", ARRAY, struct.pack("<IQ", U32, 1 << 62))]), "'k'"),
    "string array length": (file_of([key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]), "'k'"),
    "string in array": (file_of([key("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 63))]), "'k'"),
    "array of arrays": (file_of([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "'k'.*array of arrays"),
    "value type": (file_of([key("k", 13, bytes(8))]), "'k'.*type 13"),
    "array value type": (file_of([key("k", ARRAY, struct.pack("<IQ", 99, 0))]), "'k'.*type 99"),
    "not utf-8": (file_of([key("k", STRING, struct.pack("<Q", 1) + b"\xff")]), "'k'.*UTF-8"),
    "key twice": (file_of([key("k", U32, bytes(4))] * 2), "'k' appears twice"),
    "tensor twice": (file_of([], [tensor("w", (1,))] * 2, bytes(64)), "'w' appears twice"),
    "dimensions": (file_of([], [tensor("w", (1,) * 9)], bytes(64)), "'w' has 9 dimensions"),
    "overflow": (file_of([], [tensor("w", (4, 1073741823, 1073741825, 1))], bytes(64)), "'w'.*overflow"),
    "empty overflow": (file_of([], [tensor("w", (1 << 63, 0))], bytes(64)), "'w'.*overflow"),
    "large": (file_of([], [tensor("w", (1 << 40,))], bytes(64)), "'w'.*needs 4,398,046,511,104 bytes"),
    "removed type": (file_of([], [tensor("w", (32,), 4)], bytes(64)), "'w'.*type number 4: removed"),
    "unknown type": (file_of([], [tensor("w", (32,), 999)], bytes(64)), "'w'.*type number 999: unknown"),
    "unaligned": (file_of([], [tensor("w", (1,), offset=4)], bytes(64)), "'w'.*not a multiple"),
    "offset": (file_of([], [tensor("w", (1,), offset=1 << 63)], bytes(64)), "'w'.*0 are present"),
    "overlap": (
        file_of([], [tensor("a", (16,)), tensor("b", (8,), offset=32)], bytes(64)),
        "'a' and 'b' overlap",
    ),
    "alignment 0": (file_of(alignment[:1]), "general.alignment is 0"),
    "alignment 3": (file_of(alignment[1:2]), "general.alignment is 3"),
    "alignment 4": (file_of(alignment[2:3]), "general.alignment is 4"),
    "alignment 2^30": (file_of(alignment[3:]), "general.alignment is 1073741824"),
    "alignment text": (file_of([key("general.alignment", STRING, text("32"))]), "general.alignment.*str"),
    "block count": (
        file_of([key("general.architecture", STRING, text("x")), key("x.block_count", U32, b"\xff" * 4)]),
        "x.block_count is 4,294,967,295",
    ),
    "tokens": (file_of([key("tokenizer.ggml.tokens", U32, bytes(4))]), "'tokenizer.ggml.tokens'.*has a int"),
    "token types": (
        file_of(
            [
                key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 1) + text("a")),
                key("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ", 5, 0)),
            ]
        ),
        "token_type should have 1 entries",
    ),
    "short vocabulary": (
        file_of(
            [key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 1) + text("a"))],
            [tensor("token_embd.weight", (4, 2))],
            bytes(64),
        ),
        "token_embd.weight.*each of the 1 tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_open__damaged_files_are_named_errors(tmp_path: Path, name: str) -> None:
    """ggml-org/llama.cpp#26978, #24759, #14595; ggml-org/ggml#709, #1516; antirez/gguf-tools#25 (F3)."""
    content, message = BAD_FILES[name]
    with pytest.raises(CheckpointError, match=rf"model\.gguf.*{message}"):
        opened(tmp_path, content)


def test_open__missing_file_is_a_named_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            open_gguf(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path)
    return path.read_bytes(), path.with_name("fuzzed.gguf")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_open__fuzzed_header_opens_or_is_refused(tiny: tuple[bytes, Path], data: st.DataObject) -> None:
    """F3, the whole kind: no damage to the bytes gives anything but a model or a CheckpointError."""
    content, path = tiny
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 8))
        patch = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        damaged[at : at + len(patch)] = patch
    size = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    path.write_bytes(damaged[:size])
    with contextlib.suppress(CheckpointError):
        model = open_gguf(path)
        for stored in model.tensors.values():
            assert stored.dequantize().shape == stored.shape
        for value in model.metadata.values():
            str(list(value) if hasattr(value, "__iter__") else value)


def write_parts(folder: Path, *, numbers: tuple[int, int] = (0, 1), tensors: int = 2) -> Path:
    """Two parts with a tensor each, claiming to be parts `numbers` of a model with `tensors`. The first."""
    for part in range(2):
        claims = {"split.no": numbers[part], "split.count": 2, "split.tensors.count": tensors}
        keys = [key(name, U32, struct.pack("<I", value)) for name, value in claims.items()]
        content = file_of(keys, [tensor(f"w{part}", (1,))], struct.pack("<f", part))
        (folder / f"m-0000{part + 1}-of-00002.gguf").write_bytes(content)
    return folder / "m-00001-of-00002.gguf"


def test_split__all_parts_are_one_model(tmp_path: Path) -> None:
    model = open_gguf(write_parts(tmp_path))
    assert {name: float(t.array()[0]) for name, t in model.tensors.items()} == {"w0": 0.0, "w1": 1.0}
    for stored in model.tensors.values():
        assert model.files[stored.path][stored.offset :][:4].tobytes() == stored.data.tobytes()
    with pytest.raises(CheckpointError, match="2 parts"):
        _ = model.data


def test_split__missing_or_wrong_part_is_named(tmp_path: Path) -> None:
    first = write_parts(tmp_path)
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(CheckpointError, match=r"not the first part.*m-00001-of-00002"):
        open_gguf(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"missing 1 of 2 parts: m-00002-of-00002\.gguf"):
        open_gguf(first)
    with pytest.raises(CheckpointError, match="-00001-of-00002"):
        open_gguf(first.rename(tmp_path / "renamed.gguf"))
    write_parts(tmp_path, numbers=(0, 5))
    with pytest.raises(CheckpointError, match=r"m-00002.*part 6 of 2"):
        open_gguf(first)
    write_parts(tmp_path, tensors=9)
    with pytest.raises(CheckpointError, match="expected 9 tensors in all, got 2"):
        open_gguf(first)
    write_parts(tmp_path)
    zero, one = (key("split.no", U32, struct.pack("<I", value)) for value in (0, 1))
    second.write_bytes(first.read_bytes().replace(zero, one))
    with pytest.raises(CheckpointError, match="'w0' is also in m-00001"):
        open_gguf(first)


def test_demo_model__tensors_and_open_time(model_path: Path) -> None:
    """The demo file as it is known to be: a Q4_1 model with a tied Q8_0 embedding."""
    open_gguf(model_path)
    begin = time.perf_counter()
    model = open_gguf(model_path)
    assert time.perf_counter() - begin < 0.15
    formats = [stored.format for stored in model.tensors.values()]
    assert {name: formats.count(name) for name in set(formats)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    embedding = model.tensors["token_embd.weight"]
    assert (embedding.format, embedding.shape) == ("Q8_0", (49152, 576))
    assert "output.weight" not in model.tensors
    assert model.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
    assert model.get("llama.block_count", int) == 30
    reader = {t.name: t for t in gguf.GGUFReader(model_path).tensors}
    for name in ("blk.7.attn_q.weight", "blk.29.ffn_norm.weight", "token_embd.weight"):
        assert model.tensors[name].data.tobytes() == reader[name].data.tobytes()
        assert model.tensors[name].offset == reader[name].data_offset


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of resident pages")
def test_release_pages__gives_memory_back_and_the_bytes_stay(model_path: Path) -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))

    tensor = open_gguf(model_path).tensors["token_embd.weight"]
    total = int(tensor.data.sum(dtype=np.int64))
    before = resident()
    tensor.release_pages()
    assert before - resident() > 0.9 * tensor.nbytes
    assert int(tensor.data.sum(dtype=np.int64)) == total
