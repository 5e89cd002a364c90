"""Pictures of what the other functions give: matplotlib, `pip install 'pyferrum[plot]'`.

Every function draws into `ax`, or into a figure of its own, and returns the Axes. None of them shows or closes
anything. Colours stay apart for colour-blind readers and in print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pyferrum._check import whole_number
from pyferrum.array import Array
from pyferrum.errors import InvalidArgument
from pyferrum.models.model_state import ModelState
from pyferrum.plan import Launch, Plan
from pyferrum.reference.attention import attend, rotate
from pyferrum.reference.ops import half, linear, normalize, rms_norm, wide
from pyferrum.state import KVState
from pyferrum.weights import AttentionWeights

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, Normalize, PowerNorm
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("pyferrum.plot needs matplotlib: pip install 'pyferrum[plot]'") from error

# Okabe and Ito (2008), without black and yellow.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY, INK = "#D9D9D9", "#333333"
_ON_COLOUR = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "boxstyle": "round,pad=0.15"}
_MONO_WIDTH, _MONO_HEIGHT = 0.602, 1.75
"""Of a character of DejaVu Sans Mono and of a line of it, in font sizes."""


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    """The given Axes, or those of a new figure of this size in inches."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
        ax.set_prop_cycle(color=COLOURS)
    return ax


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of Axes in points, before a layout that may give them more."""
    extent = ax.get_window_extent()
    return extent.width * 72 / ax.figure.dpi, extent.height * 72 / ax.figure.dpi


def _bare(ax: Axes, *sides: str) -> None:
    """Only the named sides of the frame."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in sides)


# ---- Text


def nll_strip(
    pieces: Sequence[str], nlls: ArrayLike, *, columns: int = 100, vmax: float | None = None, ax: Axes | None = None
) -> Axes:
    """A text, each token on a ground as dark as it was surprising.

    Args:
        pieces: the text of each token, such as `[model.tokenizer.decode([t]) for t in tokens]`.
        nlls: negative log-likelihood of each, in nats [tokens]; NaN where there is none.
        columns: characters to a line.
        vmax: nats of the darkest ground; None for the largest there is.
        ax: where to draw; None for a new figure.
    """
    whole_number(columns, "columns", 1)
    losses = np.asarray(nlls, np.float64)
    if losses.shape != (len(pieces),) or not len(pieces):
        raise InvalidArgument(f"nlls: expected one number for each of {len(pieces)} pieces, got {list(losses.shape)}")
    cells = _lines(pieces, columns)
    lines = cells[-1][1] + 1
    size = 8.0  # points, in a figure of one's own
    ax = _axes(ax, columns * _MONO_WIDTH * size / 72 + 1.0, lines * _MONO_HEIGHT * size / 72 + 0.4)
    ax.set(xlim=(0, columns), ylim=(lines, 0), xticks=[], yticks=[])
    _bare(ax)
    width, height = _points(ax)
    size = 0.97 * min(size, width / columns / _MONO_WIDTH, height / lines / _MONO_HEIGHT)
    finite = losses[np.isfinite(losses)]
    norm = Normalize(0, (float(finite.max()) if finite.size else 1.0) if vmax is None else vmax)
    colours = ListedColormap(plt.get_cmap("Blues")(np.linspace(0, 0.9, 256)))  # its darkest hides text
    for index, line, column, text in cells:
        level = float(norm(losses[index])) if np.isfinite(losses[index]) else 0.0
        ground = colours(level) if np.isfinite(losses[index]) else GREY
        ax.add_patch(Rectangle((column, line + 0.06), len(text), 0.88, facecolor=ground, linewidth=0))
        ax.text(
            column, line + 0.5, text, size=size, family="monospace", va="center",
            color="white" if level > 0.62 else INK, parse_math=False, clip_on=True,
        )  # fmt: skip
    mapped = plt.cm.ScalarMappable(norm, colours)
    bar = ax.figure.colorbar(mapped, ax=ax, label="nats", fraction=0.03, pad=0.01, aspect=15, shrink=0.7)
    bar.outline.set_visible(False)
    return ax


