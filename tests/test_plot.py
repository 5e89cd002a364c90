"""What pictures are made of: numbers against definitions, and that odd text, empty input and two Axes do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle

import pyferrum as pf
from pyferrum import plot
from tests import tiny

PAGE = 1024
"""Tokens of tiny.LAYER to a page."""


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def grown(state: pf.KVState, tokens: int, seed: int) -> pf.KVState:
    """The state with random keys and values behind it."""
    rng = np.random.default_rng(seed)
    return state.append(*rng.standard_normal((2, tokens, 1, 16)).astype(np.float16))


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_plot__without_matplotlib_names_the_extra() -> None:
    done = tiny.python("import sys; sys.modules['matplotlib'] = None\nimport pyferrum\nimport pyferrum.plot")
    assert "ImportError: pyferrum.plot needs matplotlib: pip install 'pyferrum[plot]'" in done.stderr


def test_plot__draws_where_it_is_told_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "show", lambda *_: pytest.fail("shown"))
    weights, x = tiny.layer(), tiny.rows(3)
    state, _ = pf.causal_attention(pf.init_state(tiny.LAYER), x, weights)
    draw = [
        lambda ax: plot.nll_strip(["a", "b"], [1.0, 2.0], ax=ax),
        lambda ax: plot.attention_map(state, x, weights, 0, ax=ax),
        lambda ax: plot.pages([state], ax=ax),
        lambda ax: plot.accepted_lengths({0: 1}, ax=ax),
        lambda ax: plot.calibration([0.5], [True], ax=ax),
        lambda ax: plot.plan(pf.plan_attention(tiny.LAYER, 1), ax=ax),
    ]
    figure, axes = plt.subplots(2, 3)
    for function, ax in zip(draw, axes.flat, strict=True):
        assert function(ax) is ax
        assert function(None) not in axes.flat
    figure.canvas.draw()
    assert len(plt.get_fignums()) == 1 + len(draw)


# ---- Text


def test_nll_strip__shows_every_character_once_and_wraps() -> None:
    pieces = ["The", " tide", ",\n", "$_$", "x" * 23, "", "\n", "\ufffd", "end"]
    ax = plot.nll_strip(pieces, [np.nan, 1, 2, 3, 4, 5, 0, 1, 2], columns=10)
    assert texts(ax) == ["The", " tide", ",↵", "$_$", "x" * 10, "x" * 10, "xxx", "↵", "\ufffd", "end"]
    places = [text.get_position() for text in ax.texts]
    assert places == [
        (0, 0.5),
        (3, 0.5),
        (8, 0.5),
        (0, 1.5),
        (0, 2.5),
        (0, 3.5),
        (0, 4.5),
        (3, 4.5),
        (0, 5.5),
        (1, 5.5),
    ]
    ax.figure.canvas.draw()


def test_nll_strip__darker_is_more_surprising_and_text_fits_its_cell() -> None:
    ax = plot.nll_strip(["mmmm", "MMMM", "wwww", "gggg"], [0.0, 1.0, 4.0, np.nan], columns=16)
    ground = [patch.get_facecolor() for patch in ax.patches]
    light = [sum(colour[:3]) for colour in ground]
    assert light[0] > light[1] > light[2] and ground[3] == matplotlib.colors.to_rgba(plot.GREY)
    ax.figure.canvas.draw()
    for text, patch in zip(ax.texts, ax.patches, strict=True):
        # A figure is laid out when it is drawn: the colour bar takes a little off the width that the size was for.
        assert text.get_window_extent().width <= 1.05 * patch.get_window_extent().width
        assert text.get_window_extent().height <= patch.get_window_extent().height
    with pytest.raises(pf.InvalidArgument, match="nlls: expected one number for each of 2 pieces"):
        plot.nll_strip(["a", "b"], [1.0])
    with pytest.raises(pf.InvalidArgument, match="columns: expected at least 1, got 0"):
        plot.nll_strip(["a"], [1.0], columns=0)


# ---- Attention


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("gate", [False, True])
def test_attention_weights__with_the_states_values_are_the_layers_output(window: int | None, gate: bool) -> None:
    config = pf.AttentionConfig(32, 4, 2, 16, sliding_window=window, output_gate=gate)
    weights, x = tiny.layer(config), tiny.rows(9)
    weights = weights._replace(o_proj=np.ascontiguousarray(np.asarray(weights.o_proj)[:, :64]))
    start, _ = pf.causal_attention(pf.init_state(config), x[:4], weights)
    state, y = pf.causal_attention(start, x[4:], weights)
    heads = [plot.attention_weights(state, x[4:], weights, head) for head in range(4)]
    values = np.asarray(state.values()).astype(np.float64)
    context = np.stack([seen @ values[:, head // 2] for head, seen in enumerate(heads)], axis=1)
    if gate:
        n = pf.reference.rms_norm(x[4:], weights.input_norm)
        raw = pf.reference.linear(n, weights.q_proj, weights.q_bias).reshape(5, 4, 2, 16)
        context = context / (1 + np.exp(-raw[:, :, 1]))
    projected = pf.reference.linear(context.reshape(5, 64), weights.o_proj, weights.o_bias)
    np.testing.assert_allclose(np.asarray(y), x[4:] + projected, atol=4e-3)
    for seen in heads:
        assert seen.shape == (5, 9)
        np.testing.assert_allclose(seen.sum(axis=1), 1)
        assert np.all(seen[0, 5:] == 0) and (window is None or np.all(seen[4, :6] == 0))


def test_attention_map__is_those_weights_under_the_tokens_names() -> None:
    weights, x = tiny.layer(), tiny.rows(3)
    state, _ = pf.causal_attention(pf.init_state(tiny.LAYER), x, weights)
    ax = plot.attention_map(state, x[1:], weights, 1, labels=["a", "$_$", "\n"])
    np.testing.assert_array_equal(ax.images[0].get_array(), plot.attention_weights(state, x[1:], weights, 1))
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"\$_\$", r"\n"]
    ax.figure.canvas.draw()
    for arguments, message in (
        ((state, x, weights, 2), "head: expected 0…1, got 2"),
        ((state, tiny.rows(4), weights, 0), "x: expected 1…3 rows"),
    ):
        with pytest.raises(pf.InvalidArgument, match=message):
            plot.attention_weights(*arguments)
    with pytest.raises(pf.InvalidArgument, match="labels: expected 3"):
        plot.attention_map(state, x, weights, 0, labels=["a"])


# ---- States


def test_page_numbers__count_the_arenas_pages() -> None:
    """A prompt of two and a half pages, three branches of it, an earlier point, and a stranger."""
    device = pf.Device(threads=1)
    prompt = grown(pf.init_state(tiny.LAYER, device=device), 5 * PAGE // 2, 0)
    branches = [grown(prompt, tokens, seed) for seed, tokens in ((1, 5), (2, PAGE), (3, 7))]
    stranger = grown(pf.init_state(tiny.LAYER, device=device), PAGE, 9)
    states = [*branches, prompt, prompt.truncate(PAGE), stranger, pf.init_state(tiny.LAYER, device=device)]
    shown = plot.page_numbers(states)
    assert shown == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 5], [0, 1, 2], [0], [6], []]
    assert len({number for row in shown for number in row}) == device.arena_stats()["used_pages"]
    assert [len(row) for row in shown] == [state.pages for state in states]


def test_page_numbers__equal_pages_behind_different_ones_are_not_the_same() -> None:
    start = pf.init_state(tiny.LAYER)
    left, right = (grown(grown(start, PAGE, seed), PAGE, 7) for seed in (1, 2))
    assert plot.page_numbers([left, right]) == [[0, 1], [2, 3]]
    again = grown(start, PAGE, 1)  # the same bits, computed twice
    assert plot.page_numbers([left, again]) == [[0, 1], [2]]
    elsewhere = pf.init_state(tiny.LAYER, device=pf.Device(threads=1))
    for states in ([], [start, elsewhere]):
        with pytest.raises(pf.InvalidArgument, match="states: expected at least one, of one AttentionConfig and one"):
            plot.page_numbers(states)


def test_page_numbers__take_a_layer_of_a_model(tmp_path: Path) -> None:
    model = pf.load(tiny.write_tiny(tmp_path))
    prompt, _ = model.forward(model.init_state(), [5] * 600, last_only=True)
    left, _ = model.forward(prompt, [6], last_only=True)
    right, _ = model.forward(prompt, [7], last_only=True)
    for layer in range(tiny.LAYERS):
        assert plot.page_numbers([prompt, left, right], layer=layer) == [[0, 1], [0, 1], [0, 2]]


def test_pages__are_as_full_as_they_are_and_coloured_where_shared() -> None:
    prompt = grown(pf.init_state(tiny.LAYER), 3 * PAGE // 2, 0)
    left, right = grown(prompt, 1, 1), grown(prompt, PAGE // 4, 2)
    ax = plot.pages([left, right], labels=["left", "right"])
    filled = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_linewidth() == 0]
    assert [round(patch.get_width() / 0.92, 2) for patch in filled] == [1.0, 0.5, 1.0, 0.75]
    grounds = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in filled]
    assert grounds[0] == grounds[2] == plot.COLOURS[0].lower() and grounds[1] == grounds[3] != grounds[0]
    assert texts(ax) == ["p0", "p1", "p0", "p2"] and ax.get_title() == "4 pages shown, 3 of them different"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["left (1537)", "right (1792)"]
    plot.pages([pf.init_state(tiny.LAYER)]).figure.canvas.draw()
    with pytest.raises(pf.InvalidArgument, match="labels: expected 2"):
        plot.pages([left, right], labels=["one"])


def test_pages__names_and_positions_leave_room_for_each_other() -> None:
    long = grown(pf.init_state(tiny.LAYER), 40 * PAGE, 0)
    _, ax = plt.subplots(figsize=(5, 3))
    assert not texts(plot.pages([long], ax=ax))
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == [str(page * PAGE) for page in range(0, 40, 5)]


# ---- Numbers


def test_accepted_lengths__bars_and_mean() -> None:
    ax = plot.accepted_lengths({0: 3, 2: 1}, drafted=4)
    assert [bar.get_height() for bar in ax.patches] == [3, 0, 1, 0, 0]
    assert ax.get_title() == "4 rounds, 1.50 tokens a round"
    assert ax.get_legend().get_texts()[0].get_text() == "mean 0.50"
    with pytest.raises(pf.InvalidArgument, match="histogram"):
        plot.accepted_lengths({})


def test_calibration__points_errors_and_a_second_curve() -> None:
    p = [0.05, 0.15, 0.15, 1.0, 1.0]
    ax = plot.calibration(p, [False, True, False, True, False], label="first")
    points = ax.containers[0].lines[0].get_xydata()
    np.testing.assert_allclose(points, [[0.05, 0], [0.15, 0.5], [1, 0.5]])
    # Nothing was right among one, half of two: of a Laplace estimate, as sure as so few can be.
    bars = [float(np.ptp(path.vertices[:, 1])) / 2 for path in ax.containers[0].lines[2][0].get_paths()]
    np.testing.assert_allclose(bars, [(2 / 9) ** 0.5, 0.125**0.5, 0.125**0.5])
    assert plot.calibration(p, np.zeros(5, bool), label="second", ax=ax) is ax
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    # (0.05 + 2 * 0.35 + 2 * 0.5) / 5, and the mean of p where nothing is right
    assert labels == ["first: error 0.350, n = 5", "second: error 0.470, n = 5"]
    for bad in ([1.5], [-0.1], [np.nan], [0.5, 0.5], []):
        with pytest.raises(pf.InvalidArgument, match="probabilities"):
            plot.calibration(bad, [True])
    with pytest.raises(pf.InvalidArgument, match="bins: expected at least 1, got 0"):
        plot.calibration([0.5], [True], bins=0)


# ---- Plans


def test_plan__a_box_for_each_launch_step_by_step() -> None:
    plan = pf.plan_attention(tiny.LAYER, 1, weights=tiny.layer())
    ax = plot.plan(plan)
    kernels = texts(ax)[::2]
    assert kernels == [launch.kernel for launch in plan.launches]
    steps = [int(text.get_position()[1]) for text in ax.texts[::2]]
    assert steps == (np.cumsum([launch.barrier for launch in plan.launches]) - 1).tolist()
    assert [word for word in " ".join(texts(ax)).replace(",", "").split() if word.endswith("_proj")] == [
        "q_proj", "k_proj", "v_proj", "o_proj"
    ]  # fmt: skip
    assert ax.get_title().startswith("scalar plan: 8 launches, 1 token, ")


def test_plan__text_stays_in_its_box_in_small_axes() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    plot.plan(pf.plan_attention(tiny.LAYER, 1, weights=tiny.layer()), ax=axes[0])
    figure.canvas.draw()
    boxes = [patch.get_window_extent() for patch in axes[0].patches if patch.get_alpha()]
    for text in axes[0].texts:
        extent = text.get_window_extent()
        assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 < box.y1 for box in boxes)


def test_plan__many_launches_of_a_step_are_counted() -> None:
    plan = pf.plan_attention(tiny.LAYER, [1, 2, 1, 1], starts=[0, 9, 4000, 3])
    ax = plot.plan(plan)
    shown = [(text.split(" ×")[0], int(text.split(" ×")[1]) if " ×" in text else 1) for text in texts(ax)[::2]]
    assert sum(number for _, number in shown) == len(plan.launches)
    assert ("causal_attention_prepare_f16", 4) in shown and ("causal_attention_split_f16", 1) in shown
