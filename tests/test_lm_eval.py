"""pyferrum behind lm-evaluation-harness: the tasks in tests/tasks, offline, and an independent run of them."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import pyferrum as pf
from pyferrum.cli import main
from pyferrum.lm_eval import PyferrumLM
from tests import tiny

TASKS = Path(__file__).parent / "tasks"
NAMES = ["harbour_choice", "harbour_pages", "harbour_answers"]
FIGURES = json.loads((Path(__file__).parent / "figures" / "harness.json").read_text())
TEXT = "The harbour fills by six, and the boats lie still."


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tasks() -> TaskManager:
    return TaskManager(include_path=str(TASKS), include_defaults=False)


@pytest.fixture(scope="module")
def found(model: pf.Model, tasks: TaskManager) -> dict[str, Any]:
    """The tasks, by the demo model."""
    return run(PyferrumLM(model), tasks)


def run(lm: PyferrumLM, tasks: TaskManager, **options: Any) -> dict[str, Any]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval.simple_evaluate(model=lm, tasks=NAMES, task_manager=tasks, bootstrap_iters=0, **options)


def outcome(found: dict[str, Any]) -> str:
    """Everything that was measured, to the last bit."""
    responses = {name: [s["resps"] for s in samples] for name, samples in found["samples"].items()}
    metrics = {
        task: {name: float(value) for name, value in row.items() if "," in name and not isinstance(value, str)}
        for task, row in found["results"].items()
    }
    return json.dumps([responses, metrics])


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, entry, index) for index, entry in enumerate(arguments)]


def logprobs(model: pf.Model, fed: list[int], scored: list[int]) -> float:
    """ln p of the last tokens, from one pass."""
    _, logits = model.forward(model.init_state(), [*fed, *scored][:-1])
    losses = np.asarray(pf.cross_entropy(logits[len(fed) - 1 :], scored))
    return -float(losses.sum(dtype=np.float64))


# ---- Beside an independent float32 run: the harness's Hugging Face backend


def test_figures__belong_to_this_model(model_path: Path) -> None:
    assert pf.evaluate.model_sha256(model_path) == FIGURES["gguf_sha256"]


def test_tasks__have_the_independent_runs_answers(found: dict[str, Any]) -> None:
    gaps, tokens = 0.0, 0
    for sample, theirs in zip(found["samples"]["harbour_choice"], FIGURES["choice"], strict=True):
        ours = [response[0] for response in sample["resps"]]
        assert [greedy for _, greedy in ours] == theirs["greedy"]
        assert (sample["acc"], sample["acc_norm"]) == (theirs["acc"], theirs["acc_norm"])
        assert int(np.argmax([value for value, _ in ours])) == int(np.argmax(theirs["loglikelihoods"]))
        gaps += sum(abs(a - b) for (a, _), b in zip(ours, theirs["loglikelihoods"], strict=True))
        tokens += sum(theirs["tokens"])
    assert gaps / tokens <= 5e-3
    assert [sample["resps"][0][0] for sample in found["samples"]["harbour_answers"]] == FIGURES["answers"]
    for task, name in (("harbour_choice", "acc,none"), ("harbour_answers", "exact_match,stripped")):
        assert found["results"][task][name] == FIGURES["results"][task][name]
    for name in ("word_perplexity,none", "byte_perplexity,none"):
        assert found["results"]["harbour_pages"][name] == pytest.approx(
            FIGURES["results"]["harbour_pages"][name], rel=1e-3
        )


def test_perplexity__is_the_independent_runs(model: pf.Model, found: dict[str, Any]) -> None:
    """Token by token, by the same rolling windows, for the pages and for the text that ships with pyferrum."""
    for sample, theirs in zip(found["samples"]["harbour_pages"], FIGURES["pages"], strict=True):
        assert sample["resps"][0][0] == pytest.approx(theirs["loglikelihood"], rel=1e-3)
        ours = pf.evaluate.evaluate(model, sample["doc"]["page"], method="rolling", window=2048)
        assert -sample["resps"][0][0] == pytest.approx(float(ours.token_nlls.sum(dtype=np.float64)), rel=1e-12)
        assert np.abs(ours.token_nlls - theirs["nlls"]).mean() <= 5e-3
    text = (Path(pf.__file__).parent / "data" / "tidewatch.txt").read_text()
    ours, theirs = pf.evaluate.evaluate(model, text, method="rolling", window=512), FIGURES["tidewatch"]
    assert sum(theirs["nlls"]) == pytest.approx(-theirs["loglikelihood"], rel=1e-6)
    assert ours.scored_tokens == len(theirs["nlls"])
    assert np.abs(ours.token_nlls - theirs["nlls"]).mean() <= 5e-3
    assert ours.perplexity == pytest.approx(np.exp(np.mean(theirs["nlls"])), rel=1e-3)


# ---- Scores depend on the request alone


def test_tasks__batch_size_and_executor_change_no_bit(
    found: dict[str, Any], model: pf.Model, tasks: TaskManager
) -> None:
    """EleutherAI/lm-evaluation-harness#704 (G7)."""
    for batch_size in (1, 4, "7"):
        assert outcome(run(PyferrumLM(model, batch_size=batch_size), tasks)) == outcome(found)
    with ThreadPoolExecutor(2) as executor:
        assert outcome(run(PyferrumLM(model, executor=executor), tasks)) == outcome(found)