def _lines(pieces: Sequence[str], columns: int) -> list[tuple[int, int, int, str]]:
    """Where each piece goes: (index, line, column, text); what does not fit on a line goes on in the next."""
    cells, line, column = [], 0, 0
    for index, piece in enumerate(pieces):
        clean = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", " ", piece).replace("\n", "↵\n")
        for part in clean.splitlines(keepends=True):
            text = part.removesuffix("\n")
            if column and column + len(text) > columns:
                line, column = line + 1, 0
            for start in range(0, len(text), columns):
                line, column = (line + 1, 0) if start else (line, column)
                cells.append((index, line, column, text[start : start + columns]))
                column += len(cells[-1][3])
            if part != text:
                line, column = line + 1, 0
    return cells or [(0, 0, 0, " ")]


# ---- Attention


def attention_weights(
    state: KVState, x: ArrayLike | Array, weights: AttentionWeights, head: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How much the last tokens of a state attend to each token, in one head.

    Keys are the state's own; queries and softmax come from `pyferrum.reference`.

    Args:
        state: the state after the call, with the keys of x in it.
        x: hidden states that went into the layer, [tokens, hidden].
        weights: the layer's weights.
        head: a query head.

    Returns:
        float64 [tokens, state.length]; rows sum to one.
    """
    config = state.config
    host = np.asarray(x)
    if host.ndim != 2 or not 1 <= len(host) <= state.length:
        raise InvalidArgument(f"x: expected 1…{state.length} rows, the state's last tokens, got {list(host.shape)}")
    if not 0 <= head < config.query_heads:
        raise InvalidArgument(f"head: expected 0…{config.query_heads - 1}, got {head}")
    raw = linear(rms_norm(host, weights.input_norm, epsilon=config.epsilon), weights.q_proj, weights.q_bias)
    q = wide(raw).reshape(len(host), config.query_heads, -1, config.head_dim)[:, :, 0]  # [:, :, 1] is the gate
    positions = state.length - len(host) + np.arange(len(host))
    norm = None if weights.q_norm is None else wide(weights.q_norm)
    q = half(rotate(normalize(q, norm, config.epsilon), positions, config), True)
    keys = wide(state.keys())[:, [head * config.key_value_heads // config.query_heads]]
    # Values that say where they came from.
    places = np.eye(state.length)[:, None, :]
    single = replace(config, query_heads=1, key_value_heads=1)
    return np.asarray(attend(q[:, [head]], keys, places, positions, single)[:, 0])


def attention_map(
    state: KVState,
    x: ArrayLike | Array,
    weights: AttentionWeights,
    head: int,
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A picture of `attention_weights`, whose arguments it takes: a row for each query.

    Args:
        state, x, weights, head: as there.
        labels: the text of each token of the state; None for positions.
        ax: where to draw; None for a new figure.
    """
    seen = attention_weights(state, x, weights, head)
    if labels is not None and len(labels) != state.length:
        raise InvalidArgument(f"labels: expected {state.length}, one per token of the state, got {len(labels)}")
    ax = _axes(ax, 6.4, 5.4)
    image = ax.imshow(seen, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
    ax.set(xlabel="key", ylabel="query", title=f"head {head}")
    first = state.length - len(seen)
    if labels is None:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value + first:g}")
    else:
        texts = [repr(label)[1:-1].replace("$", r"\$") for label in labels]
        ax.set_xticks(range(state.length), texts, rotation=90)
        ax.set_yticks(range(len(seen)), texts[first:])
        ax.tick_params(labelsize=min(9, 260 / state.length))
    label = "attention weight (square-root colours)"
    ax.figure.colorbar(image, ax=ax, label=label, ticks=[0, 0.04, 0.16, 0.36, 0.64, 1])
    return ax


# ---- States


def page_numbers(states: Sequence[KVState | ModelState], *, layer: int = 0) -> list[list[int]]:
    """Which pages of one layer each state shows (`KVState.page_ids`), numbered from 0 in order of appearance.

    Args:
        states: of one configuration and one device.
        layer: of ModelStates.
    """
    own = [state.layers[layer] if isinstance(state, ModelState) else state for state in states]
    if not own or any((state.config, state.device) != (own[0].config, own[0].device) for state in own):
        raise InvalidArgument("states: expected at least one, of one AttentionConfig and one device")
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(page, len(numbers)) for page in state.page_ids.tolist()] for state in own]


