"""Apple's metal-cpp and MLX's shaders, from mlx-metal's macOS wheel: downloaded once into build/, never installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

from tests.softmetal.runner import ROOT

VERSION = "0.32.4"
FOLDER = ROOT / "build" / f"mlx-metal-{VERSION}"


@cache
def headers() -> Path:
    """The wheel's `mlx/include`, unpacked."""
    done = FOLDER / "mlx" / "include"
    if done.exists():
        return done
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    where = ["--platform", "macosx_14_0_arm64", "--dest", str(FOLDER), f"mlx-metal=={VERSION}"]
    result = subprocess.run(download + where, capture_output=True, text=True)
    assert result.returncode == 0, f"mlx-metal cannot be downloaded: {result.stderr[-2000:]}"
    (wheel,) = FOLDER.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("mlx/include/")]
        archive.extractall(FOLDER / "unpacked", names)
    # In place in one step: another process may be looking.
    (FOLDER / "unpacked" / "mlx").rename(FOLDER / "mlx")
    return done
