"""The build hook of hatchling: put native code into the wheel, or build a pure wheel if it cannot be compiled here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = "py3-none-linux_x86_64"
"""The wheel's tag: object files are loaded by LLVM and do not depend on the version or the ABI of Python."""


class NativeCodeHook(BuildHookInterface[Any]):
    """Runs tools/build_native.py before a standard wheel build; an editable installation compiles at first use."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the result to the wheel."""
        if self.target_name != "wheel" or version != "standard":
            return
        root = Path(self.root)
        folder = root / "build" / "native"
        shutil.rmtree(folder, ignore_errors=True)
        if (problem := self._compile(root, folder)) is not None:
            self.app.display_warning(
                f"building a wheel without compiled code, because {problem}; Warpwell compiles it at first use"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = TAG
        build_data["force_include"][str(folder)] = "warpwell/_native"

    @staticmethod
    def _compile(root: Path, folder: Path) -> str | None:
        """Compile into a folder; return the reason if that is not possible, else None."""
        system = f"{sys.platform} {platform.machine()}"
        if system != "linux x86_64":
            return f"native code is for linux x86_64, not {system}"
        environment = {
            "WARPWELL_CACHE_DIR": str(root / "build" / "native-cache"),
            **os.environ,
            "PYTHONPATH": str(root / "src"),
            "WARPWELL_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, str(root / "tools" / "build_native.py"), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        error_lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"the compilation failed ({error_lines[-1]})"
