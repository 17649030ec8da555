"""The micro-benchmarks, tiny: ceilings, tiers and media; a wrong result ends the run."""

import numpy as np
import pytest

from lab.bench import runner
from lab.bench.micro import BENCHMARKS, ceilings, figures, kernels
from lab.bench.micro import run as micro
from lab.bench.micro.setting import Setting, numbers
from warpwell.errors import ArgumentError, WarpwellError

TINY = {"bytes": "512KiB", "runs": "1", "threads": "8", "service-threads": "1"}


def measured(names: str, **options: str) -> runner.Record:
    record = runner.Record("micro")
    values = {name.replace("_", "-"): value for name, value in options.items()}
    micro.run.run(runner.Setting("cpu", True, TINY | values | {"names": names}), record)
    return record


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_micro_benchmark_has_ceilings(name: str) -> None:
    record = measured(name)
    assert record.figures and not record.emulated
    for figure in record.figures:
        assert figure["id"].startswith(f"micro/{name}/") and figure["value"] > 0 and figure["ceiling"]["value"] > 0
    assert name in ("block", "iodepth") or any("peers" in figure for figure in record.figures)
    spans = [figure for figure in record.figures if figure["id"].endswith("spans")]
    assert bool(spans) == (name not in ("block", "iodepth", "pattern", "scan"))


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        pytest.param("host", "array", marks=pytest.mark.slow),
        pytest.param("device", "array,vectoradd", marks=pytest.mark.slow),
        pytest.param("host-cached", "array", marks=pytest.mark.slow),
        pytest.param("mapped", "array", marks=pytest.mark.slow),
    ],
)
def test_tiers_without_a_medium(tier: str, names: str) -> None:
    assert all("peers" not in figure and figure["ceiling"] for figure in measured(names, tier=tier).figures)


@pytest.mark.slow
@pytest.mark.parametrize(("medium", "drives"), [("file", "1"), ("980Pro/16", "3")])
def test_media(medium: str, drives: str) -> None:
    assert bool(measured("reduction", medium=medium, drives=drives).emulated) == (medium != "file")


def test_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_same = figures.require_same

    def require_another(name: str, found: int, expected: int) -> None:
        require_same(name, found + 1, expected)

    monkeypatch.setattr("lab.bench.micro.reads.require_same", require_another)
    with pytest.raises(WarpwellError, match="wrong"):
        measured("reduction")


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("reduction", "walk"),
        pytest.param("vectoradd", "vectors", marks=pytest.mark.slow),
        pytest.param("scan", "block_scans", marks=pytest.mark.slow),
    ],
)
def test_item_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    make = getattr(kernels, kernel)
    items = (512 << 10) // 8

    class Short:
        """A kernel whose arguments name one item less."""

        def __init__(self, inner) -> None:
            self.inner = inner

        def __getitem__(self, shape):
            launch = self.inner[shape]
            return lambda *args, **named: launch(
                *(items - 1 if isinstance(arg, int) and arg == items else arg for arg in args), **named
            )

    monkeypatch.setattr(kernels, kernel, lambda *chosen: Short(make(*chosen)))
    with pytest.raises(WarpwellError, match=f"the result of {name} by raw is wrong"):
        measured(name)


def test_invalid_options_are_refused() -> None:
    for options in ({"names": "none"}, {"bytes": "4KiB"}, {"medium": "floppy"}, {"drives": "2"}):
        with pytest.raises(ArgumentError):
            measured(**{"names": "array"} | options)


def test_medium_has_a_description() -> None:
    setting = Setting("cpu", "storage", 4096, 1 << 16, 1 << 20, 8, 1, "980pro/16", drives=2)
    assert setting.where() == "2 x 980Pro at 1/16 of its rates (emulated)"


@pytest.mark.slow
def test_the_ceiling_of_a_medium_includes_its_last_commands():
    setting = Setting("cpu", "storage", 512, 64 * 512, 256 * 512, 64, 2, "P5800X/64", runs=1)
    assert ceilings.medium_rate(setting, numbers(setting.items), np.arange(256)) > 0  # no command is left in flight
