"""`KernelSpec`: a kernel of Jupyter that ``warpwell run`` starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, MissingFileError
from ...replacing import replacing

_RUN_WORDS = ["-m", "warpwell", "run"]
_KERNEL_WORDS = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


class KernelSpec:
    """A kernel specification of Jupyter, in its own folder; ``warpwell run`` starts the kernel.

    Parameters
    ----------
    name : str
        Name of the kernel for programs: letters, digits, ``-``, ``.`` and ``_``. Jupyter ignores the case.
    folder : Path
        Folder of kernels; see `kernels_folder`.

    Raises
    ------
    ArgumentError
        The name is not allowed.
    """

    def __init__(self, name: str, folder: Path) -> None:
        # any name that Jupyter allows, except names of special folders, such as ".."
        if not re.fullmatch(r"(?=.*[a-z0-9])[a-z0-9._-]+", name, re.ASCII | re.IGNORECASE):
            text = f"--name {name!r}: the name of a kernel consists of ASCII letters, digits, '-', '.' and '_'"
            raise ArgumentError(text, name="name")
        self.name = name.lower()
        self.path = folder / self.name
        self._file = self.path / "kernel.json"

    def write(self, options: Sequence[str], title: str) -> dict[str, Any]:
        """Write the specification, which replaces an older one of this name; return its content.

        Parameters
        ----------
        options : sequence of str
            Options of ``warpwell run``.
        title : str
            Name of the kernel for people.

        Raises
        ------
        ArgumentError
            Another program has written a kernel of this name.
        """
        if self._is_foreign():
            raise ArgumentError(f"{self.path} is a kernel of another program; pass another --name", name="name")
        content = {
            "argv": [sys.executable, *_RUN_WORDS, "--notebook", *options, *_KERNEL_WORDS],
            "display_name": title,
            "language": "python",
            "interrupt_mode": "signal",
        }
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(self._file) as part:
                part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError:
            if is_new:
                self.path.rmdir()
            raise
        return content

    def remove(self) -> None:
        """Remove the specification.

        Raises
        ------
        MissingFileError
            The specification does not exist.
        ArgumentError
            Another program has written the specification.
        """
        if not self._file.exists():
            text = f"{self.path} is not a kernel; `jupyter kernelspec list` lists the kernels"
            raise MissingFileError(text, path=self.path)
        if self._is_foreign():
            text = f"{self.path} is a kernel of another program; `jupyter kernelspec remove {self.name}` removes it"
            raise ArgumentError(text, name="name")
        if self.path.is_symlink():
            self.path.unlink()
        else:
            shutil.rmtree(self.path)

    def _is_foreign(self) -> bool:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            return bool(content["argv"][1:4] != _RUN_WORDS)
        except FileNotFoundError:
            return False
        except (ValueError, LookupError, TypeError):
            return True


def kernels_folder(prefix: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder in which Jupyter looks for kernels: below `prefix`, or by default the user's folder.

    Parameters
    ----------
    prefix : str, optional
        Prefix of an installation, such as `sys.prefix`.
    environ : mapping
        Environment variables; ``JUPYTER_DATA_DIR`` and ``XDG_DATA_HOME`` are used.
    """
    if prefix is not None:
        data = Path(prefix).absolute() / "share" / "jupyter"
    elif environ.get("JUPYTER_DATA_DIR"):
        data = Path(environ["JUPYTER_DATA_DIR"]).absolute()
    else:
        data = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share").absolute() / "jupyter"
    return data / "kernels"
