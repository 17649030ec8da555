"""Which programs keep this machine's GPUs, because a package that they import brings its own CUDA runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from warpwell.pool.launch import cuda_programs, own_runtime

PROGRAM = {
    "train.py": "import os\nfrom lib.nets import Net\n",
    "plain.py": "import os, json\nfrom lib import data\nx = 'import torch'  # \\d\n",
    "lazy.py": "def f():\n    try:\n        import torch.nn as nn\n    except ImportError:\n        pass\n",
    "gone.py": "import cupy\n",
    "broken.py": "import torch\nif\n",
    "circle.py": "import circle, lib.again\n",
    "lib/__init__.py": "",
    "lib/data.py": "import numpy\n",
    "lib/again.py": "from . import again, data\nfrom .. import circle\n",
    "lib/nets.py": "from .deep import layers\n",
    "lib/deep/__init__.py": "",
    "lib/deep/layers.py": "from ..util import u\n",
    "lib/util.py": "from torch import nn\n",
    "lib/__main__.py": "from lib.nets import Net\n",
    "app/__main__.py": "import helper\n",
    "app/helper.py": "import torch\n",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('nobody imports it')")
    (site / "wraps").mkdir()
    (site / "wraps" / "__init__.py").write_text("from .inner import x")
    (site / "wraps" / "inner.py").write_text("import torch, alone")
    (site / "alone.py").write_text("import json, wraps.inner")
    for name, text in PROGRAM.items():
        path = tmp_path / "program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path / "program")
    return tmp_path / "program"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["train.py"], ("util.py", "torch")),
        (["plain.py", "torch"], None),
        (["lazy.py"], ("lazy.py", "torch")),
        (["gone.py"], None),
        (["broken.py"], None),
        (["circle.py"], None),
        (["absent.py"], None),
        (["app"], ("helper.py", "torch")),
        (["-c", "import torch"], ("-c", "torch")),
        (["-c", "import lib.nets"], ("util.py", "torch")),
        (["-m", "lib.nets"], ("util.py", "torch")),
        (["-m", "lib"], ("util.py", "torch")),
        (["-m", "torch.distributed.run", "x.py"], ("-m torch.distributed.run", "torch")),
        (["-m", "wraps"], ("inner.py", "torch")),
        (["-m", "alone"], None),
        (["-m", "nothing.here"], None),
    ],
)
def test_what_a_program_imports_is_read_from_its_own_files(
    program: Path, command: list[str], found: tuple[str, str] | None
) -> None:
    assert own_runtime.own_runtime(command) == found
    assert "torch" not in sys.modules


def test_such_a_program_keeps_the_gpus_of_this_machine_and_is_told(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Asked(Exception):
        pass

    def parts() -> None:
        raise Asked

    monkeypatch.setattr(cuda_programs, "has_driver", lambda _: True)
    monkeypatch.setattr(cuda_programs.build, "parts", parts)
    assert cuda_programs.prepare("auto", program, {}, command=["train.py"]) is None
    assert "util.py imports torch" in capsys.readouterr().err
    for choice, command in (("pool", ["train.py"]), ("auto", ["plain.py"])):
        with pytest.raises(Asked):
            cuda_programs.prepare(choice, program, {}, command=command)
    assert cuda_programs.prepare("local", program, {}, command=["train.py"]) is None
    assert not capsys.readouterr().err
