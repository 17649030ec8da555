"""Every Python block of README.md and docs/ runs, in the order of its page, and checks itself."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.drives import needs_qemu
from tests.harness.pages import QEMU, SERVICE, TORCH, blocks, name, pages_with, program
from tests.harness.until import until


@pytest.mark.quick("README", "docs/tutorial/1-first-kernel")  # make docs-test runs all pages
@pytest.mark.parametrize("page", pages_with(None), ids=name)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = program(block for block in blocks(page, "python") if block.needs is None)
    (tmp_path / "page.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="page")
    assert capsys.readouterr().out or "print(" not in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("page", pages_with(TORCH), ids=name)
def test_examples_with_pytorch_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other blocks come first: they make what these read."""
    pytest.importorskip("torch")
    chosen = [block for needs in (None, TORCH) for block in blocks(page, "python") if block.needs == needs]
    (tmp_path / "page.py").write_text(program(chosen))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="page")


@pytest.mark.slow
@needs_qemu
@pytest.mark.parametrize("page", pages_with(QEMU), ids=name)
def test_examples_with_a_virtual_drive_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.py").write_text(program(block for block in blocks(page, "python") if block.needs == QEMU))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="page")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(SERVICE), ids=name)
def test_examples_that_need_a_service_run_beside_one(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.py").write_text(program(block for block in blocks(page, "python") if block.needs == SERVICE))
    monkeypatch.setenv("WARPWELL_SOCKET", str(tmp_path / "socket"))
    command = [sys.executable, "-m", "warpwell", "sched", "serve", "--log", "sched.jsonl"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as service:
        try:
            assert until((tmp_path / "socket").exists, 30)
            done = subprocess.run(
                [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
        finally:
            service.terminate()
    assert done.returncode == 0, done.stderr
