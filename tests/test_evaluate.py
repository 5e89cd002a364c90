"""Perplexity: what is fed, what is scored, and that a result says how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import pyferrum as pf
from pyferrum.cli import main
from pyferrum.evaluate import METHODS, compare, evaluate, model_sha256, perplexity, read_result, token_nlls
from pyferrum.evaluate.methods import Document, Window, plan
from tests import tiny

TEXT = "The gauge stands in a stone well beside the quay."


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> pf.Model:
    return pf.load(tiny.write_tiny(tmp_path_factory.mktemp("tiny")))


def by_hand(model: pf.Model, fed: list[int], scored: list[int]) -> np.ndarray:
    _, logits = model.forward(model.init_state(), fed)
    return np.asarray(pf.cross_entropy(logits, scored))


def cut(model: pf.Model, method: str, length: int, window: int, stride: int | None, bos: int | None) -> list[Window]:
    document = Document(tuple(range(100, 100 + length)), None, None)
    return list(plan(model, method, window, stride, bos).windows([document]))


def test_token_nlls__windows_score_every_token_once(model: pf.Model) -> None:
    tokens = model.tokenizer.encode("Tides rise and fall twice a day, and the keeper writes them down.")
    n = len(tokens)
    one = token_nlls(model, tokens, window=512, bos=None)
    np.testing.assert_array_equal(one, by_hand(model, tokens[:-1], tokens[1:]))
    parts = [by_hand(model, tokens[i : min(i + 5, n - 1)], tokens[i + 1 : i + 6]) for i in range(0, n - 1, 5)]
    np.testing.assert_array_equal(token_nlls(model, tokens, window=5, bos=None), np.concatenate(parts))
    with_bos = token_nlls(model, tokens, window=512, bos=1)
    np.testing.assert_array_equal(with_bos, by_hand(model, [1, *tokens[:-1]], tokens))


def test_token_nlls__window_sizes_around_the_length(model: pf.Model) -> None:
    for window in (1, 2, 8, 9, 10, 11):
        assert token_nlls(model, list(range(100, 110)), window, bos=None).shape == (9,)


def test_token_nlls__auto_bos_is_the_tokenizers_setting(model: pf.Model) -> None:
    assert not model.tokenizer.add_bos
    np.testing.assert_array_equal(token_nlls(model, [5, 6, 7]), token_nlls(model, [5, 6, 7], bos=None))


def test_token_nlls__refuses_what_cannot_be_scored(model: pf.Model) -> None:
    with pytest.raises(pf.InvalidArgument, match="at least 2 to score, got 1"):
        token_nlls(model, [5], bos=None)
    with pytest.raises(pf.InvalidArgument, match="at least 1 to score, got 0"):
        token_nlls(model, [], bos=1)
    with pytest.raises(pf.InvalidArgument, match="at least 2 to score, got 1"):
        token_nlls(model, [1], bos=1)
    for window in (0, 8193):
        with pytest.raises(pf.InvalidArgument, match="window: expected 1…8192"):
            token_nlls(model, [5, 6], window)


# ---- Methods


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bos", [None, 1])
def test_methods__score_every_token_of_their_definition_once(method: str, bos: int | None, model: pf.Model) -> None:
    for length in range(24):
        for window in (1, 2, 3, 4, 7, 8, 23, 24, 25, 100):
            for stride in (None, 1, 2, 6) if method == "strided" else (None,):
                if method == "strided" and not 1 <= (stride or window // 2) < window:
                    continue
                windows = cut(model, method, length, window, stride, bos)
                places = [position for w in windows for _, position in w.places]
                if method == "half-window":  # behind the middle of every full chunk
                    whole = range(0, length + (bos is not None) - window + 1, window)
                    behind = [s + i - (bos is not None) for s in whole for i in range(window // 2 + 1, window)]
                    assert places == behind
                else:  # all but what has nothing before it
                    assert places == list(range(bos is None, length))
                for w in windows:
                    assert w.context and w.scored == tuple(100 + p for _, p in w.places)
                    assert len(w.context) + len(w.scored) <= window + (method in ("stream", "rolling"))
                    before = w.scored[0] - 1
                    assert w.context[-1] == (before if before >= 100 or bos is None else bos)


def test_rolling__is_the_harnesss(model: pf.Model) -> None:
    for length in range(1, 30):
        for window in (1, 3, 4, 10, 29, 30):
            tokens = list(range(100, 100 + length))
            theirs = map(make_disjoint_window, get_rolling_token_windows(tokens, 1, window, 1))
            ours = cut(model, "rolling", length, window, None, 1)
            assert [(list(w.context), list(w.scored)) for w in ours] == list(theirs)


def test_strided__is_hugging_faces(model: pf.Model) -> None:
    """The loop of transformers' page on perplexity of fixed-length models."""

    def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
        previous = 0
        for begin in range(0, length, stride):
            end = min(begin + window, length)
            yield begin, max(previous, 1), end  # the first token of all has nothing before it
            previous = end
            if end == length:
                break

    for length in (2, 3, 10, 29):
        for window, stride in ((2, 1), (4, 2), (10, 3), (10, 9), (40, 20)):
            ours = [
                (w.scored[0] - len(w.context) - 100, w.places)
                for w in cut(model, "strided", length, window, stride, None)
            ]
            expected = [
                (begin, tuple((0, i) for i in range(split, end)))
                for begin, split, end in windows(length, window, stride)
            ]
            assert ours == expected


