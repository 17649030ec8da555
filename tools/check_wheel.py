"""Build the wheel and the sdist in ``dist/``, and check the wheel in a fresh environment (``make dist``).

The checks: the wheel that is built from the sdist has the same files, the wheel has only the package, no file
is larger than 300 kB, every native function has compiled code in the wheel, dependencies are met, every command prints
its help, and the first Python block of the README runs in at most 5 s of CPU from an empty compilation cache. The
environment is outside of the checkout. It borrows the dependencies from the environment that runs this script, so
nothing is downloaded. Compiled code is cached in ``build/native-cache``.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 300_000
"""Size limit of a file in the wheel, in bytes."""
MAX_SECONDS = 5.0
"""Limit of the CPU seconds of the README kernel with an empty compilation cache."""
ABSENT = ("lab", "tests", "tools", "benchmarks")
"""Packages of the repository that the wheel must not contain."""

HELP = """
import sys
sys.path.insert(0, sys.argv[1])
from parsers import commands, parser
from warpwell.cli import main
names = {tuple(each.prog.split()[1:depth]) for each in commands(parser()) for depth in range(1, 5)}
for name in sorted(names):
    try:
        status = main([*name, "--help"])
    except SystemExit as end:
        status = end.code
    if status:
        sys.exit(f"warpwell {' '.join(name)} --help ended with status {status}")
print(f"{len(names)} commands and groups", file=sys.stderr)
"""
"""Program that prints the help of every command; its argument is the folder of docs/site/parsers.py."""


class CheckError(Exception):
    """The wheel does not pass a check."""


def run(*command: str | Path, folder: Path, quiet: bool = False) -> str:
    """Run a command in a folder and return its output.

    Parameters
    ----------
    command : str or Path
    folder : Path
        Working directory.
    quiet : bool
        Whether to omit the command's standard error from the log.

    Raises
    ------
    CheckError
        If the command fails; the message holds the end of its output.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment.setdefault("WARPWELL_CACHE_DIR", str(ROOT / "build" / "native-cache"))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        name = " ".join(map(str, command))[:200]
        raise CheckError(f"{name} ended with status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    if not quiet and done.stderr:
        print(done.stderr.rstrip(), flush=True)
    return done.stdout


def build(source: Path, target: Path, *kinds: str) -> list[Path]:
    """Build distributions of a source tree with hatchling and return their paths in order of `kinds`."""
    options = [option for kind in kinds for option in ("-t", kind)]
    run(sys.executable, "-m", "hatchling", "build", *options, "-d", target, folder=source, quiet=True)
    patterns = {"wheel": "*.whl", "sdist": "*.tar.gz"}
    return [next(target.glob(patterns[kind])) for kind in kinds]


def check_contents(wheel: Path) -> list[str]:
    """Return the names of the files in a wheel.

    Raises
    ------
    CheckError
        If a file is too large or does not belong to the package.
    """
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
    tops = {info.filename.split("/")[0] for info in infos}
    foreign = sorted(top for top in tops if top != "warpwell" and not re.fullmatch(r"warpwell-[^/]+\.dist-info", top))
    if foreign:
        raise CheckError(f"the wheel has {', '.join(foreign)}; remove everything except the package warpwell")
    large = [f"{info.filename} ({info.file_size} bytes)" for info in infos if info.file_size > MAX_BYTES]
    if large:
        raise CheckError(f"files of the wheel must have at most {MAX_BYTES} bytes, got {', '.join(large)}")
    return sorted(info.filename for info in infos)


def check_sdist(sdist: Path, names: Sequence[str], folder: Path) -> None:
    """Raise `CheckError` if the wheel that is built from an sdist holds other files than `names`."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    (wheel,) = build(source, folder / "rebuilt", "wheel")
    if difference := sorted(set(check_contents(wheel)) ^ set(names)):
        raise CheckError(f"the wheel from the sdist and the wheel from the checkout differ in {', '.join(difference)}")


def make_environment(folder: Path, wheel: Path) -> Path:
    """Return the interpreter of a new environment with the wheel and the other packages of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=folder)
    # Python does not read the .pth files of this folder: the editable install of the checkout stays out.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def check_dependencies(python: Path, folder: Path) -> None:
    """Raise `CheckError` if pip misses a dependency of a locked package."""
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    try:
        run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "check", folder=folder)
    except CheckError as error:
        complaints = [
            line for line in str(error).splitlines()[1:] if line.split(" ")[0].lower() in {"warpwell", *locked}
        ]
        if complaints:
            raise CheckError("\n".join(complaints)) from error


def check_environment(python: Path, folder: Path) -> None:
    """Raise `CheckError` unless the package works in its new environment.

    Parameters
    ----------
    python : Path
        Interpreter of the environment.
    folder : Path
        Empty working directory.
    """
    check_dependencies(python, folder)
    origin = run(python, "-c", "import warpwell; print(warpwell.__file__)", folder=folder).strip()
    if not Path(origin).is_relative_to(python.parents[1]):
        raise CheckError(f"warpwell was imported from {origin}, expected a file below {python.parents[1]}")
    for name in ABSENT:
        try:
            run(python, "-c", f"import {name}", folder=folder)
        except CheckError:
            continue
        raise CheckError(f"the environment has a module {name}; the wheel must not bring it")
    run(python.with_name("warpwell"), "--help", folder=folder)
    run(python, "-c", HELP, ROOT / "docs" / "site", folder=folder)
    run(python, ROOT / "tools" / "build_native.py", "--check", folder=folder)
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    if block is None:
        raise CheckError("README.md must have a Python block")
    program = folder / "readme.py"
    program.write_text(block[1])
    print(f"README kernel from an empty cache: {processor_seconds(python, program):.1f} s of CPU", flush=True)


def processor_seconds(python: Path, program: Path) -> float:
    """Run a program with an empty compilation cache; return its CPU seconds.

    Raises
    ------
    CheckError
        If the program fails, or takes more than `MAX_SECONDS`.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(prefix="warpwell-cache-") as cache:
        run("env", f"WARPWELL_CACHE_DIR={cache}", python, program, folder=program.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if seconds > MAX_SECONDS:
        raise CheckError(f"the README kernel took {seconds:.1f} s of CPU, at most {MAX_SECONDS} s are allowed")
    return seconds


def main() -> int:
    """Build and check; return 1 if a check fails."""
    started = time.monotonic()
    target = ROOT / "dist"
    for stale in (*target.glob("warpwell-*.whl"), *target.glob("warpwell-*.tar.gz")):
        stale.unlink()
    with tempfile.TemporaryDirectory(prefix="warpwell-dist-") as temporary:
        folder = Path(temporary)
        for name in ("sdist", "work"):
            (folder / name).mkdir()
        try:
            wheel, sdist = build(ROOT, target, "wheel", "sdist")
            names = check_contents(wheel)
            check_sdist(sdist, names, folder / "sdist")
            python = make_environment(folder / "environment", wheel)
            check_environment(python, folder / "work")
        except CheckError as error:
            print(f"make dist: {error}", file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(folder / "sdist", ignore_errors=True)
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {len(names)} files, {size:.1f} MB, checked in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
