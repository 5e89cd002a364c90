"""The command line as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pyferrum as pf
from pyferrum.cli import main


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info__names_device_and_build(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "info", "--json")
    result = json.loads(out)
    assert code == 0 and result["name"] == "cpu" and len(result["build"]) == 64
    assert "instruction_set" in output(capsys, "info")[1]


def test_run__streams_text_and_ends_with_rates(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    arguments = ("run", "--model", str(model_path), "--prompt", "What is 2+2?", "--max-tokens", "8")
    code, out, err = output(capsys, *arguments)
    assert code == 0 and out.strip() and "tokens/s" in err
    result = json.loads(output(capsys, *arguments, "--json")[1])
    assert result["text"].strip() == out.strip()
    assert result["generation_tokens"] == 8 and result["finish_reason"] == "length"
    raw = json.loads(output(capsys, *arguments, "--json", "--ignore-chat-template")[1])
    assert raw["prompt_tokens"] < result["prompt_tokens"]


def test_eval__prints_method_and_agrees_with_the_library(
    capsys: pytest.CaptureFixture[str], model: pf.Model, model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("The lamp was lit at dusk and put out at dawn.")
    code, out, _ = output(capsys, "eval", "--model", str(model_path), "--text", str(tmp_path / "text.txt"), "--json")
    result = json.loads(out)
    expected = pf.evaluate.perplexity(model, (tmp_path / "text.txt").read_text())
    assert code == 0 and result["perplexity"] == expected.perplexity and result["definition"] == expected.definition
    out = output(capsys, "eval", "--model", str(model_path), "--limit", "20", "--bos", "always")[1]
    assert "tidewatch.txt" in out and "BOS" in out


def test_inspect__shows_the_checkpoint_and_a_plan(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    code, out, _ = output(capsys, "inspect", "--model", str(model_path))
    assert code == 0
    assert "210 Q4_1, 61 F32, 1 Q8_0" in out and "causal_attention_split_f16" in out
    assert json.loads(output(capsys, "inspect", "--model", str(model_path), "--json")[1])["layers"] == 30


def test_bench__reports_medians(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    arguments = ("bench", "--model", str(model_path), "-p", "16", "-g", "2", "-n", "2", "--json")
    code, out, _ = output(capsys, *arguments)
    result = json.loads(out)
    assert code == 0 and result["prefill_tps"] > 0 and result["decode_tps"] > 0


def test_errors__are_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, "run", "--model", str(tmp_path / "no.gguf"))
    assert (code, out) == (1, "") and err.startswith("pyferrum: ") and err.count("\n") == 1
    code, _, err = output(capsys, "eval", "--model", str(tmp_path / "no.gguf"), "--text", str(tmp_path / "no.txt"))
    assert code == 1 and "no.txt" in err
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    code, _, err = output(capsys, "eval", "--model", "no.gguf", "--text", str(tmp_path / "latin.txt"))
    assert code == 1 and "--text: expected UTF-8" in err and err.count("\n") == 1
    code, _, err = output(capsys, "eval", "--model", "no.gguf", "--output", str(tmp_path / "no" / "x.json"))
    assert code == 1 and "--output: there is no folder" in err


def test_output__that_nobody_reads_ends_the_program_quietly(model_path: Path) -> None:
    command = [sys.executable, "-m", "pyferrum.cli", "run", "--model", str(model_path), "--max-tokens", "400"]
    command += ["--ignore-chat-template", "-p", "The sea"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.read(1)
    program.stdout.close()
    assert (program.wait(60), program.stderr.read()) == (141, "")
    program.stderr.close()


def test_usage__errors_exit_with_2() -> None:
    for argv in ([], ["dance"], ["run"]):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 2


def test_module__runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "pyferrum.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"pyferrum {pf.__version__}", "")
