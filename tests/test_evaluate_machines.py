"""Evaluation by many workers, and after interruptions: the same bits, and nothing scored twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np
import pytest

import pyferrum as pf
from pyferrum.cli import main
from pyferrum.evaluate import evaluate, journal, read_result, work
from tests import tiny

TEXT = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text().replace("\n", " ")[:4000]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(small: pf.Model) -> dict[str, Any]:
    return run(small)


def run(model: pf.Model, **options: Any) -> dict[str, Any]:
    return evaluate(model, TEXT, method="rolling", window=32, **options).to_dict(nlls=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[work.Unit]]:
    """Units scored in this process."""
    seen: list[work.Unit] = []
    score = work._score

    def counted(model: pf.Model, prefixes: work.Prefixes, unit: work.Unit, batch_size: int | None) -> work.Scored:
        seen.append(unit)
        return score(model, prefixes, unit, batch_size)

    monkeypatch.setattr(work, "_score", counted)
    yield seen


def test_threads__give_the_same_bits_and_share_the_callers_model(
    small: pf.Model, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_load", None)  # nobody has to load anything
    with ThreadPoolExecutor(4) as executor:
        assert run(small, executor=executor) == expected


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes__give_the_same_bits(method: str, small: pf.Model, expected: dict[str, Any]) -> None:
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert run(small, executor=executor) == expected


def test_workers__load_a_model_once_each(small: pf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads of one worker that has no model yet."""
    spec = work.ModelSpec.of(small)
    loads = []
    load = work._load

    def counted(spec: work.ModelSpec) -> pf.Model:
        loads.append(spec)
        return load(spec)

    monkeypatch.setattr(work, "_load", counted)
    monkeypatch.setattr(work, "_callers", {})
    monkeypatch.setattr(work, "_loaded", {})
    units = [work.Unit((i,), ((5, 6),)) for i in range(20)]
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(work.score_unit, [spec] * 20, units))
    assert loads == [spec]
    np.testing.assert_array_equal(results[3].nlls[0], work.score_with(small, units[3]).nlls[0])