def test_requests__order_and_company_change_no_bit(small: pf.Model) -> None:
    lm = PyferrumLM(small)
    long = " ".join(["Low water at noon."] * 4)
    pairs = [(long, " a"), (long, " bc d"), (TEXT, " a"), (long[:-9] + "six.", " a"), ("", "a"), (long, " a")]
    together = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for pair, expected in zip(pairs, together, strict=True):
        assert lm.loglikelihood(requests("loglikelihood", pair), disable_tqdm=True) == [expected]
        head, tail = tiny.ids(pair[0], bos=True), tiny.ids(pair[1])
        assert expected[0] == logprobs(small, head, tail)
    backwards = lm.loglikelihood(requests("loglikelihood", *pairs[::-1]), disable_tqdm=True)
    assert backwards == together[::-1]
    texts = [TEXT, long, TEXT[:9]]
    for method, arguments in (
        ("loglikelihood_rolling", [(text,) for text in texts]),
        (
            "generate_until",
            [(text, {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 2.0}) for text in texts],
        ),
    ):
        for size in (1, 4, 7, "auto"):
            results = [
                getattr(PyferrumLM(small, batch_size=s), method)(requests(method, *arguments), disable_tqdm=True)
                for s in (1, size)
            ]
            assert results[0] == results[1]


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens go through the model in each call."""
    counts: list[int] = []
    forward = pf.Model.forward

    def counted(self: pf.Model, state: Any, tokens: Any, **options: Any) -> Any:
        counts.append(len(tokens) if isinstance(state, pf.ModelState) else sum(map(len, tokens)))
        return forward(self, state, tokens, **options)

    monkeypatch.setattr(pf.Model, "forward", counted)
    yield counts


def test_requests__share_what_their_contexts_have_in_common(small: pf.Model, fed: list[int]) -> None:
    """Few-shot prompts: 300 characters in common, then questions with four answers each."""
    lm = PyferrumLM(small)
    shots = "Q: how high? A: four metres. " * 10
    pairs = [(f"{shots}Q: {name}? A:", f" {answer}") for name in ("when", "where", "who") for answer in "abcd"]
    results = lm.loglikelihood(requests("loglikelihood", *pairs[::-1]), disable_tqdm=True)[::-1]
    assert sum(fed) < 300 + 3 * 20 + 12 * 2
    for pair, (value, _) in zip(pairs, results, strict=True):
        assert value == logprobs(small, tiny.ids(pair[0], bos=True), tiny.ids(pair[1]))
    fed.clear()
    options = {"until": [], "max_gen_toks": 1}
    lm.generate_until(requests("generate_until", *((context, options) for context, _ in pairs[::4])), disable_tqdm=True)
    assert sum(fed) < 300 + 3 * 20


# ---- One BOS, the right one


def test_bos__is_there_once(small: pf.Model, tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#3333 (G1), for the setting, the text and the template."""
    quiet = pf.load(tiny.write_tiny(tmp_path, tokenizer={"add_bos_token": False}))
    for model, bos in ((small, True), (quiet, False)):
        lm = PyferrumLM(model)
        expected = logprobs(model, tiny.ids(TEXT, bos=bos), tiny.ids(" on"))
        assert lm.loglikelihood(requests("loglikelihood", (TEXT, " on")), disable_tqdm=True)[0][0] == expected
        expected = logprobs(model, tiny.ids(TEXT, bos=True), tiny.ids(" on"))
        assert lm.loglikelihood(requests("loglikelihood", ("<s>" + TEXT, " on")), disable_tqdm=True)[0][0] == expected
        chat = lm.apply_chat_template([{"role": "user", "content": "Hello"}])
        assert chat.startswith("<s>") and lm.tok_encode(chat).count(tiny.BOS) == 1
        # Rolling and an empty context are always behind BOS.
        rolling = lm.loglikelihood_rolling(
            requests("loglikelihood_rolling", (TEXT,), ("<s>" + TEXT,), ("",)), disable_tqdm=True
        )
        assert rolling == [logprobs(model, [tiny.BOS], tiny.ids(TEXT))] * 2 + [0.0]
        empty = lm.loglikelihood(requests("loglikelihood", ("", TEXT), (" ", TEXT)), disable_tqdm=True)
        assert empty[0][0] == rolling[0]
        assert empty[1][0] == logprobs(model, [tiny.BOS], tiny.ids(" " + TEXT))


