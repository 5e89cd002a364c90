"""The command line as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyferrum as pf
from pyferrum.cli import main
from tests import tiny


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


def test_eval__reads_a_text_as_its_bytes_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, text = tiny.write_tiny(tmp_path / "model"), tmp_path / "text.txt"
    arguments = ("eval", "--model", str(model), "--text", str(text), "--json")
    for written, size in ((b"one\r\ntwo\r\n", 10), (b"one\ntwo\n", 8), (b"\xef\xbb\xbfone", 6)):
        text.write_bytes(written)
        # The tokenizer has printable characters only, and no token for the others.
        assert json.loads(output(capsys, *arguments)[1])["scored_bytes"] == size
    text.write_bytes(b"two words")
    code, out, err = output(capsys, *arguments, "--limit", "5")
    assert code == 0 and json.loads(out)["word_perplexity"] is None
    assert err == "pyferrum: with --limit, words and bytes are not counted\n"
    # Zero is a number too, and one token has no standard error.
    weights = tiny.tensors()
    weights["lm_head.weight"][:] = 0
    tiny.write_tiny(tmp_path / "uniform", weights=weights)
    text.write_bytes(b"a")
    out = output(capsys, "eval", "--model", str(tmp_path / "uniform"), "--text", str(text))[1]
    assert "standard_error" not in out and "bos                0\n" in out
    text.write_bytes(b"abc")
    out = output(capsys, "eval", "--model", str(tmp_path / "uniform"), "--text", str(text))[1]
    assert "standard_error     0.0\n" in out


def test_eval__shows_what_it_could_not_save(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("pyferrum.evaluate.results.write_json", full)
    arguments = ("--model", str(tiny.write_tiny(tmp_path)), "--limit", "20", "--output", str(tmp_path / "x"))
    code, out, err = output(capsys, "eval", *arguments)
    assert code == 1 and "perplexity" in out and "no space left" in err


def test_inspect__shows_the_checkpoint_and_a_plan(capsys: pytest.CaptureFixture[str], model_path: Path) -> None:
    code, out, _ = output(capsys, "inspect", "--model", str(model_path))
    assert code == 0
    assert "210 Q4_1, 61 F32, 1 Q8_0" in out and "causal_attention_split_f16" in out
    assert json.loads(output(capsys, "inspect", "--model", str(model_path), "--json")[1])["layers"] == 30


def test_inspect__plans_what_a_short_context_has_room_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tiny.write_tiny(tmp_path, config={"max_position_embeddings": 64})
    code, out, _ = output(capsys, "inspect", "--model", str(model))
    assert code == 0 and "63 tokens before it" in out


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


def test_options__that_would_be_ignored_or_fail_late_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny.write_tiny(tmp_path / "chat")
    tiny.write_tiny(tmp_path / "bare", tokenizer={"bos_token": None, "chat_template": None})
    for model, arguments, message in (
        ("chat", "run --num-draft-tokens 4", "--num-draft-tokens: goes with --draft-model only"),
        ("chat", "run --system-prompt x --ignore-chat-template", "--system-prompt: does not go with --ignore-chat"),
        ("bare", "run --system-prompt x", "bare has no chat template to put it in"),
        ("bare", "eval --bos always", "--bos: expected auto or never"),
        ("chat", "eval --num-fewshot 0", "--num-fewshot: goes with --tasks only"),
        ("chat", "eval --batch-size 4", "--batch-size: goes with --tasks only"),
        ("chat", "eval --apply-chat-template", "--apply-chat-template: goes with --tasks only"),
        ("chat", "eval --tasks x --window 4", "--window: does not go with --tasks"),
        ("chat", "eval --tasks x --no-token-nlls --output y", "--no-token-nlls: does not go with --tasks"),
        ("chat", "eval --tasks x --num-fewshot -1", "num_fewshot: expected at least 0, got -1"),
        ("chat", "eval --tasks x --limit 0", "limit: expected a whole number of documents, or a fraction"),
        ("chat", "eval --tasks x --limit -3", "limit: expected a whole number of documents, or a fraction"),
        ("chat", "eval --tasks x --limit 2.5", "limit: expected a whole number of documents, or a fraction"),
        ("chat", "eval --no-token-nlls", "--no-token-nlls: goes with --output only"),
        ("chat", "eval --output no/x.json", "--output: there is no folder no"),
        ("chat", f"eval --output {tmp_path}", "--output: expected the name of a file, got the folder"),
        ("chat", "run -p caf\udce9", "prompt: expected text that can be written in UTF-8"),
    ):
        code, out, err = output(capsys, *arguments.split(), "--model", str(tmp_path / model))
        assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_prompt__from_standard_input_has_to_be_text(model_path: Path) -> None:
    command = [sys.executable, "-m", "pyferrum.cli", "run", "--model", str(model_path), "-p", "-", "-m", "1"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment)
    assert done.returncode == 1 and done.stderr.startswith(b"pyferrum: --prompt: expected UTF-8 on standard input")


def test_output__that_nobody_reads_ends_the_program_quietly(model_path: Path) -> None:
    command = [sys.executable, "-m", "pyferrum.cli", "run", "--model", str(model_path), "--max-tokens", "400"]
    command += ["--ignore-chat-template", "-p", "The sea"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stderr is not None
    program.stdout.read(1)
    program.stdout.close()
    assert (program.wait(60), program.stderr.read()) == (141, "")
    program.stderr.close()


def test_usage__errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["dance"], ["run"]):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 2
    for arguments, message in (
        ("bench -n 0", "--num-trials/-n: wrong value: expected at least 1, got 0"),
        ("bench -g -3", "--generation-tokens/-g: wrong value: expected at least 1, got -3"),
        ("bench -p -4", "--prompt-tokens/-p: wrong value: expected at least 1, got -4"),
        ("run --num-draft-tokens 0", "--num-draft-tokens: wrong value: expected 1…15, got 0"),
        ("run --num-draft-tokens 16", "--num-draft-tokens: wrong value: expected 1…15, got 16"),
        ("inspect --context few", "--context: invalid whole number value: 'few'"),
    ):
        with pytest.raises(SystemExit) as exit:
            main([*arguments.split(), "--model", "no.gguf"])
        assert exit.value.code == 2 and message in capsys.readouterr().err


def test_module__runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "pyferrum.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"pyferrum {pf.__version__}", "")
