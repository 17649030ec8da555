"""Plant one violation of each gate in a clone of the checkout, and show that ``.ci/run`` fails and names the gate.

``python -m tools.plant_violations [GATE ...]`` clones HEAD, runs ``make check`` without a violation, then plants one
violation after the other. It exits with status 1 if a gate misses its violation, or if another gate fails as well.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
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
    "lint": Violation("tools/planted.py", f"{MODULE}import os\n"),
    "formatting": Violation("tools/planted.py", f"{MODULE}numbers = [1,2]\n"),
    "types": Violation("tools/planted.py", f'{MODULE}count: int = "text"\n'),
    "spelling": Violation("tools/planted.py", '"""Rec' + 'ieve a message."""\n'),
    "gauge": Violation("tools/planted.py", f"{MODULE}told = 1\nkept = 2\nits = 3\n"),
    "c-formatting": Violation("lab/driver/planted.c", "int  planted ;\n"),
    "layout": Violation(
        "src/warpwell/errors/options.py",
        '\n\ndef _planted() -> object:\n    """Import a compiler."""\n    import numba\n\n    return numba.jit\n',
    ),
}
"""Gate (a target of the Makefile) -> its violation."""


def failed_gates(folder: Path, *command: str) -> tuple[int, list[str], str]:
    """Run a command in the clone; return its status, the gates that failed according to make, and its output."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    gates = re.findall(r"^make\[\d\]: \*\*\* \[Makefile:\d+: ([\w-]+)\]", done.stdout, re.MULTILINE)
    return done.returncode, [gate for gate in gates if gate != "check"], done.stdout


def evidence(output: str, path: str) -> str:
    """Return the first line of the output that names the planted file, or the last lines without one."""
    named = [line.strip() for line in output.splitlines() if Path(path).name in line and "git" not in line]
    return named[0] if named else output[-500:]


def main() -> int:
    """Plant the violations; return 1 if a gate does not behave as expected."""
    parser = argparse.ArgumentParser(description="Show that CI fails on a planted violation of each gate.")
    parser.add_argument("gates", nargs="*", choices=[*VIOLATIONS, []], metavar="GATE", help=", ".join(VIOLATIONS))
    gates = parser.parse_args().gates or list(VIOLATIONS)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="warpwell-plant-") as temporary:
        clone = Path(temporary) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        subprocess.run(["touch", "-d", "2000-01-01", "requirements.lock", "pyproject.toml"], cwd=clone, check=True)
        status, failed, output = failed_gates(clone, "make", "check")
        print(f"without a violation: make check ended with status {status}, failed gates: {failed}", flush=True)
        if status:
            print(output[-3000:])
            return 1
        for gate in gates:
            violation = VIOLATIONS[gate]
            path = clone / violation.path
            original = path.read_text() if path.exists() else None
            path.write_text((original or "") + violation.text)
            subprocess.run(["git", "add", "--all"], cwd=clone, check=True)
            started = time.monotonic()
            status, failed, output = failed_gates(clone, ".ci/run")
            is_found = status != 0 and failed == [gate]
            wrong += not is_found
            summary = "found" if is_found else "MISSED"
            print(f"{gate}: {summary}, .ci/run ended with status {status} after {time.monotonic() - started:.0f} s,")
            print(f"    failed gates: {', '.join(failed)}; {evidence(output, violation.path)}", flush=True)
            if original is None:
                path.unlink()
            else:
                path.write_text(original)
            subprocess.run(["git", "add", "--all"], cwd=clone, check=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
