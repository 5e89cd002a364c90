"""The safetensors reader and writer: views without copies, shards by their index, damage named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pyferrum.checkpoint import open_safetensors
from pyferrum.checkpoint.safetensors import save_safetensors
from pyferrum.errors import CheckpointError


def write_raw(path: Path, header: dict[str, Any] | str, data: bytes) -> Path:
    encoded = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def write_shards(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Two shards under an index; the first also holds a tensor that the index does not list."""
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int64)
    save_file({"a": a, "unlisted": b}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": b}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return {"a": a, "b": b}


def test_round_trip__every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    """safetensors/safetensors#436; ml-explore/mlx#3974, #3975 (F7): bfloat16 reaches NumPy, same bits."""
    bits = np.array([[0x3F80, 0x7FC1], [0x0001, 0xFF80]], np.uint16)
    arrays: dict[str, np.ndarray[Any, Any]] = {"BF16": bits.view(ml_dtypes.bfloat16)}
    for name, dtype in {"F32": "f4", "F16": "f2", "F64": "f8", "I32": "i4", "U8": "u1", "BOOL": "?"}.items():
        arrays[name] = np.array([[0, 1], [1, 0]], dtype)
    path = tmp_path / "all.safetensors"
    save_safetensors(path, arrays, {"by": "pyferrum"})
    model = open_safetensors(path)
    assert model.tensors.keys() == arrays.keys()
    for name, stored in model.tensors.items():
        assert (stored.format, stored.shape, stored.array().dtype) == (name, (2, 2), arrays[name].dtype)
        assert stored.array().tobytes() == arrays[name].tobytes() == stored.data.tobytes()
        assert stored.data.tobytes() == model.files[path][stored.offset :][: stored.nbytes].tobytes()
    assert np.shares_memory(model.tensors["BF16"].array(), model.files[path])
    assert not model.tensors["BF16"].array().flags.writeable
    assert model.tensors["F16"].dequantize().dtype == np.float32


def test_round_trip__scalars_and_empty_tensors(tmp_path: Path) -> None:
    """safetensors/safetensors#208, #226; vllm-project/vllm#1687, #1696; ml-explore/mlx#4080 (F4)."""
    arrays: dict[str, Any] = {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 3), np.float16)}
    save_safetensors(tmp_path / "m.safetensors", arrays)
    tensors = open_safetensors(tmp_path / "m.safetensors").tensors
    assert (tensors["scalar"].shape, float(tensors["scalar"].array())) == ((), 3.0)
    assert tensors["empty"].array().shape == tensors["empty"].dequantize().shape == (0, 3)


def test_save__any_memory_layout_means_the_same_values(tmp_path: Path) -> None:
    """safetensors/safetensors#825; ml-explore/mlx#369 (F6): Fortran order was written permuted, silently."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    layouts = {
        "fortran": np.asfortranarray(values),
        "transposed": np.ascontiguousarray(values.T).T,
        "strided": np.repeat(values, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(values[::-1])[::-1],
        "big_endian": values.astype(">f4"),
        "broadcast": np.broadcast_to(values, (2, 2, 3)),
    }
    save_safetensors(tmp_path / "m.safetensors", layouts)
    for stored in open_safetensors(tmp_path / "m.safetensors").tensors.values():
        np.testing.assert_array_equal(stored.array(), np.broadcast_to(values, stored.shape))


def test_save__failure_leaves_the_old_file_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"'b'.*complex128"):
        save_safetensors(path, {"b": np.zeros(1, np.complex128)})
    with pytest.raises(CheckpointError, match="cannot write"):
        save_safetensors(tmp_path / "absent" / "m.safetensors", {"a": np.zeros(1, np.float32)})
    assert list(open_safetensors(path).tensors) == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


BAD_FILES: dict[str, tuple[dict[str, Any] | str, bytes, str]] = {
    "short": ({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4000000]}}, bytes(4), ""),
    "shape lies": ({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4]}}, bytes(4), ""),
    "hole": ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, bytes(2), ""),
    "left over": ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, bytes(2), ""),
    "not json": ("{", b"", ""),
    "unknown dtype": ({"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8), "'w'.*C64"),
    "huge empty": ({"w": {"dtype": "U8", "shape": [1 << 62, 0], "data_offsets": [0, 0]}}, b"", "w.*"),
    "twice": (
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        bytes(1),
        "'w' twice",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_open__damaged_files_are_named_errors(tmp_path: Path, name: str) -> None:
    """ml-explore/mlx#3363 (F5): a header that declares more than the file has is refused, not read."""
    header, data, message = BAD_FILES[name]
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors.*{message}"):
        open_safetensors(write_raw(tmp_path / "bad.safetensors", header, data))


def test_open__short_or_absent_files_are_named_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        open_safetensors(path)
    save_safetensors(path, {"a": np.zeros(8, np.float32)})
    content = path.read_bytes()
    for size in (0, 4, 8, 40, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            open_safetensors(path)


def test_folder__single_file_without_an_index(tmp_path: Path) -> None:
    """vllm-project/speculators#184 (F9): a single file has no index, and any name."""
    save_safetensors(tmp_path / "weights.safetensors", {"a": np.zeros(1, np.float32)})
    model = open_safetensors(tmp_path)
    assert (list(model.tensors), model.config) == (["a"], None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert open_safetensors(tmp_path).config == {"model_type": "llama"}
    save_safetensors(tmp_path / "other.safetensors", {"b": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"found other\.safetensors, weights\.safetensors"):
        open_safetensors(tmp_path)


def test_folder__index_rules(tmp_path: Path) -> None:
    """vllm-project/speculators#184 (F9): shards by the index; a stray file beside them is not read."""
    expected = write_shards(tmp_path)
    (tmp_path / "stray.safetensors").write_bytes(b"not even a safetensors file")
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = open_safetensors(path)
        assert model.tensors.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(model.tensors[name].array(), array)


def test_folder__missing_shard_is_named(tmp_path: Path) -> None:
    """vllm-project/speculators#184 (F9)."""
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing 1 of 2 shards: model-00002-of-00002\.safetensors"):
        open_safetensors(tmp_path)


def test_folder__index_must_tell_the_truth(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    lies: list[tuple[Any, str]] = [
        ({"weight_map": {"b": "model-00001-of-00002.safetensors"}}, "'b' in model-00001"),
        ({"weight_map": {"b": "../b.safetensors"}}, "plain file name"),
        ({"weight_map": {"b": 3}}, "plain file name"),
        ({}, "weight_map"),
        ([], "JSON object"),
    ]
    for content, message in lies:
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            open_safetensors(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        open_safetensors(tmp_path)
