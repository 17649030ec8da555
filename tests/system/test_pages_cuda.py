"""Blocks of pages that say that they need a GPU run on one."""

import runpy
from pathlib import Path

import pytest
from tests.harness.pages import GPU, blocks, name, pages_with, program


@pytest.mark.parametrize("page", pages_with(GPU), ids=name)
def test_examples_that_need_a_gpu_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.py").write_text(program(block for block in blocks(page, "python") if block.needs in (None, GPU)))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py", run_name="page")
