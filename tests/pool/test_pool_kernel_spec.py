"""``warpwell pool notebook``: the file that Jupyter reads, and the reasons for not writing it."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from warpwell.cli import main
from warpwell.cli.main import build_parser
from warpwell.pool.launch.kernel_spec import kernels_folder

CPU = ("--target", "cpu")  # independent of the machine's GPUs
KERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture(autouse=True)
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jupyter's folder of kernels, for a Python that has what kernels need."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    installed(monkeypatch, ipykernel=True, mpi4py=True)
    return tmp_path / "data" / "kernels"


def installed(monkeypatch: pytest.MonkeyPatch, **modules: bool) -> None:
    before = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return before(name, package) if name not in modules else before("json") if modules[name] else None

    monkeypatch.setattr(importlib.util, "find_spec", find)


def notebook(*arguments: str) -> int:
    return main(["pool", "notebook", *arguments])


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what must fail for its input; return what it says."""
    assert notebook(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("warpwell: error: ")
    return captured.err


def spec(folder: Path) -> Any:
    assert [path.name for path in folder.iterdir()] == ["kernel.json"]
    return json.loads((folder / "kernel.json").read_text())


def test_what_is_written(jupyter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook("--agents", "4", *CPU) == 0
    assert "Warpwell (4 agents)" in capsys.readouterr().out
    expected = {
        "argv": [sys.executable, "-m", "warpwell", "run", "--notebook", "--agents", "4", *CPU, *KERNEL],
        "display_name": "Warpwell (4 agents)",
        "language": "python",
        "interrupt_mode": "signal",
    }
    assert spec(jupyter / "warpwell") == expected
    assert notebook("--agents", "1", "--json", *CPU) == 0  # replaces the previous kernel spec
    report = json.loads(capsys.readouterr().out)
    assert (report["display_name"], report["folder"]) == ("Warpwell (1 agent)", str(jupyter / "warpwell"))
    assert spec(jupyter / "warpwell")["argv"] == report["argv"]


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ((), "Warpwell (all GPUs)"),
        (("--hosts", "a:8,b:8"), "Warpwell (16 agents)"),
        (("--hosts", "a:8,b:8", "--name", "Big.one"), "Warpwell big.one (16 agents)"),
    ],
)
def test_its_name_for_people(jupyter: Path, options: tuple[str, ...], title: str) -> None:
    assert notebook(*options, *CPU) == 0
    (folder,) = jupyter.iterdir()
    assert spec(folder)["display_name"] == title