def test_workers__refuse_another_model_or_build(small: pf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = work.ModelSpec.of(small)
    for wrong, message in (
        (work.ModelSpec(spec.path, spec.dtype, "0" * 64, spec.build), "the model is .* in this worker, expected 000"),
        (work.ModelSpec(spec.path, spec.dtype, spec.sha256, "1" * 64), "the library's build is .* expected 111"),
    ):
        with pytest.raises(pf.CheckpointError, match=message):
            work.score_unit(wrong, work.Unit((5,), ((6,),)))


def test_failure__cancels_what_has_not_begun(small: pf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def fail(spec: work.ModelSpec, unit: work.Unit, batch_size: int | None) -> work.Scored:
        done.append(unit)
        raise MemoryError("no")

    monkeypatch.setattr(work, "score_unit", fail)
    with ThreadPoolExecutor(1) as executor, pytest.raises(MemoryError):
        run(small, executor=executor)
    assert len(done) < 20  # of 125


def test_dask__a_killed_worker_changes_no_bit(small: pf.Model, expected: dict[str, Any], tmp_path: Path) -> None:
    """A local cluster of two processes; one is killed by SIGKILL when a third of the windows are done."""
    # A result that lay on the killed worker is asked for until the connection times out.
    settings = {"temporary-directory": str(tmp_path), "distributed.comm.timeouts.connect": "1s"}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert run(small, executor=client) == expected
        (tmp_path / "text").write_text(TEXT)
        options = ["--text", str(tmp_path / "text"), "--method", "rolling", "--window", "32", "--json"]
        files = ["--dask", cluster.scheduler_address, "--output", str(tmp_path / "result")]
        assert main(["eval", "--model", str(small.path), *options, *files]) == 0
        assert read_result(tmp_path / "result") == json.loads(json.dumps(expected))
        pids = client.run(os.getpid)
        assert len(set(pids.values())) == 2

        class Killing(Executor):
            """The cluster's executor, which kills a worker after some results."""

            def __init__(self) -> None:
                self.inner = client.get_executor(pure=False)
                self.results, self.killed = 0, 0

            def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
                future = self.inner.submit(function, *arguments, **options)
                future.add_done_callback(self.count)
                return future

            def count(self, _: Future[Any]) -> None:
                self.results += 1
                if self.results == 40:
                    self.killed = next(iter(pids.values()))
                    os.kill(self.killed, signal.SIGKILL)

        executor = Killing()
        assert run(small, executor=executor) == expected
        assert executor.killed and executor.results == 125


# ---- Checkpoints


def test_checkpoint__goes_on_where_it_stopped(
    small: pf.Model, expected: dict[str, Any], calls: list[work.Unit], tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint"
    whole = run(small, checkpoint=file)
    assert whole == expected and len(calls) == 125
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 126
    assert run(small, checkpoint=file) == expected and len(calls) == 125, "all was there"
    rng = np.random.default_rng(0)
    for cut in (0, 5, len(lines[0]) - 1, len(lines[0]), *rng.integers(len(lines[0]), file.stat().st_size, 6)):
        text = b"".join(lines)[:cut]
        file.write_bytes(text)
        calls.clear()
        assert run(small, checkpoint=file) == expected
        whole_lines = text.count(b"\n")
        assert len(calls) == 125 - max(whole_lines - 1, 0)
        assert sorted(file.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())
    # In another order, as from a cluster.
    file.write_bytes(lines[0] + b"".join(lines[100:20:-1]))
    assert run(small, checkpoint=file) == expected


def test_checkpoint__is_of_one_measurement(small: pf.Model, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    evaluate(small, TEXT, window=256, checkpoint=file)
    before = file.read_bytes()
    with pytest.raises(pf.InvalidArgument, match=r"of another evaluation: definition .*; window 256, now 128"):
        evaluate(small, TEXT, window=128, checkpoint=file)
    with pytest.raises(pf.InvalidArgument, match="text_sha256"):
        evaluate(small, TEXT[::-1], window=256, checkpoint=file)
    assert file.read_bytes() == before
    file.write_text("the log of something else\n")
    with pytest.raises(pf.InvalidArgument, match=r"line 1 of .* is damaged"):
        evaluate(small, TEXT, window=256, checkpoint=file)
    for text in ("no line\nat all", "no line at all", '{"a": 1}\n', "[1]\n"):
        file.write_text(text)
        with pytest.raises(pf.InvalidArgument, match=r"not a checkpoint of an evaluation|damaged"):
            evaluate(small, TEXT, window=256, checkpoint=file)
        assert file.read_text() == text
    file.write_bytes(before.replace(b'"greedy"', b'greedy"', 1))
    with pytest.raises(pf.InvalidArgument, match=r"line 2 of .* is damaged"):
        evaluate(small, TEXT, window=256, checkpoint=file)
    for old, new in ((b'"nlls": ["', b'"nlls": ["?'), (b'"greedy"', b'"other"'), (b'"unit": 0', b'"unit": 999')):
        file.write_bytes(before.replace(old, new, 1))
        with pytest.raises(pf.InvalidArgument, match=r"checkpoint: .* is damaged"):
            evaluate(small, TEXT, window=256, checkpoint=file)


def test_checkpoint__is_used_by_one_evaluation_at_a_time(small: pf.Model, tmp_path: Path) -> None:
    with (
        journal.Journal(tmp_path / "checkpoint", {"what": 1}),
        pytest.raises(pf.InvalidArgument, match="is in use by another evaluation"),
    ):
        evaluate(small, TEXT, checkpoint=tmp_path / "checkpoint")


def test_checkpoint__killed_at_any_moment_gives_the_same_file(small: pf.Model, tmp_path: Path) -> None:
    """SIGKILL at random moments, resumed until done; then byte for byte the file of an undisturbed run."""
    (tmp_path / "text").write_text(TEXT * 8)

    def command(name: str) -> list[str]:
        options = ["--text", str(tmp_path / "text"), "--method", "strided", "--window", "48", "--json"]
        files = ["--checkpoint", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / f"{name}.json")]
        return [sys.executable, "-m", "pyferrum.cli", "eval", "--model", str(small.path), *options, *files]

    subprocess.run(command("whole"), check=True, capture_output=True, timeout=60)
    size = (tmp_path / "whole.jsonl").stat().st_size
    checkpoint = tmp_path / "killed.jsonl"
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    reached = 0
    for _ in range(3):
        moment = reached + rng.uniform(0, 0.5) * (size - reached)
        with subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and (checkpoint.stat().st_size if checkpoint.exists() else 0) <= moment:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"
        reached, before = checkpoint.stat().st_size, reached
        assert before < reached < size
    assert not (tmp_path / "killed.json").exists()
    subprocess.run(command("killed"), check=True, capture_output=True, timeout=60)
    assert (tmp_path / "killed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    units = [json.loads(line)["unit"] for line in checkpoint.read_text().splitlines()[1:]]
    assert units == list(range(len(units))), "each window once"