def test_half_window__is_llama_cpps(model: pf.Model) -> None:
    """Chunks of the text behind BOS; BOS is written over the first token of each; positions from the middle on score
    the token after them.
    """
    for length, window in ((16, 8), (17, 8), (23, 8), (24, 8), (21, 7)):
        for bos in (None, 1):
            tokens = [*([bos] if bos else []), *range(100, 100 + length)]
            expected = []
            for start in range(0, len(tokens) - window + 1, window):
                chunk = tokens[start : start + window]
                if bos:
                    chunk[0] = bos
                expected.append((chunk[: window // 2 + 1], chunk[window // 2 + 1 :]))
            ours = cut(model, "half-window", length, window, None, bos)
            assert [(list(w.context), list(w.scored)) for w in ours] == expected


def test_methods__treat_documents_as_they_say(small: pf.Model) -> None:
    one, two = tiny.ids("Low water at noon."), tiny.ids("High water at six.")
    for method in METHODS:
        both = evaluate(small, [one, two], method=method, window=8)
        apart = [evaluate(small, text, method=method, window=8).token_nlls for text in (one, two)]
        joined = evaluate(small, one + two, method=method, window=8).token_nlls
        expected = joined if method == "stream" else np.concatenate(apart)
        np.testing.assert_array_equal(both.token_nlls, expected)
        assert both.documents == 2


def test_evaluate__the_windows_are_what_is_scored(small: pf.Model) -> None:
    tokens = tiny.ids(TEXT)
    for method in METHODS:
        result = evaluate(small, TEXT, method=method, window=12)
        windows = plan(small, method, 12, None, "auto").windows([Document(tuple(tokens), None, None)])
        expected = []
        for w in windows:
            whole = [*w.context, *w.scored]
            expected.append(by_hand(small, whole[:-1], whole[1:])[-len(w.scored) :])
        np.testing.assert_array_equal(result.token_nlls, np.concatenate(expected))
        assert result.scored_tokens == len(result.token_nlls)


@pytest.mark.parametrize("method", METHODS)
def test_evaluate__a_uniform_model_has_its_vocabulary_as_perplexity(method: str, tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness:lm_eval/api/model.py (G5). Exactly: every NLL is the float32 next to ln 97."""
    weights = tiny.tensors()
    weights["lm_head.weight"][:] = 0
    uniform = pf.load(tiny.write_tiny(tmp_path, weights=weights))
    for window in (4, 5, 512):
        if method == "half-window" and window == 512:
            continue
        result = evaluate(uniform, "0123456789", method=method, window=window)
        assert (result.token_nlls == np.float32(np.log(97))).all()
        assert result.perplexity == pytest.approx(97, rel=3e-7)
        if method != "half-window":
            assert result.scored_tokens == result.scored_bytes == 10
            assert result.byte_perplexity == result.perplexity and result.scored_words == 1
            assert result.bits_per_byte == pytest.approx(np.log2(97), rel=1e-7)
            assert result.word_perplexity == pytest.approx(97**10, rel=3e-6)


def test_evaluate__counts_words_and_bytes_of_what_is_scored(model: pf.Model, small: pf.Model) -> None:
    text = "Märchen über Gezeiten – 潮汐 🌊, zweimal täglich.\n  Und  Schluss \n"
    result = evaluate(model, text, bos=1)
    assert result.scored_bytes == len(text.encode()) and result.scored_words == len(text.split())
    total = float(result.token_nlls.sum(dtype=np.float64))
    assert result.word_perplexity == pytest.approx(np.exp(total / len(text.split())), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(total / np.log(2) / len(text.encode()), rel=1e-12)
    part = evaluate(small, "ab cd ef gh", method="half-window", window=4, bos=None)  # scores c and f
    assert (part.scored_tokens, part.scored_bytes, part.scored_words) == (2, 2, 1)
    ids = evaluate(model, model.tokenizer.encode(text), bos=1)
    assert ids.scored_words is None and ids.bits_per_byte is None and ids.perplexity == result.perplexity


def test_ends__tokens_cover_the_text(model: pf.Model) -> None:
    text = "Ebbe 🌊🌊 und Flut, 潮汐 \n\n"
    ends = model.tokenizer.ends(text)
    assert len(ends) == len(model.tokenizer.encode(text, add_bos=False))
    assert ends == sorted(ends) and ends[-1] == len(text)
    plain = "Two tides a day."
    tokens = model.tokenizer.encode(plain, add_bos=False)
    assert [plain[:end] for end in model.tokenizer.ends(plain)] == [
        model.tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))
    ]
    assert model.tokenizer.ends("") == []


def test_evaluate__names_what_is_wrong(small: pf.Model) -> None:
    for arguments, message in (
        ({"method": "sliding"}, "method: expected one of stream, rolling, half-window, strided, got 'sliding'"),
        ({"window": 0}, "window: expected 1…2048"),
        ({"stride": 4}, "stride: expected None for the method 'stream', got 4"),
        ({"method": "strided", "window": 8, "stride": 8}, "stride: expected 1…7, below the window, got 8"),
        (
            {"method": "half-window", "window": 512},
            "texts: expected something to score by half-window .* got 49 tokens",
        ),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            evaluate(small, TEXT, **arguments)


# ---- Results


def test_result__says_how_it_was_measured(model: pf.Model, model_path: Path) -> None:
    result = evaluate(model, TEXT, method="rolling", window=4)
    assert (result.method, result.window, result.bos) == ("rolling", 4, 1)
    assert (
        result.definition
        == "each document in disjoint windows of 4 tokens, one of context, the last one filled up, BOS"
    )
    facts = result.to_dict()
    assert facts["model"]["sha256"] == hashlib.sha256(model_path.read_bytes()).hexdigest() == model_sha256(model_path)
    info = pf.device_info()
    assert facts["devices"] == [{n: info[n] for n in ("name", "instruction_set", "build")}]
    assert facts["versions"]["pyferrum"] == pf.__version__ and "numpy" in facts["versions"]
    assert facts["residual_stream"] == "float32"
    nlls = result.token_nlls.astype(np.float64)
    assert result.perplexity == pytest.approx(np.exp(nlls.mean()), rel=1e-12)
    assert result.standard_error == pytest.approx(nlls.std(ddof=1) / len(nlls) ** 0.5, rel=1e-12)


def test_perplexity__is_the_stream_method(model: pf.Model) -> None:
    result = perplexity(model, TEXT, window=4, bos=1)
    assert result.definition == "disjoint windows of 4 tokens, one token of context, BOS"
    np.testing.assert_array_equal(result.token_nlls, token_nlls(model, model.tokenizer.encode(TEXT), 4, bos=1))


def test_result__file_is_the_same_for_the_same_measurement(small: pf.Model, tmp_path: Path) -> None:
    for name in "ab":
        evaluate(small, TEXT, window=8).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    value = read_result(tmp_path / "a")
    result = evaluate(small, TEXT, window=8)
    np.testing.assert_array_equal(np.float32(value["token_nlls"]), result.token_nlls)
    assert value["perplexity"] == result.perplexity
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    for damaged in ("{}", "[]", '{"kind": []}', '{"kind": "perplexity"}', '{"kind": "tasks", "tasks": 3}'):
        (tmp_path / "c").write_text(damaged)
        with pytest.raises(pf.InvalidArgument, match="not a result"):
            read_result(tmp_path / "c")


def test_result__file_is_json_whatever_was_measured(small: pf.Model, tmp_path: Path) -> None:
    """JSON has no infinity: one long word of a random model has such a perplexity."""
    result = evaluate(small, "x" * 600)
    assert result.word_perplexity == float("inf")
    result.save(tmp_path / "a")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    value = json.loads((tmp_path / "a").read_text(), parse_constant=refuse)
    assert value["word_perplexity"] is None and value["perplexity"] == result.perplexity
    names = [difference.name for difference in compare(read_result(tmp_path / "a"), result).differences]
    assert names == ["mean_nll", "perplexity", "byte_perplexity", "bits_per_byte"]


def test_result__one_token_has_no_standard_error(small: pf.Model) -> None:
    one = evaluate(small, "a")
    assert one.scored_tokens == 1 and one.standard_error is None
    for a, b in ((one, one), (one.to_dict(), evaluate(small, TEXT).to_dict())):
        assert compare(a, b).differences[0].standard_error is None


def test_model_sha256__is_of_the_files(tmp_path: Path) -> None:
    paths = [tiny.write_tiny(tmp_path / name) for name in "ab"]
    assert model_sha256(paths[0]) == model_sha256(paths[1])
    before = model_sha256(paths[0])
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps(config | {"rope_theta": 10001.0}))
    assert model_sha256(paths[0]) != before


# ---- Comparison


def test_compare__same_tokens_are_paired(small: pf.Model, tmp_path: Path) -> None:
    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()[:1500].replace("\n", " ")
    ids = tiny.ids(text)
    other = pf.load(tiny.write_tiny(tmp_path, weights=tiny.tensors(seed=1)))
    a, b = evaluate(small, ids), evaluate(other, ids)
    result = compare(a, b)
    gaps = b.token_nlls.astype(np.float64) - a.token_nlls
    mean = result.differences[0]
    assert mean.name == "mean_nll" and mean.paired
    assert mean.difference == pytest.approx(gaps.mean(), rel=1e-9)
    assert mean.standard_error == pytest.approx(gaps.std(ddof=1) / len(gaps) ** 0.5, rel=1e-9)
    assert list(result.measured_differently) == ["model.name", "model.sha256"]
    # Without the NLLs, or of other tokens: as two independent means.
    for pair in ((a.to_dict(), b.to_dict()), (a.to_dict(nlls=True), evaluate(other, ids[:900]).to_dict(nlls=True))):
        mean = compare(*pair).differences[0]
        assert not mean.paired
        assert mean.standard_error == pytest.approx(np.hypot(pair[0]["standard_error"], pair[1]["standard_error"]))


def test_compare__refuses_nlls_that_do_not_fit(small: pf.Model) -> None:
    a = evaluate(small, TEXT, window=8).to_dict(nlls=True)
    short = a | {"token_nlls": a["token_nlls"][1:]}
    with pytest.raises(pf.InvalidArgument, match=r"b: token_nlls: expected \d+ of them, for a's tokens"):
        compare(a, short)


def test_compare__lists_every_setting_that_differs(small: pf.Model) -> None:
    a, b = evaluate(small, TEXT, window=8), evaluate(small, TEXT, method="rolling", window=9, bos=None)
    different = compare(a, b).measured_differently
    assert different["method"] == ("stream", "rolling") and different["window"] == (8, 9)
    assert different["bos"] == (tiny.BOS, None) and "scored_sha256" in different and "model.sha256" not in different
    assert compare(a, evaluate(small, TEXT, window=8)).measured_differently == {}


def test_cli__writes_results_and_compares_them(
    small: pf.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    for name, window in (("a", "8"), ("b", "9"), ("c", "8")):
        options = ["--text", str(tmp_path / "text"), "--window", window, "--output", str(tmp_path / name)]
        assert main(["eval", "--model", str(small.path), *options]) == 0
    printed = capsys.readouterr().out
    assert "stream" in printed and "build" in printed and "SHA-256" in printed
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert "measured differently:\n" in printed and "  window: 8 | 9" in printed and "(paired)" in printed
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["measured_differently"] == {} and result["differences"][0]["difference"] == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "text")]) == 1
    assert "not JSON" in capsys.readouterr().err