@pytest.mark.parametrize(
    "options",
    [
        {"agents": 3, "hosts": "a:2,b:2"},
        {"hostfile": "hosts.txt"},
        {"target": "cpu", "share_gpu": True},
        {"no_ft": True, "tcp": True},
        {"start_timeout": 120.0},
        {"mpiexec": "./mpiexec"},
        {"mpiexec": "mpiexec.hydra"},
    ],
    ids=lambda options: "-".join(options),
)
def test_run_gets_the_options(
    jupyter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("a slots=8\n")
    arguments = [w for key, v in options.items() for w in [f"--{key.replace('_', '-')}", *[str(v)] * (v is not True)]]
    assert notebook(*arguments, *(() if "target" in options else CPU)) == 0
    argv = spec(jupyter / "warpwell")["argv"]
    found = vars(build_parser().parse_args(argv[3:]))
    default = vars(build_parser().parse_args(["run"]))
    assert found.pop("of_module") == KERNEL[1:]
    assert found.pop("notebook")
    for key in ("hostfile", "mpiexec"):  # a kernel is started in the folder of its notebook
        if os.sep in str(options.get(key, "")) or key == "hostfile" in options:
            options = {**options, key: str(tmp_path / options[key])}
    assert found == {k: v for k, v in {**default, "target": "cpu", **options}.items() if k in found}


def test_where_it_goes(jupyter: Path, tmp_path: Path) -> None:
    home = str(Path.home())
    for environ, folder in (
        ({"JUPYTER_DATA_DIR": "/j", "XDG_DATA_HOME": "/x"}, "/j"),
        ({"JUPYTER_DATA_DIR": "", "XDG_DATA_HOME": "/x"}, "/x/jupyter"),
        ({"XDG_DATA_HOME": ""}, f"{home}/.local/share/jupyter"),
    ):
        assert str(kernels_folder(None, environ)) == f"{folder}/kernels"
    assert str(kernels_folder("/p", {"JUPYTER_DATA_DIR": "/j"})) == "/p/share/jupyter/kernels"
    assert notebook("--prefix", str(tmp_path / "p"), *CPU) == 0
    assert spec(tmp_path / "p" / "share" / "jupyter" / "kernels" / "warpwell")
    assert not jupyter.exists()
    arguments = ["pool", "notebook", "--sys-prefix"]
    assert build_parser().parse_args(arguments).prefix == sys.prefix
    assert build_parser().parse_args([*arguments[:2], "--user"]).prefix is None


def test_it_is_removed(jupyter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert notebook("--name", "one", *CPU) == notebook("--name", "two", *CPU) == 0
    installed(monkeypatch, ipykernel=False)  # removal does not need ipykernel
    assert notebook("--remove", "--name", "One") == 0
    assert [path.name for path in jupyter.iterdir()] == ["two"]
    capsys.readouterr()
    assert "jupyter kernelspec list" in failing(capsys, "--remove", "--name", "one")
    assert "is not a kernel" in failing(capsys, "--remove")


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "../a", "ä", "\N{KELVIN SIGN}", "a\n"])
def test_names_that_jupyter_does_not_allow(jupyter: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "ASCII letters" in failing(capsys, "--name", name, *CPU)
    assert "ASCII letters" in failing(capsys, "--name", name, "--remove")
    assert not jupyter.exists()


@pytest.mark.parametrize("content", ['{"argv": ["python", "-m", "ipykernel_launcher"]}', "{}", "no JSON", "[]"])
def test_a_kernel_of_somebody_else_stays(jupyter: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (jupyter / "python3").mkdir(parents=True)
    (jupyter / "python3" / "kernel.json").write_text(content)
    assert "another --name" in failing(capsys, "--name", "python3", *CPU)
    assert "jupyter kernelspec remove python3" in failing(capsys, "--name", "python3", "--remove")
    assert (jupyter / "python3" / "kernel.json").read_text() == content


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"ipykernel": False}, f"{sys.executable} -m pip install ipykernel\n"),
        ({"mpi4py": False}, f"{sys.executable} -m pip install -e '.[mpi]'\n"),
        ({"mpi4py": False, "ipykernel": False}, "need ipykernel and mpi4py"),
    ],
)
def test_what_is_not_installed(
    jupyter: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    modules: dict[str, bool],
    message: str,
) -> None:
    installed(monkeypatch, **modules)
    assert message in failing(capsys, *CPU)
    assert not jupyter.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--agents", "0"], "must be at least 1"),
        (["--hosts", "a:1", "--hostfile", "b"], "one of them"),
        (["--hosts", "a:2", "--agents", "3"], "must be at most 2 for these hosts"),
        (["--hostfile", "none.txt"], "none.txt does not exist"),
        (["--start-timeout", "-1"], "--start-timeout"),
    ],
)
def test_options_that_run_would_refuse(
    jupyter: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in failing(capsys, *options, *CPU)
    assert not jupyter.exists()


def test_more_agents_than_gpus(
    jupyter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpwell.pool.list_gpus", lambda: ["GPU-0"])
    assert "has 1 GPU: start fewer, or use --share-gpu" in failing(capsys, "--agents", "2")
    assert not jupyter.exists()


def test_a_folder_that_cannot_be_written(
    jupyter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert "No space left" in failing(capsys, *CPU)
    assert list(jupyter.iterdir()) == []
    (jupyter / "warpwell").write_text("a file")
    assert "Check the path" in failing(capsys, *CPU)
