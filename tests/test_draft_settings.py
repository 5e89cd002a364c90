"""Settings of draft models' files: which are applied, and that whatever is not is an error that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyferrum as pf
from pyferrum import rope
from pyferrum.models.draft import make_draft
from tests import tiny
from tests.drafts import parsed, random_tensors, settings, write_draft, write_draft_gguf

NAN, INF = float("nan"), float("inf")
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"windows": (), "causal": ()}, "num_hidden_layers: expected at least 1, got 0"),
    ({"target_hidden_size": 128}, "target_hidden_size: expected 64, the target's, got 128"),
    ({"intermediate_size": 0}, "intermediate_size: expected at least 1, got 0"),
    ({"head_dim": 96}, "head_dim: expected 64, 128 or 256, got 96"),
    ({"head_dim": 32}, "head_dim: expected 64, 128 or 256, got 32"),
    ({"query_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads=2, got 3"),
    ({"key_value_heads": 0}, "num_attention_heads: expected a multiple of num_key_value_heads=0, got 4"),
    ({"mask_token": 97}, "mask_token_id: expected 0…96, got 97"),
    ({"block_size": 1}, "block_size: expected at least 2, got 1"),
    ({"windows": (24, 8)}, "sliding_window: expected at least 9, more than the rows of a block, got 8"),
    ({"windows": (1 << 31, None)}, "window: expected 3…"),
    ({"windows": (1 << 40, None)}, "window: expected"),
    ({"conv_group_size": 0}, "conv_group_size: expected a divisor of hidden_size=64, got 0"),
    ({"conv_group_size": 48}, "conv_group_size: expected a divisor of hidden_size=64, got 48"),
    ({"selector_rank": 0}, "selector_rank: expected at least 1, got 0"),
    ({"selector_vocabulary": 96}, "selector_vocab_size: expected 97, the target's, got 96"),
    *(({"epsilon": x}, f"rms_norm_eps: expected a positive number, got {x}") for x in (0.0, -1e-6, NAN, INF)),
    *(({"rope_theta": x}, f"rope_theta: expected a positive number, got {x}") for x in (0.0, -1.0, NAN, INF)),
    *(({"embedding_scale": x}, f"input_embedding_scale: expected a number, got {x}") for x in (NAN, -INF)),
    *(({"logit_scale": x}, f"output_multiplier: expected a number, got {x}") for x in (NAN, INF)),
    *(({"softcap": x}, f"final_logit_softcapping: expected 0 or a positive number, got {x}") for x in (NAN, -1.0)),
    ({"rope_scaling": rope.FrequencyFactors((1.0,))}, "expected 32 frequency factors"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SETTINGS, ids=[str(change) for change, _ in BAD_SETTINGS])
def test_make__settings_that_no_draft_model_has_are_named(
    target: pf.Model, change: dict[str, Any], message: str
) -> None:
    config = replace(parsed(settings(tiny.HIDDEN, second=True), target), **change)
    with pytest.raises(pf.CheckpointError, match=f"DFlash2DraftModel: .*{message}"):
        make_draft(config, None, target)  # type: ignore[arg-type]


BAD_CONFIGS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"conv_group_size": 0}, pf.CheckpointError, "conv_group_size: expected a divisor of hidden_size=64, got 0"),
    ({"is_causal": "false"}, {}, pf.CheckpointError, "is_causal: expected true or false, got 'false'"),
    ({"is_causal": None}, {"causal": 0}, pf.CheckpointError, "causal: expected true or false, got 0"),
    ({}, {"use_swa": "false"}, pf.CheckpointError, "use_swa: expected bool, got 'false'"),
    ({"layer_types": [["full_attention"]] * 2}, {}, pf.CheckpointError, "layer_types: expected 2 of"),
    ({"rope_theta": NAN}, {}, pf.CheckpointError, "rope_theta: expected a positive number, got nan"),
    ({"sample_from_anchor": True}, {}, pf.UnsupportedError, "sample_from_anchor=True is not built"),
    ({}, {"sample_from_anchor": True}, pf.UnsupportedError, "sample_from_anchor=True is not built"),
    ({"draft_vocab_size": 50}, {}, pf.UnsupportedError, "draft_vocab_size=50 is not built"),
    ({}, {"selector_vocab_size": 50}, pf.CheckpointError, "selector_vocab_size: expected 97, the target's, got 50"),
    ({"head_dim": 32}, {}, pf.CheckpointError, "head_dim: expected 64, 128 or 256, got 32"),
]


@pytest.mark.parametrize(("change", "nested", "error", "message"), BAD_CONFIGS, ids=[str(c[:2]) for c in BAD_CONFIGS])
def test_load__what_a_config_may_not_say_is_named_with_its_file(
    target: pf.Model,
    tmp_path: Path,
    change: dict[str, Any],
    nested: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    good = settings(tiny.HIDDEN, second=True)
    bad = good | change | {"dflash_config": good["dflash_config"] | nested}
    folder = write_draft(tmp_path / "bad", target, config=bad, weights=random_tensors(parsed(good, target)))
    with pytest.raises(error, match=f"/bad: .*{message}"):
        pf.load_draft(folder, target)


GGUF_KEYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rope.dimension_count": 32}, pf.UnsupportedError, "dflash.rope.dimension_count: heads rotated in part"),
    ({"sample_from_anchor": True}, pf.UnsupportedError, "dflash.sample_from_anchor is not built"),
    ({"rope.scaling.type": "longrope"}, pf.UnsupportedError, "dflash.rope.scaling.type 'longrope'"),
    ({"rope.scaling.factor": -1.0}, pf.CheckpointError, "factor: expected a positive number, got -1.0"),
    ({"attention.value_length": 32}, pf.UnsupportedError, "values of another width than keys"),
    ({"block_count": 0}, pf.CheckpointError, "block_count: expected 1…1024 layers, got 0"),
    ({"block_count": 1}, pf.CheckpointError, "block_count is 1, and the file holds tensors of 2 layers"),
    ({"conv_group_size": 0}, pf.CheckpointError, "conv_group_size: expected a divisor of hidden_size=64, got 0"),
]


@pytest.mark.parametrize(("keys", "error", "message"), GGUF_KEYS, ids=[str(keys) for keys, *_ in GGUF_KEYS])
def test_load__what_a_gguf_file_may_not_say_is_named_with_its_file(
    target: pf.Model, tmp_path: Path, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = parsed(settings(tiny.HIDDEN, second=True), target)
    path = write_draft_gguf(tmp_path / "bad.gguf", config, random_tensors(config), keys=keys)
    with pytest.raises(error, match=rf"bad\.gguf: .*{message}"):
        pf.load_draft(path, target)


def test_load__scaling_of_a_gguf_file_is_applied(target: pf.Model, tmp_path: Path) -> None:
    config = parsed(settings(tiny.HIDDEN, second=False), target)
    weights = random_tensors(config)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 512}
    for name, keys, change, expected in (
        ("linear", {"type": "linear", "factor": 4.0}, {}, rope.LinearScaling(4.0)),
        ("yarn", yarn, {}, rope.YarnScaling(4.0, 512)),
        ("factors", {}, {"rope_freqs.weight": np.full(32, 2.0)}, rope.FrequencyFactors((2.0,) * 32)),
    ):
        path = write_draft_gguf(
            tmp_path / f"{name}.gguf", config, weights | change, keys={f"rope.scaling.{k}": v for k, v in keys.items()}
        )
        assert pf.load_draft(path, target).config.rope_scaling == expected


def test_load__early_gguf_files_count_layers_from_0(target: pf.Model, tmp_path: Path) -> None:
    """FACTS D.6: they wrote the target's layers as they are, and the mask token among the keys of `dflash`."""
    config = parsed(settings(tiny.HIDDEN, second=False, target_layer_ids=[1]), target)
    weights = random_tensors(config)
    for name, options in (("late", {}), ("early", {"target_layers": [1], "mask_key": "dflash.mask_token_id"})):
        model = pf.load_draft(write_draft_gguf(tmp_path / f"{name}.gguf", config, weights, **options), target)
        assert (model.taps, model.config.mask_token) == ((1,), 3)


def test_windows__in_their_older_spelling() -> None:
    """FACTS C.7: `use_swa` and `swa_window_size`, which come before `sliding_window`."""
    base = settings(64, second=False) | {"layer_types": None}
    inner = base["dflash_config"]
    for change, expected in (
        ({"use_swa": True, "swa_window_size": 16}, (16, 16)),
        ({"use_swa": False, "swa_window_size": 16}, (None, None)),
        ({}, (None, None)),
    ):
        assert parsed(base | {"dflash_config": inner | change}).windows == expected
    swa = inner | {"use_swa": True, "swa_window_size": 16}
    mixed = base | {"layer_types": ["sliding_attention", "full_attention"], "dflash_config": swa}
    assert parsed(mixed).windows == (16, None)
    with pytest.raises(pf.CheckpointError, match="swa_window_size: missing, and 2 layers slide"):
        parsed(base | {"dflash_config": inner | {"use_swa": True}})
