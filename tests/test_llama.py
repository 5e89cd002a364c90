"""The demo checkpoint against an independent float32 run of the same dequantised weights (Hugging Face, torch).

tests/figures/make_smollm2.py made the figures; it is not needed here.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import reference
from pyferrum.models import llama
from tests import tiny

FIGURES = np.load(Path(__file__).parent / "figures" / "smollm2_tidewatch.npz")
TOKENS = FIGURES["tokens"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits - logits.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def reference_log_probabilities(model: pf.Model) -> np.ndarray:
    """The reference's own distribution at 380 positions: its final hidden states times the embedding, in float64."""
    embedding = model.params.embedding.dequantize().astype(np.float64)
    return log_softmax(FIGURES["kl_hidden"].astype(np.float64) @ embedding.T)


@pytest.fixture(scope="module")
def logits(model: pf.Model) -> np.ndarray:
    _, scores = model.forward(model.init_state(), TOKENS)
    return np.asarray(scores)


def test_figures__belong_to_this_file_and_text(model: pf.Model, model_path: Path) -> None:
    text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_bytes()
    assert hashlib.sha256(text).hexdigest() == str(FIGURES["text_sha256"])
    assert hashlib.sha256(model_path.read_bytes()).hexdigest() == str(FIGURES["gguf_sha256"])
    assert model.tokenizer.encode(text.decode(), add_bos=False)[: len(TOKENS)] == TOKENS.tolist()


@pytest.mark.parametrize(("dtype", "divergence"), [("float32", 1e-5), ("float16", 3e-5)])
def test_model__agrees_with_the_independent_run(
    model_path: Path, reference_log_probabilities: np.ndarray, dtype: str, divergence: float
) -> None:
    model = pf.load(model_path, dtype=dtype)
    _, scores = model.forward(model.init_state(), TOKENS)
    logits = np.asarray(scores)
    ours, theirs = log_softmax(logits[FIGURES["kl_positions"]].astype(np.float64)), reference_log_probabilities
    assert (np.exp(theirs) * (theirs - ours)).sum(axis=1).mean() <= divergence
    assert (logits.argmax(axis=1) == FIGURES["argmax"]).mean() >= (0.997 if dtype == "float32" else 0.996)
    nlls = pf.evaluate.token_nlls(model, TOKENS, window=len(TOKENS), bos=None)
    assert np.abs(nlls - FIGURES["nll"]).mean() <= 5e-3
    assert abs(float(np.exp(nlls.mean(dtype=np.float64))) / float(FIGURES["perplexity"]) - 1) <= 1e-3


def test_model__chunks_and_companions_change_no_bit(model: pf.Model, logits: np.ndarray) -> None:
    tokens = TOKENS[:150]
    for chunk in (1, 7, 64, 150):
        _, scores = model.forward(model.init_state(), tokens, chunk=chunk)
        np.testing.assert_array_equal(scores, logits[:150])
    a, b = model.forward([model.init_state()] * 3, [tokens, tokens[:20], TOKENS[40:90]])
    np.testing.assert_array_equal(b[0], logits[:150])
    np.testing.assert_array_equal(b[1], logits[:20])
    assert [state.length for state in a] == [150, 20, 50]
    state = model.init_state()
    for i in range(0, 60):
        state, last = model.forward(state, TOKENS[i : i + 1])
        np.testing.assert_array_equal(np.asarray(last)[0], logits[i])


def test_model__last_only_is_the_last_row(model: pf.Model, logits: np.ndarray) -> None:
    for chunk in (512, 9):
        _, last = model.forward(model.init_state(), TOKENS[:40], last_only=True, chunk=chunk)
        assert last.shape == (1, model.config.vocabulary)
        np.testing.assert_array_equal(np.asarray(last)[0], logits[39])


@pytest.mark.parametrize("chunk", [512, 7])
def test_model__last_only_of_sequences_that_end_at_different_times(
    model: pf.Model, logits: np.ndarray, chunk: int
) -> None:
    lengths = [30, 9, 21]
    states, last = model.forward([model.init_state()] * 3, [TOKENS[:n] for n in lengths], last_only=True, chunk=chunk)
    assert [state.length for state in states] == lengths
    for n, row in zip(lengths, last, strict=True):
        np.testing.assert_array_equal(row, logits[n - 1 : n])
    _, after = model.forward(states, [TOKENS[n : n + 1] for n in lengths])  # the other rows' keys and values are there
    for n, row in zip(lengths, after, strict=True):
        np.testing.assert_array_equal(row, logits[n : n + 1])


def test_model__a_tap_of_the_last_layer_has_every_row(model: pf.Model, logits: np.ndarray) -> None:
    tapped: list[dict[int, Any]] = [{29: None}, {29: None}]
    for taps, last_only in zip(tapped, (False, True), strict=True):
        _, scores = model.forward([model.init_state()] * 2, [TOKENS[:9], TOKENS[:4]], last_only=last_only, taps=taps)
        np.testing.assert_array_equal(np.asarray(scores[0])[-1], logits[8])
    for n, all_rows, last_rows in zip((9, 4), tapped[0][29], tapped[1][29], strict=True):
        assert all_rows.shape == (n, model.config.hidden_size)
        np.testing.assert_array_equal(all_rows, last_rows)


