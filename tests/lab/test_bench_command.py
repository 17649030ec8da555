"""`python -m lab bench`: every benchmark, tiny; a wrong result ends it."""

import json
from pathlib import Path

import pytest

from lab.commands import main
from warpwell.study.bench import BENCHMARKS, figures, kernels
from warpwell.study.bench.setting import Setting

TINY = ("--device", "cpu", "--bytes", "512KiB", "--runs", "1", "--threads", "8", "--service-threads", "1")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, nbytes: str = "512KiB") -> dict:
    assert main(["bench", *arguments, *TINY, "--bytes", nbytes, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


SLOW = ("vectoradd", "readwrite")
"""Of these kernels alone the compilation takes half of the time of all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BENCHMARKS]
)
def test_a_benchmark_has_ceilings(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = answer(capsys, name)
    (report,) = said["benchmarks"]
    assert report["name"] == name and report["where"] == "ram" and not report["emulated"]
    for row in report["rows"]:
        assert row["rate"] > 0 and row["ceiling"] > 0 and row["ceiling_by"], row
        assert row["of_ceiling"] == pytest.approx(row["rate"] / row["ceiling"])
        assert row["bam"] is None or row["over_bam"] == pytest.approx(row["rate"] / row["bam"])
    assert name in ("block", "iodepth") or any(row["bam"] for row in report["rows"])
    spans = [row for row in report["rows"] if row["what"].endswith("spans")]
    assert bool(spans) == (name not in ("block", "iodepth", "pattern", "scan"))


# reads in all, writes in two: half of the time is their compilation
@pytest.mark.parametrize(
    ("tier", "names"),
    [
        ("host", ["array"]),
        ("device", ["array", "vectoradd"]),
        ("host-cached", ["array"]),
        ("mapped", ["array", "vectoradd"]),
    ],
)
def test_tiers_without_a_medium(capsys: pytest.CaptureFixture[str], tier: str, names: list[str]) -> None:
    for report in answer(capsys, *names, "--tier", tier)["benchmarks"]:
        assert tier in report["where"] or tier == "host-cached"
        assert all(row["bam"] is None and row["ceiling"] for row in report["rows"])


@pytest.mark.parametrize("medium", ["file", "980Pro/4"])
def test_media(capsys: pytest.CaptureFixture[str], medium: str) -> None:
    (report,) = answer(capsys, "reduction", "--medium", medium)["benchmarks"]
    assert report["emulated"] == (medium != "file") == ("emulated" in report["where"])


def test_drives_are_striped(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = answer(capsys, "reduction", "--medium", "980Pro/16", "--drives", "3")["benchmarks"]
    assert report["where"] == "3 x 980Pro at 1/16 of its rates (emulated)"


def test_a_wrong_result_ends_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    same = figures.same
    monkeypatch.setattr("warpwell.study.bench.reads.same", lambda what, found, wanted: same(what, found + 1, wanted))
    assert main(["bench", "reduction", *TINY]) == 2
    assert "wrong" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "kernel"), [("reduction", "walk"), ("vectoradd", "vectors"), ("scan", "block_scans")])
def test_an_item_that_is_left_out_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, kernel: str
) -> None:
    make = getattr(kernels, kernel)
    items = (512 << 10) // 8

    class Short:
        """A kernel that is told of one item less."""

        def __init__(self, inner) -> None:
            self.inner = inner

        def __getitem__(self, shape):
            launch = self.inner[shape]
            return lambda *args, **named: launch(
                *(items - 1 if isinstance(arg, int) and arg == items else arg for arg in args), **named
            )

    monkeypatch.setattr(kernels, kernel, lambda *chosen: Short(make(*chosen)))
    assert main(["bench", name, *TINY]) == 2
    assert f"the result of {name} by raw is wrong" in capsys.readouterr().err


@pytest.mark.timing
def test_drives_are_faster_together(capsys: pytest.CaptureFixture[str]) -> None:
    # 512 commands of each kind: writes of one drive take more than a second
    given = ("--medium", "980Pro/128", "--drives", "4", "--page-size", "512")
    (report,) = answer(capsys, "block", *given, nbytes="256KiB")["benchmarks"]
    rates = {row["what"]: row for row in report["rows"]}
    one, four = rates["random reads, 1 drive"], rates["random reads, 4 drives"]
    assert one["ceiling"] == pytest.approx(0.75 / 128, rel=0.2) and one["of_ceiling"] < 1.2
    assert four["rate"] > 2 * one["rate"]


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.svg"
    assert main(["bench", "reduction", "array", *TINY, "--out", str(out)]) == 0
    assert "raw loads" in capsys.readouterr().out and out.stat().st_size > 1000


def test_what_the_medium_is_called() -> None:
    setting = Setting("cpu", "storage", 4096, 1 << 16, 1 << 20, 8, 1, "980pro/16", drives=2)
    assert setting.where() == "2 x 980Pro at 1/16 of its rates (emulated)"


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "reduction" in capsys.readouterr().out
    assert main(["bench", "--json"]) == 0
    assert "reduction" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no_such_benchmark",), "reduction"),
        (("array", "--all"), "--all"),
        (("array", "--bytes", "4KiB"), "64 pages"),
        (("array", "--medium", "floppy"), "P5800X"),
        (("array", "--medium", "980pro/0"), "divided"),
        (("array", "--drives", "2"), "emulated"),
        (("array", "--medium", "980pro", "--tier", "host"), "--medium"),
        (("array", "--out", "picture.txt"), ".png"),
        (("array", "--out", "no_such_folder/picture.png"), "no_such_folder"),
    ],
)
def test_benchmarks_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
