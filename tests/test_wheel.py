"""The wheel: built from the sources, installed where the sources are not, it imports and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import pyferrum as pf

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = "dylib" if sys.platform == "darwin" else "so"

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import pyferrum as pf
from pyferrum import _native
here = Path(pf.__file__).parent
assert Path(sys.prefix) in here.parents, here
y = pf.linear(np.full((1, 32), 0.5, np.float16), np.ones((2, 32), np.float16), dtype=np.float32)
state, _ = pf.causal_attention(
    pf.init_state(pf.AttentionConfig(32, 1, 1, 32)),
    np.ones((3, 32), np.float32),
    pf.AttentionWeights(np.ones(32, np.float32), *[np.eye(32, dtype=np.float16)] * 4),
)
text = (here / "data/tidewatch.txt").read_text()
print(pf.__version__, y.tolist(), state.length, _native.build_fingerprint(), len(text) > 1000)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """A command's output; its complaint where it fails. No PYTHONPATH, so the source tree is out of reach."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYFERRUM_LIBRARY")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree, as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel__is_for_this_platform_and_any_python(wheel: Path) -> None:
    """abetlen/llama-cpp-python#1285, #1332, #317 (H7): the binding is ABI-mode cffi, the library this machine's."""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert wheel.name == f"pyferrum-{pf.__version__}-py3-none-{platform}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    needed = {
        f"pyferrum/_libs/libferrum.{SUFFIX}",
        "pyferrum/_cdef.py",
        "pyferrum/__init__.py",
        "pyferrum/data/tidewatch.txt",
    }
    assert needed <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    foreign = [name for name in names if not re.match(r"pyferrum/|pyferrum-[\d.]+\.dist-info/", name)]
    assert not foreign
    assert not [name for name in names if "__pycache__" in name or re.search(r"\.(o|d|cpp|h|tmp)$", name)]


def test_wheel__library_holds_no_path_of_the_source_tree(wheel: Path) -> None:
    """absadiki/pywhispercpp#59; abetlen/llama-cpp-python#1285 (H7): no build folder in any byte of the library."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(f"pyferrum/_libs/libferrum.{SUFFIX}")
        texts = {n: archive.read(n) for n in archive.namelist() if n.endswith((".py", "METADATA", "WHEEL"))}
    assert len(library) > 100_000
    for place in {str(ROOT), str(ROOT.resolve()), str(Path.home())} - {"/"}:
        found = [
            library[max(at.start() - 20, 0) : at.end() + 60] for at in re.finditer(re.escape(place.encode()), library)
        ]
        assert not found, found[:3]
        assert not [name for name, text in texts.items() if place.encode() in text]


def test_wheel__imports_and_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """btucker/apple-foundation-models-py#2; absadiki/pywhispercpp#59; abetlen/llama-cpp-python#1332 (H7).

    A new environment, another folder, nothing downloaded: the dependencies are this environment's, by a .pth file.
    """
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    # Behind the wheel's own packages on sys.path. The editable install of this tree is a .pth there, which is not read.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    printed = run(python, "-W", "error", "-c", PROGRAM, cwd=elsewhere)
    version, numbers = printed.split(" ", 1)
    assert version == pf.__version__
    assert numbers.startswith(f"[[16.0, 16.0]] 3 {pf._native.build_fingerprint()} True")
    command = python.with_name("pyferrum")
    assert '"build": "' in run(command, "info", "--json", cwd=elsewhere)