def test_model__a_fork_continues_as_a_fresh_prefill_does(model: pf.Model, logits: np.ndarray) -> None:
    shared, _ = model.forward(model.init_state(), TOKENS[:100])
    for _ in range(2):
        _, scores = model.forward(shared, TOKENS[100:120])
        np.testing.assert_array_equal(scores, logits[100:120])
    _, scores = model.forward(shared.truncate(30), TOKENS[30:50])
    np.testing.assert_array_equal(scores, logits[30:50])


def test_model__decode_copies_no_page_and_a_fork_one_a_layer_at_most(model: pf.Model) -> None:
    state, _ = model.forward(model.init_state(), TOKENS[:130], last_only=True)
    before = pf.arena_stats()
    fork = state
    for token in TOKENS[130:150]:
        fork, _ = model.forward(fork, [token], last_only=True)
    assert pf.arena_stats()["copied_pages"] == before["copied_pages"]
    model.forward(state, TOKENS[130:131], last_only=True)
    assert pf.arena_stats()["copied_pages"] == before["copied_pages"] + model.config.layers


def test_model__refuses_bad_tokens_and_changes_nothing(model: pf.Model) -> None:
    state = model.init_state()
    before = pf.arena_stats()
    for tokens, message in (
        ([], "at least one integer"),
        ([49152], "expected 0…49151"),
        ([-1], "expected 0…49151"),
        ([1.5], "at least one integer"),
        ([[1, 2]], "at least one integer"),
        (np.zeros(8193, np.int32), "expected at most 8192, what the model's context of 8192 leaves behind 0, got 8193"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            model.forward(state, tokens, chunk=16384)
    with pytest.raises(pf.InvalidArgument, match="one list per state"):
        model.forward([state], [[1], [2]])
    assert pf.arena_stats()["used_pages"] == before["used_pages"]


def test_model__refuses_states_that_are_not_its_own(model: pf.Model, tmp_path: Path) -> None:
    """Whatever was run before: a step like an earlier one takes a shorter way."""
    state, _ = model.forward(model.init_state(), [7])
    grown, _ = model.forward(state, [7])
    other = pf.AttentionConfig(64, 4, 2, 16)
    layers = model.init_state().layers
    elsewhere = pf.Device(threads=1)
    strangers: tuple[tuple[Any, str], ...] = (
        (pf.ModelState(layers[:29]), "state: expected the 30 layers of this model, got 29"),
        (pf.ModelState([*layers, layers[0]]), "state: expected the 30 layers of this model, got 31"),
        (pf.ModelState(grown.layers[:29]), "state: expected the 30 layers of this model, got 29"),
        (pf.ModelState([pf.init_state(other)] * 30), "state: is of another model"),
        (pf.load(tiny.write_tiny(tmp_path)).init_state(), "state: expected the 30 layers of this model, got 2"),
        (pf.ModelState([pf.init_state(model.config.attention, device=elsewhere)] * 30), "state: is of another device"),
        (layers[0], "state: expected a ModelState or a list of them, got KVState"),
        (None, "state: expected a ModelState or a list of them, got NoneType"),
    )
    for stranger, message in strangers:
        with pytest.raises(pf.InvalidArgument, match=message):
            model.forward(stranger, [7])
    with pytest.raises(pf.InvalidArgument, match=r"state\[1\]: expected the 30 layers of this model, got 29"):
        model.forward([state, strangers[0][0]], [[7], [7]])
    with pytest.raises(pf.InvalidArgument, match=r"state\[0\]: expected a ModelState, as .* got KVState"):
        model.forward([layers[0]], [[7]])  # type: ignore[list-item]
    for wrong, message in (
        ([], "layers: expected a KVState for each layer"),
        ([1, 2], "layers: expected a KVState for each layer"),
        ([*layers[:29], grown.layers[0]], "layers: expected one length for all of them, got 0 and 2"),
        ([layers[0], pf.init_state(other)], "layers: expected one config"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            pf.ModelState(wrong)  # type: ignore[arg-type]
    new, _ = model.forward(pf.ModelState(grown.layers), [7])
    assert new.length == 3


def test_state__of_a_file_goes_on_bit_for_bit(model: pf.Model, tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    for tokens in ([], TOKENS[:100]):
        state = model.forward(model.init_state(), tokens, last_only=True)[0] if len(tokens) else model.init_state()
        state.save(path)
        loaded = pf.load_model_state(path)
        assert loaded.length == state.length == len(tokens)
        (_, after), (_, expected) = model.forward(loaded, TOKENS[100:103]), model.forward(state, TOKENS[100:103])
        assert np.asarray(after).tobytes() == np.asarray(expected).tobytes()
    state.layers[0].save(path)
    with pytest.raises(pf.CheckpointError, match=r"expected a state saved by ModelState.save"):
        pf.load_model_state(path)
    state.save(path)
    with pytest.raises(pf.CheckpointError, match=r"expected a state saved by KVState.save"):
        pf.load_state(path)


def test_close__leaves_pages_to_calls_under_way(model: pf.Model) -> None:
    """Another thread may be in a call with the states: they go when that ends, and nothing else can begin."""
    before = pf.arena_stats()["used_pages"]
    state, _ = model.forward(model.init_state(), TOKENS[:5])
    native = state._native_states()
    state.close()
    state.close()
    assert pf.arena_stats()["used_pages"] == before + model.config.layers
    for use in (lambda: model.forward(state, [5]), lambda: state.truncate(2), lambda: state.layers[3].keys()):
        with pytest.raises(pf.StateError, match="closed"):
            use()
    del native
    assert pf.arena_stats()["used_pages"] == before


def test_model__taps_are_a_dict_of_layers(model: pf.Model) -> None:
    for taps, message in (([1, 2], "taps: expected a dict"), ({"1": None}, "taps: expected layers 0…29, got '1'")):
        with pytest.raises(pf.InvalidArgument, match=message):
            model.forward(model.init_state(), [1], taps=taps)  # type: ignore[call-overload]


def test_model__decodes_any_list_of_tokens_alike(model: pf.Model, tmp_path: Path) -> None:
    """A sequence that goes on takes a shorter way: same bits, same errors, whatever the tokens come in."""
    state, _ = model.forward(model.init_state(), TOKENS[:40])
    for _ in range(2):
        state, _ = model.forward(state, [7])
    before, copies = pf.arena_stats(), []
    for tokens in ([5], (5,), np.array([5]), [np.int64(5)], [np.int32(5)]):
        new, scores = model.forward(state, tokens)
        copies.append((np.asarray(scores).tobytes(), [np.asarray(layer.keys()).tobytes() for layer in new.layers]))
        assert (new.length, new.layers[-1].length) == (43, 43)
        new.close()
    assert copies.count(copies[0]) == 5
    for tokens, message in (
        *(([t], "expected 0…49151") for t in (49152, -1, 1 << 31, 1 << 40)),
        *(([t], "at least one integer") for t in (True, 1.5, np.float32(5), "5", None, 1 << 70, [5])),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            model.forward(state, tokens)
    used = pf.arena_stats()["used_pages"]
    assert used == before["used_pages"]
    two, whole = model.forward(state, [5, 6], chunk=1), model.forward(state, [5, 6])
    assert np.asarray(two[1]).tobytes() == np.asarray(whole[1]).tobytes()
    small = pf.load(tiny.write_tiny(tmp_path))
    for _ in range(2):
        other, _ = small.forward(small.init_state(), [1, 2])
        other, _ = small.forward(other, [1])
        with pytest.raises(pf.InvalidArgument, match="state"):
            model.forward(other, [5])
    state.close()
    with pytest.raises(pf.StateError, match="closed"):
        model.forward(state, [5])


def test_reference__runs_the_same_forward_pass(model: pf.Model, logits: np.ndarray) -> None:
    """The model's own code over `pyferrum.reference`: two layers of the real weights, in float64."""
    config: Any = model.config
    short = llama.LlamaParams(model.params.embedding, model.params.layers[:2], model.params.norm, None)
    states = [[module.init_state(config.attention) for _ in range(2)] for module in (pf, reference)]
    _, ours = llama.forward(short, config, states[:1], np.array(TOKENS[:12], np.int32), [12])
    _, expected = llama.forward(short, config, states[1:], np.array(TOKENS[:12], np.int32), [12], ops=reference)
    np.testing.assert_allclose(ours, expected, atol=4e-3 * np.abs(expected).max())


def test_load__names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(pf.CheckpointError, match="no such file"):
        pf.load(tmp_path / "missing.gguf")
    with pytest.raises(pf.InvalidArgument, match="dtype: expected float16 or float32"):
        pf.load(tmp_path, dtype="float64")


def test_tokenizer__is_made_when_asked_for_and_its_settings_are_checked_before(tmp_path: Path) -> None:
    folder = tiny.write_tiny(tmp_path / "folder")
    model = pf.load(folder)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: model.tokenizer, range(8)))
    assert all(one is model.tokenizer for one in made)
    (folder / "tokenizer.json").write_text("{}")
    model = pf.load(folder)
    state, _ = model.forward(model.init_state(), [1, 2, 3])
    for _ in range(2):
        with pytest.raises(pf.CheckpointError, match=r"tokenizer\.json: the tokenizers library cannot read it"):
            next(pf.generate(model, "hello"))
    assert model.forward(state, [4])[0].length == 4
    file = tiny.write_tiny_gguf(tmp_path / "t.gguf", keys={"tokenizer.ggml.model": "t5"})
    with pytest.raises(pf.CheckpointError, match=r"tokenizer\.ggml\.model is 't5'"):
        pf.load(file)


def test_memory__weights_stay_in_the_file(model: pf.Model, model_path: Path) -> None:
    memory = model.memory()
    assert memory["mapped_bytes"] > 0.97 * model_path.stat().st_size
    assert memory["expanded_bytes"] < 200_000  # the norms
