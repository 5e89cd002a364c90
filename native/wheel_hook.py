"""Hatchling build hook: `pip install .` builds libferrum with the Makefile and ships it inside the wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibraryBuildHook(BuildHookInterface):
    """Runs `make lib` and tags the wheel for this platform, but for any Python: the binding is ABI-mode cffi."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before files are collected."""
        subprocess.run(["make", "lib", f"PYTHON={sys.executable}"], cwd=self.root, check=True)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
