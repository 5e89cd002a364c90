"""Every notebook runs from beginning to end and shows what its text says; both of its forms are the same."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import jupytext

# Builds matplotlib's font cache where there is none; a kernel that had to would say so in the notebook.
import matplotlib.font_manager
import matplotlib.image
import nbformat
import pytest
from nbclient import NotebookClient

from tests import tiny

SCRIPTS = sorted((tiny.ROOT / "notebooks").glob("*.py"))

SAYS = {
    "01_first_steps": ["5 + 10 tokens: same bits", "scalar plan, 8 launches", "30 states, logits (15, 49152)"],
    "02_states_and_branches": [
        "120 pages in use = 4 x 30",
        "' the': 0 pages copied\n' a': 30 pages copied",
        "150 -> 120",
    ],
    "03_speculative": ["7 accepted, then", "the target itself"],
    "04_evaluation": ["perplexity 31.", "disjoint windows of 512 tokens", "a token  Moon.", "format=Q4_0"],
}
"""Lines that the prose around them counts on; the notebooks' own asserts hold the rest."""


def test_notebooks__are_all_here() -> None:
    assert [script.stem for script in SCRIPTS] == list(SAYS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_notebooks__two_forms_of_one_thing_without_outputs(script: Path) -> None:
    """`make notebooks` writes the .ipynb of an edited script."""
    pair = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(pair)

    def cells(notebook: Any) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert cells(pair) == cells(jupytext.read(script))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in pair.cells)
    assert pair.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_notebooks__run(script: Path, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, whatever the user has
    monkeypatch.setenv("PYFERRUM_CACHE", str(model_path.parent))
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = ""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        assert [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"] == [], "nothing complains"
        said += "".join(o.text for o in outputs if o.output_type == "stream")
        pictures = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
        assert len(pictures) == ("ax = plot." in cell.source or "plt.subplots" in cell.source), cell.source
        assert not [o for o in outputs if o.output_type == "execute_result"], "no stray representation"
        for picture in pictures:
            pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
            assert min(pixels.shape[:2]) > 150 and pixels.std() > 0.03
    for line in SAYS[script.stem]:
        assert line in said
