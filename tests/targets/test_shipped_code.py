"""Compiled code in the wheel: when it is used, when it is not, and a build without a compiler."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hatchling.bridge.app import Application
from tools.build_hook import TAG, NativeCodeHook

from warpwell.pool.transport import mpi_loop
from warpwell.targets import shipped
from warpwell.targets.compiler import machine_code
from warpwell.targets.compiler.code_cache import sources_digest, write_kept

FUNCTION = mpi_loop.word
CONTENT = b"an object file"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of compiled code of an installed wheel."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "_native")
    monkeypatch.setattr(shipped, "_nvvm_version", lambda: (13, 4))
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("x86-64-v3", "ptx/75", "ptx/80", "ptx/90"):
        (tmp_path / "_native" / name).mkdir(parents=True)
    name = machine_code.object_name(FUNCTION)
    write_kept(tmp_path / "_native" / "x86-64-v3" / f"{name}.o", CONTENT)
    for capability in shipped.CAPABILITIES:
        write_kept(tmp_path / f"_native/ptx/{capability}/{name}.ptx.z", zlib.compress(b"%d" % capability))
    return tmp_path / "_native"


def write_manifest(folder: Path, **changes: Any) -> None:
    manifest = {"sources": sources_digest(), "processor": "x86-64-v3", "features": ["cx16"], "nvvm": [13, 4]}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    shipped._manifest.cache_clear()


def object_file() -> bytes:
    return machine_code.object_file(FUNCTION, machine_code.host_processor(), lambda function, processor: b"compiled")


def ptx(capability: int) -> bytes | None:
    found = shipped.find_ptx(str(machine_code.object_name(FUNCTION)), capability)
    return None if found is None else zlib.decompress(found)


def test_code_of_these_sources_is_used(folder: Path) -> None:
    write_manifest(folder)
    assert object_file() == CONTENT
    assert [ptx(capability) for capability in (70, 75, 86, 89, 90, 120)] == [None, b"75", b"80", b"80", b"90", b"90"]


@pytest.mark.parametrize("changes", [{"sources": "0" * 64}, {"features": ["cx16", "of-the-future"]}])
def test_code_of_other_sources_or_processors_is_compiled_once(folder: Path, changes: dict[str, Any]) -> None:
    write_manifest(folder, **changes)
    assert object_file() == b"compiled"
    (cached_file,) = (folder.parent / "cache").rglob("*.o")
    assert cached_file.read_bytes().endswith(b"compiled")


def test_damaged_files_and_a_missing_manifest_are_ignored(folder: Path) -> None:
    shipped._manifest.cache_clear()
    assert object_file() == b"compiled" and ptx(90) is None
    write_manifest(folder)
    for path in folder.rglob("*mpi_loop*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert object_file() == b"compiled" and ptx(90) is None


@pytest.mark.parametrize("nvvm", [[13, 5], [14, 0], None])
def test_ptx_of_a_newer_compiler_or_none_is_not_used(folder: Path, nvvm: list[int] | None) -> None:
    write_manifest(folder, nvvm=nvvm)
    assert ptx(90) is None and object_file() == CONTENT


def run_hook(root: Path, program: str) -> dict[str, Any]:
    """Return what the build hook changes in a build whose compilation is a program."""
    (root / "tools").mkdir()
    (root / "tools" / "build_native.py").write_text(program)
    data: dict[str, Any] = {"pure_python": True, "force_include": {}}
    NativeCodeHook(str(root), {}, None, None, str(root), "wheel", Application()).initialize("standard", data)
    return data


def test_a_build_with_a_compiler_makes_a_wheel_for_linux(tmp_path: Path) -> None:
    data = run_hook(tmp_path, "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(parents=True)")
    assert data["tag"] == TAG and not data["pure_python"]
    assert data["force_include"] == {str(tmp_path / "build" / "native"): "warpwell/_native"}


def test_a_build_without_numba_makes_a_pure_wheel_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = run_hook(tmp_path, "import numba_is_absent")
    assert data == {"pure_python": True, "force_include": {}}
    (line,) = "".join(capfd.readouterr()).splitlines()
    assert "without compiled code" in line and "No module named 'numba_is_absent'" in line
