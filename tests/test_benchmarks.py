"""The benchmarks run, without peers and in small sizes; their files are the model, and their rounds alternate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import pyferrum as pf
from benchmarks import compare, files
from benchmarks.__main__ import main
from tests import tiny


def test_compare__measures_speed_start_and_memory(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--engines pyferrum --threads 1 --prefill 8 --decode 4 --decode-tokens 2 --budget 0 --starts 1"
    main(["--json", str(tmp_path / "out.json"), "compare", "--model", str(model_path), *options.split()])
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["row"] for row in result["speed"]] == ["prefill 8", "decode after 4"]
    for row in result["speed"]:
        assert len(row["rates"]["pyferrum"]) == 3 and min(row["rates"]["pyferrum"]) > 0
    model = pf.load(model_path)
    text = (tiny.ROOT / "pyferrum/data/tidewatch.txt").read_text()
    tokens = model.tokenizer.encode(text, add_bos=False)
    _, logits = model.forward(model.init_state(), tokens[:8], last_only=True)
    assert result["speed"][0]["best"] == {"pyferrum": int(np.asarray(logits).argmax())}
    [start] = result["start"]
    assert 0 < start["imports_bytes"] < start["peak_bytes"] < 2e9 and start["load_s"] > 0
    assert "| Q4_1 | 1 | decode after 4 |" in capsys.readouterr().out


def test_engine__that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="mlx: not installed here"):
        main(["compare", "--engines", "pyferrum", "mlx"])


def test_process__says_what_went_wrong(tmp_path: Path) -> None:
    process = compare.Process("pyferrum", sys.executable)
    with pytest.raises(SystemExit, match=r"pyferrum: load: CheckpointError: .*no.gguf"):
        process("load", path=str(tmp_path / "no.gguf"), threads=1, context=8)
    process.close()
    assert process.process.returncode == 0


class Counted:
    """An engine that takes as long as it says, and notes when it was asked."""

    def __init__(self, engine: str, seconds: float, log: list[str]) -> None:
        self.engine, self.seconds, self.log = engine, seconds, log

    def __call__(self, **_: Any) -> dict[str, Any]:
        self.log.append(self.engine)
        return {"seconds": self.seconds, "best": 7}


def test_rounds__alternate_and_ratios_are_of_the_same_round() -> None:
    log: list[str] = []
    processes: Any = [Counted("a", 0.5, log), Counted("b", 2.0, log)]
    row = compare.rounds(processes, 10, 0.0, {"do": "prefill"})
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"  # one to warm up, then three rounds
    assert compare.summary(row, "a")["b"]["ratio"] == 4
    uneven = {"rates": {"a": [1.0, 8.0, 30.0], "b": [1.0, 2.0, 10.0]}}
    result = compare.summary(uneven, "a")["b"]
    assert (result["median"], result["ratio"], result["ratio_low"], result["ratio_high"]) == (2, 3, 1, 4)


@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_files__are_the_model_in_another_format(tmp_path: Path, name: str) -> None:
    source = tiny.write_tiny_gguf(tmp_path / "tiny.gguf")
    path = files.file_of(source, name)
    assert path.parent == tmp_path and files.file_of(source, "Q4_1") == source
    models = [pf.load(p) for p in (source, path)]
    a, b = (np.asarray(m.forward(m.init_state(), tiny.ids("the same"))[1]) for m in models)
    assert models[1].params.layers[0].down_proj.format == name
    assert 0 < np.abs(a - b).max() < 0.05 * np.abs(a).max()
    with pytest.raises(SystemExit, match="format: expected one of"):
        files.file_of(source, "Q9")


def test_files__for_torch_and_mlx_are_the_model_in_bfloat16(tmp_path: Path) -> None:
    source = tiny.write_tiny_gguf(tmp_path / "tiny.gguf")
    models = [pf.load(path) for path in (files.file_of(source, "BF16"), files.hf_folder(source))]
    a, b = (np.asarray(m.forward(m.init_state(), tiny.ids("the same"))[1]) for m in models)
    np.testing.assert_allclose(a, b, atol=0.02 * np.abs(a).max())


@pytest.mark.parametrize("name", files.RANDOM)
def test_files__random_blocks_keep_their_numbers_in_range(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = files.random_blocks(kind, 64, 768, np.random.default_rng(1))
    x = pf.block_array(data, name, (64, 768)).dequantize()
    assert abs(x.mean()) < 0.2 / np.sqrt(768)
    assert 0.5 < x.std() * np.sqrt(768) < 2


def test_kernels__show_rates_beside_the_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--threads 1 --formats Q4_1 Q6_K F16 --rows 1 3 --width 256 --contexts 300 --fork-context 3000 --branches 7 "
        "--budget 0 --megabytes 1"
    )
    main(["--json", str(tmp_path / "out.json"), "kernels", *options.split()])
    result = json.loads((tmp_path / "out.json").read_text())
    assert all(value > 0 for value in result["limits"]["1"].values())
    rows = {row["function"]: row for row in result["kernels"]["1"]}
    tree = rows["branch of one token, 7 over 3000 tokens"]
    assert tree["new_pages"] <= 7 and tree["copied_pages"] <= 7
    assert sum(row["function"] == "linear" for row in result["kernels"]["1"]) == 6
    assert "linear Q6_K, 3 rows" in capsys.readouterr().out