def pages(
    states: Sequence[KVState | ModelState],
    *,
    labels: Sequence[str] | None = None,
    layer: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """The pages that each state shows: colours for those that several show, grey for those of one alone.

    A page is as full as the state shows of it.

    Args:
        states: of one configuration and one device, drawn from top to bottom.
        labels: a name for each; None for numbers.
        layer: of ModelStates.
        ax: where to draw; None for a new figure.
    """
    shown = page_numbers(states, layer=layer)
    own = [state.layers[layer] if isinstance(state, ModelState) else state for state in states]
    names = [str(i) for i in range(len(own))] if labels is None else list(labels)
    if len(names) != len(own):
        raise InvalidArgument(f"labels: expected {len(own)}, one per state, got {len(names)}")
    held = np.bincount([number for row in shown for number in row], minlength=1)
    colour = {int(number): COLOURS[i % len(COLOURS)] for i, number in enumerate(np.flatnonzero(held > 1))}
    size = own[0].tokens_per_page
    columns = max(1, *(len(row) for row in shown))
    ax = _axes(ax, min(1.6 + 1.3 * max(columns, 3), 11), 1.0 + 0.42 * len(own))
    for y, (state, row) in enumerate(zip(own, shown, strict=True)):
        for i, number in enumerate(row):
            used = min(state.length - i * size, size) / size
            ground = colour.get(number, "#A6A6A6")
            ax.add_patch(Rectangle((i + 0.04, y - 0.38), 0.92, 0.76, facecolor="white", edgecolor=ground, linewidth=1))
            ax.add_patch(Rectangle((i + 0.04, y - 0.38), 0.92 * used, 0.76, facecolor=ground, linewidth=0))
            if _points(ax)[0] / columns > 22:
                ax.text(i + 0.5, y, f"p{number}", ha="center", va="center", size=8, color=INK, bbox=_ON_COLOUR)
    ax.set(xlim=(-0.05, columns + 0.05), ylim=(len(own) - 0.5, -0.5), xlabel="position of a page's first token")
    labelled = range(0, columns, -(-columns // 8))
    ax.set_xticks(labelled, [str(i * size) for i in labelled])
    ax.set_yticks(range(len(own)), [f"{name} ({state.length})" for name, state in zip(names, own, strict=True)])
    ax.set_title(f"{sum(len(row) for row in shown)} pages shown, {np.count_nonzero(held)} of them different", size=10)
    ax.tick_params(length=0)
    _bare(ax)
    return ax


# ---- Numbers


def accepted_lengths(
    histogram: Mapping[int, int], *, drafted: int | None = None, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """How many drafted tokens the target accepted, round by round.

    Args:
        histogram: rounds by tokens accepted: the last `SpeculativeResponse.histogram`.
        drafted: tokens a round proposed, for the axis; None for the most accepted.
        label: a title.
        ax: where to draw; None for a new figure.
    """
    rounds = sum(histogram.values())
    if not rounds:
        raise InvalidArgument("histogram: expected at least one round, got none")
    ax = _axes(ax, 5.2, 3.2)
    lengths = np.arange(max([*histogram, drafted or 0]) + 1)
    heights = [histogram.get(int(n), 0) for n in lengths]
    bars = ax.bar(lengths, heights, color=COLOURS[0], width=0.8)
    ax.bar_label(bars, [str(n) if n else "" for n in heights], padding=2, size=8)
    mean = sum(n * k for n, k in histogram.items()) / rounds
    ax.axvline(mean, color=COLOURS[5], linestyle="--", label=f"mean {mean:.2f}")
    ax.set(xlabel="drafts accepted in a round", ylabel="rounds", ylim=(0, 1.15 * max(heights)), xticks=lengths)
    ax.set_title(label or f"{rounds} rounds, {mean + 1:.2f} tokens a round", size=10)
    ax.legend(frameon=False)
    _bare(ax, "left", "bottom")
    return ax


def calibration(
    probabilities: ArrayLike, hits: ArrayLike, *, bins: int = 10, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """How often a model is right when it says how sure it is. Call it again with `ax` to compare.

    Each point is a bin of predictions of about one probability, with the standard error of its frequency; the legend
    has the expected calibration error (Guo et al. 2017), the mean distance from the diagonal.

    Args:
        probabilities: of the predictions, 0…1 [n]: of the most probable token, say.
        hits: whether each came true, bool [n].
        bins: of equal width.
        label: whose they are.
        ax: where to draw; None for a new figure.
    """
    p, hit = np.asarray(probabilities, np.float64), np.asarray(hits, np.float64)
    if p.ndim != 1 or p.shape != hit.shape or not p.size or not 0 <= p.min() <= p.max() <= 1:
        raise InvalidArgument(
            f"probabilities: expected n numbers 0…1 and n hits, got {list(p.shape)}, {list(hit.shape)}"
        )
    if bins < 1:
        raise InvalidArgument(f"bins: expected at least 1, got {bins}")
    ax = _axes(ax, 4.6, 4.4)
    which = np.minimum((p * bins).astype(int), bins - 1)
    sizes = np.bincount(which, minlength=bins)
    some = sizes > 0
    said = np.bincount(which, p, bins)[some] / sizes[some]
    came = np.bincount(which, hit, bins)[some] / sizes[some]
    error = float(np.sum(sizes[some] / len(p) * np.abs(said - came)))
    if not ax.has_data():
        ax.plot([0, 1], [0, 1], color=GREY, zorder=0)
        ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        ax.set(xlabel="probability given", ylabel="how often it was right")
        _bare(ax, "left", "bottom")
    text = f"{label or 'predictions'}: error {error:.3f}, n = {len(p)}"
    # Of a Laplace estimate: a bin where nothing or everything was right is not certain.
    smooth = (came * sizes[some] + 1) / (sizes[some] + 2)
    ax.errorbar(said, came, yerr=np.sqrt(smooth * (1 - smooth) / sizes[some]), fmt="o-", ms=4, capsize=2, label=text)
    ax.legend(frameon=False, loc="upper left", fontsize=8)
    return ax


# ---- Plans


def plan(plan: Plan, *, ax: Axes | None = None) -> Axes:
    """The launches of a plan from top to bottom; those side by side may run together.

    Each box has the kernel, the weight it multiplies, and its grid: threadgroups, and threads of each.
    """
    steps: list[list[Launch]] = []
    for launch in plan.launches:
        if launch.barrier or not steps:
            steps.append([])
        steps[-1].append(launch)
    ax = _axes(ax, 9.0, 0.9 + 0.62 * len(steps))
    for y, launches in enumerate(steps):
        boxes = _boxes(launches)
        for i, (kernel, detail) in enumerate(boxes):
            x, width = i / len(boxes), 1 / len(boxes)
            colour = COLOURS[2] if "attention" in kernel else COLOURS[0] if "linear" in kernel else COLOURS[1]
            ax.add_patch(Rectangle((x + 0.006, y + 0.1), width - 0.012, 0.8, facecolor=colour, alpha=0.25, linewidth=0))
            ax.add_patch(Rectangle((x + 0.006, y + 0.1), 0.006, 0.8, facecolor=colour, linewidth=0))
            size = min(8.5, 0.95 * _points(ax)[0] * width / max(len(kernel), len(detail)) / _MONO_WIDTH)
            ax.text(x + width / 2, y + 0.34, kernel, ha="center", va="center", size=size, family="monospace", color=INK)
            ax.text(x + width / 2, y + 0.68, detail, ha="center", va="center", size=size, color=INK)
    ax.set(xlim=(0, 1), ylim=(len(steps), 0), xticks=[], ylabel="step (waits for the one above)")
    ax.set_yticks(np.arange(len(steps)) + 0.5, [str(i + 1) for i in range(len(steps))])
    ax.tick_params(length=0)
    _bare(ax)
    tokens = f"{plan.total_tokens} token" + "s" * (plan.total_tokens != 1)
    ax.set_title(
        f"{plan.form} plan: {len(plan.launches)} launches, {tokens}, {plan.scratch_bytes:,} B scratch", size=10
    )
    return ax


def _boxes(launches: Sequence[Launch]) -> list[tuple[str, str]]:
    """Name and grid of each launch of a step; where they are many, those of one kernel together."""
    if len(launches) <= 3:
        return [(launch.kernel, _detail(launch)) for launch in launches]
    groups = [[one for one in launches if one.kernel == kernel] for kernel in {one.kernel: 0 for one in launches}]
    names = [group[0].kernel + f" ×{len(group)}" * (len(group) > 1) for group in groups]
    sizes = [f"{sum(int(np.prod(one.grid)) for one in group)} threadgroups" for group in groups]
    return list(zip(names, sizes, strict=True))


def _detail(launch: Launch) -> str:
    weights = [b.resource.removeprefix("weight ") for b in launch.bindings if b.resource.startswith("weight ")]
    groups, threads = ("×".join(str(n) for n in dims if n > 1) or "1" for dims in (launch.grid, launch.threads))
    return ", ".join([*weights, f"{groups} threadgroup{'s' * (groups != '1')} of {threads}"])