def test_prefix__is_bos_and_only_without_one_eos(small: pf.Model, tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#1586, #2382 (G3)."""
    assert (PyferrumLM(small).prefix_token_id, PyferrumLM(small).eot_token_id) == (tiny.BOS, tiny.EOS)
    without = PyferrumLM(pf.load(tiny.write_tiny(tmp_path, tokenizer={"bos_token": None})))
    assert without.prefix_token_id == tiny.EOS


def test_rolling__windows_are_the_harnesss_and_every_token_counts_once(tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness:lm_eval/api/model.py (G5): perplexity 97 for any window."""
    weights = tiny.tensors()
    weights["lm_head.weight"][:] = 0
    uniform = pf.load(tiny.write_tiny(tmp_path, weights=weights))
    for length in (1, 3, 4, 9, 10, 2048):
        (total,) = PyferrumLM(uniform, max_length=length).loglikelihood_rolling(
            requests("loglikelihood_rolling", ("0123456789",)), disable_tqdm=True
        )
        assert total == pytest.approx(-10 * math.log(97), rel=1e-7)


def test_rolling__is_the_method_of_that_name(small: pf.Model) -> None:
    for length in (4, 16, 2048):
        (total,) = PyferrumLM(small, max_length=length).loglikelihood_rolling(
            requests("loglikelihood_rolling", (TEXT,)), disable_tqdm=True
        )
        nlls = pf.evaluate.evaluate(small, TEXT, method="rolling", window=length).token_nlls
        assert total == pytest.approx(-float(nlls.sum(dtype=np.float64)), rel=1e-12)


def test_loglikelihood__a_long_context_loses_its_beginning(small: pf.Model) -> None:
    lm = PyferrumLM(small, max_length=20)
    (result,) = lm.loglikelihood(requests("loglikelihood", (TEXT, " on")), disable_tqdm=True)
    assert result[0] == logprobs(small, tiny.ids(TEXT)[-18:], tiny.ids(" on"))
    with pytest.raises(pf.InvalidArgument, match="continuation: expected at most 20 tokens, max_length, got 21"):
        lm.loglikelihood(requests("loglikelihood", (TEXT, "x" * 21)), disable_tqdm=True)


# ---- Generation


def test_generation__is_greedy_and_ends_at_stop_sequences(small: pf.Model) -> None:
    lm = PyferrumLM(small)
    whole = "".join(step.text for step in pf.generate(small, TEXT, max_tokens=24, ignore_eos=True))
    assert "</s>" not in whole and len(whole) == 24
    for until in ([], [whole[5:8]], [whole[9], whole[5:8]], "never"):
        (text,) = lm.generate_until(
            requests("generate_until", (TEXT, {"until": until, "max_gen_toks": 24})), disable_tqdm=True
        )
        stops = [until] if isinstance(until, str) else until
        assert text == whole[: min([whole.find(stop) for stop in stops if stop in whole], default=24)]


def test_generation__stops_at_special_tokens(tmp_path: Path) -> None:
    """As the harness's Hugging Face backend does, though they are not in the text."""
    weights = tiny.tensors()
    weights["lm_head.weight"][tiny.BOS] *= 3
    model = pf.load(tiny.write_tiny(tmp_path, weights=weights))
    tokens = [step.token for step in pf.generate(model, TEXT, max_tokens=24, ignore_eos=True)]
    first = tokens.index(tiny.BOS)
    assert first > 0 and tiny.EOS not in tokens
    whole = "".join(model.tokenizer.decode([token], skip_special=True) for token in tokens)
    for until, expected in (([], whole), (["<s>"], whole[:first]), ([whole[first - 1] + "<s>"], whole[:first])):
        (text,) = PyferrumLM(model).generate_until(
            requests("generate_until", (TEXT, {"until": until, "max_gen_toks": 24})), disable_tqdm=True
        )
        assert text == expected


def test_generation__samples_by_the_request_itself(small: pf.Model) -> None:
    options = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "top_k": 20}
    twice = requests("generate_until", (TEXT, options), (TEXT, options))
    texts = PyferrumLM(small).generate_until(twice, disable_tqdm=True)
    assert texts[0] != texts[1]
    assert PyferrumLM(small).generate_until(twice, disable_tqdm=True) == texts
    assert PyferrumLM(small, seed=1).generate_until(twice, disable_tqdm=True) != texts
    # Other requests in front of them, behind them or in place of them change nothing; other arguments do.
    other, warmer = (TEXT[:9], options), (TEXT, {**options, "temperature": 1.6})
    mixed = requests("generate_until", other, (TEXT, options), warmer, (TEXT, options))
    found = PyferrumLM(small).generate_until(mixed, disable_tqdm=True)
    assert found[1::2] == texts and found[2] not in texts
    assert PyferrumLM(small).generate_until(mixed[2:], disable_tqdm=True) == [found[2], texts[0]]
    with pytest.raises(pf.UnsupportedError, match="generation_kwargs: num_beams is not built"):
        PyferrumLM(small).generate_until(requests("generate_until", (TEXT, {"num_beams": 4})), disable_tqdm=True)


def test_chat__continues_the_last_message_without_a_generation_prompt(small: pf.Model) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is "}]
    lm = PyferrumLM(small)
    assert lm.apply_chat_template(messages, add_generation_prompt=False).endswith("[assistant]It is")
    assert lm.apply_chat_template(messages[:1]).endswith("[assistant]")
    for text in ("s", "[assistant]", ""):  # which the template writes itself, behind the message or before it
        ending = lm.apply_chat_template([messages[0], {"role": "user", "content": text}], add_generation_prompt=False)
        assert ending == f"<s>[user]Hello</s>[user]{text}"
    assert lm.chat_template(True) == tiny.TEMPLATE


def test_tasks__take_the_chat_template(small: pf.Model, tasks: TaskManager) -> None:
    found = run(PyferrumLM(small), tasks, apply_chat_template=True, limit=2)
    context = found["samples"]["harbour_answers"][0]["arguments"][0][0]
    assert context.startswith("<s>[user]Question: ") and context.endswith("[assistant]")


# ---- Commands


def test_lm__is_in_the_harnesss_registry_and_says_what_it_is(small: pf.Model, found: dict[str, Any]) -> None:
    assert get_model("pyferrum") is PyferrumLM
    lm = PyferrumLM.create_from_arg_string(
        f"pretrained={small.path},dtype=float16", {"batch_size": "4", "device": None}
    )
    assert str(lm.model.dtype) == "float16" and lm.batch_size == 4
    assert found["config"]["model_sha256"] == FIGURES["gguf_sha256"]
    assert found["config"]["pyferrum_device"]["build"] == pf.device_info()["build"]
    for options, message in (
        ({"batch_size": 0}, "batch_size: expected a number"),
        ({"batch_size": "many"}, "batch_size: expected a number"),
        ({"max_length": 4096}, "max_length: expected 1…2048"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            PyferrumLM(small, **options)


def test_cli__runs_tasks_and_compares_them(small: pf.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["eval", "--model", str(small.path), "--tasks", "harbour_choice", "--include-path", str(TASKS)]
    for name, options in (("a", []), ("b", ["--batch-size", "3"]), ("c", ["--num-fewshot", "1", "--limit", "8"])):
        assert main([*common, *options, "--output", str(tmp_path / name)]) == 0
    printed = capsys.readouterr().out
    assert "harbour_choice" in printed and "acc_norm" in printed and "build" in printed
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    value = json.loads((tmp_path / "a").read_text())
    assert value["kind"] == "tasks" and value["model"]["sha256"] == pf.evaluate.model_sha256(small.path)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    printed = capsys.readouterr().out
    assert "num_fewshot: None | 1" in printed and "harbour_choice acc " in printed and "±" in printed
    assert main([*common[:4], "no_such_task"]) == 1
    assert "no_such_task" in capsys.readouterr().err


def test_cli__tasks_go_on_from_a_checkpoint(
    small: pf.Model, tmp_path: Path, fed: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["eval", "--model", str(small.path), "--tasks", *NAMES, "--include-path", str(TASKS), "--limit", "4"]
    assert main([*common, "--output", str(tmp_path / "whole")]) == 0
    whole = sum(fed)
    fed.clear()
    options = ["--checkpoint", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "resumed")]
    forward = pf.Model.forward

    def interrupted(self: pf.Model, *arguments: Any, **options: Any) -> Any:
        if sum(fed) > whole / 2:
            raise KeyboardInterrupt
        return forward(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pf.Model, "forward", interrupted)
        assert main([*common, *options]) == 130
    assert main([*common, *options]) == 0
    assert whole / 2 < sum(fed) < 1.4 * whole
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    fed.clear()
    assert main([*common, *options]) == 0 and not fed


def test_module__is_the_harnesss_command(small: pf.Model, tmp_path: Path) -> None:
    options = ["--model", "pyferrum", "--model_args", f"pretrained={small.path}", "--tasks", "harbour_choice"]
    command = [sys.executable, "-m", "pyferrum.lm_eval", "run", *options, "--include_path", str(TASKS), "--limit", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "|harbour_choice|" in done.stdout and "Exception" not in done.stderr


def test_exit__after_an_evaluation_is_silent(small: pf.Model) -> None:
    """A model of a script's own names outlives pyferrum's modules at exit, once the harness has held it."""
    code = (
        "import sys, time, lm_eval\n"
        "from lm_eval.tasks import TaskManager\n"
        "import pyferrum as pf\n"
        "from pyferrum.lm_eval import PyferrumLM\n"
        "model = pf.load(sys.argv[1])\n"
        "manager = TaskManager(include_path=sys.argv[2], include_defaults=False)\n"
        "found = lm_eval.simple_evaluate(model=PyferrumLM(model), tasks=['harbour_choice'], task_manager=manager)\n"
    )
    done = tiny.python(code, small.path, TASKS)
    assert done.returncode == 0 and "ignored from" not in done.stderr, done.stderr
