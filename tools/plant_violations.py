"""Plant one violation of each gate in a clone of the checkout, and show that CI fails and names the gate.

``python -m tools.plant_violations`` clones HEAD and runs ``make check`` without a violation. Then it plants each
violation alone and runs its gate, and finally it runs ``.ci/run`` with all violations. It exits with status 1 if a gate
misses its violation.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = '"""A planted module."""\n\n'


@dataclass(frozen=True)
class Violation:
    """A change that one gate must find.

    Attributes
    ----------
    path : str
        File to create or extend.
    text : str
        Text to append.
    """

    path: str
    text: str


VIOLATIONS = {
    "lint": Violation("tools/planted_lint.py", f"{MODULE}import os\n"),
    "formatting": Violation("tools/planted_formatting.py", f"{MODULE}numbers = [1,2]\n"),
    "types": Violation("tools/planted_types.py", f'{MODULE}count: int = "text"\n'),
    "spelling": Violation("tools/planted_spelling.py", '"""Rec' + 'ieve a message."""\n'),
    "gauge": Violation("tools/planted_gauge.py", f"{MODULE}told = 1\nkept = 2\nits = 3\n"),
    "c-formatting": Violation("lab/driver/planted.c", "int  planted ;\n"),
    "layout": Violation(
        "src/warpwell/errors/__init__.py",
        '\n\ndef _planted() -> object:\n    """Import a compiler."""\n    import numba\n\n    return numba.jit\n',
    ),
}
"""Gate (a target of the Makefile) -> its violation."""


class Clone:
    """A clone of HEAD that uses the environment of the checkout.

    Parameters
    ----------
    folder : Path
        New folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        # The environment is newer than these files, so make does not build it again.
        names = ("requirements.lock", "requirements-demo.lock", "pyproject.toml")
        subprocess.run(["touch", "-d", "2000-01-01", *names], cwd=folder, check=True)

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command on all files of the clone; return its status and its output."""
        subprocess.run(["git", "add", "--all"], cwd=self.folder, check=True)
        done = subprocess.run(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout

    def plant(self, violation: Violation) -> None:
        """Append the text of a violation."""
        path = self.folder / violation.path
        path.write_text((path.read_text() if path.exists() else "") + violation.text)

    def reset(self) -> None:
        """Remove all violations."""
        subprocess.run(["git", "reset", "--quiet", "--hard"], cwd=self.folder, check=True)


def failed_gates(output: str) -> list[str]:
    """Return the gates that failed according to make."""
    gates = re.findall(r"^make(?:\[\d\])?: \*\*\* \[Makefile:\d+: ([\w-]+)\]", output, re.MULTILINE)
    return sorted(set(gates) - {"check"})


def evidence(output: str, violation: Violation) -> str:
    """Return the first line of the output that names the planted file, or an empty string."""
    name = Path(violation.path).name
    return next((line.strip() for line in output.splitlines() if name in line), "")


def main() -> int:
    """Plant the violations; return 1 if a gate misses its violation."""
    parser = argparse.ArgumentParser(description="Show that CI fails on a planted violation of each gate.")
    parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory(prefix="warpwell-plant-") as temporary:
        clone = Clone(Path(temporary) / "clone")
        status, output = clone.run("make", "check")
        print(f"make check without a violation: status {status}, failed gates: {failed_gates(output)}", flush=True)
        if status:
            missed.append("check")
        for gate, violation in VIOLATIONS.items():
            clone.plant(violation)
            status, output = clone.run("make", gate)
            line = evidence(output, violation)
            if not (status and line and failed_gates(output) == [gate]):
                missed.append(gate)
            print(f"make {gate}: status {status}: {line or output[-500:]}", flush=True)
            clone.reset()
        for violation in VIOLATIONS.values():
            clone.plant(violation)
        status, output = clone.run(".ci/run")
        gates = failed_gates(output)
        print(f".ci/run with all violations: status {status}, failed gates: {gates}")
        print("\n".join(line for line in output.splitlines() if line.startswith(("make", "=="))))
        if not status or gates != sorted(VIOLATIONS):
            missed.append(".ci/run")
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
