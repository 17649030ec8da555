"""``python -m lab sched ablations``: results equal the baseline, and a changed policy is found."""

import json
from pathlib import Path

import pytest

from lab.commands import main
from lab.sched import ablations
from warpwell import errors
from warpwell.scheduler.policies import lanes

TRACES = ("seven", "random mix")
VARIANTS = (ablations.FULL, "no re-issue by the GPU", "no lookahead")


def measure_part() -> list[str]:
    """Return the differences of a small part of the ablations from the baseline."""
    results = ablations.measure({name: ablations.ABLATIONS[name] for name in VARIANTS}, TRACES)
    assert [list(traces) for traces in results.values()] == [list(TRACES)] * len(VARIANTS)
    return ablations.differences(results, ablations.read_baseline()["ablations"])


def test_part_equals_baseline() -> None:
    assert measure_part() == []


def test_doubled_constant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SOONEST", 2 * lanes.SOONEST)
    assert any(line.startswith(f"{ablations.FULL}, seven: stp is ") for line in measure_part())


def test_baseline_has_all_variants() -> None:
    stored = ablations.read_baseline()
    assert list(stored["ablations"]) == list(ablations.ABLATIONS)
    assert list(stored["sensitivity"]) == list(ablations.sensitivity())
    assert ablations.check(stored) == []


def test_missing_results_are_differences(tmp_path: Path) -> None:
    path, summary = tmp_path / "baseline.json", {"stp": 1.0, "stp_lowest": 1.0, "antt": 2.0}
    ablations.write({"ablations": {"a": {"t": summary}, "b": {"t": summary}}}, path)
    assert ablations.read_baseline(path)["ablations"]["b"] == {"t": summary}
    changed = {"a": {"t": summary | {"antt": 2.1}}, "c": {"t": summary}}
    assert ablations.check({"ablations": changed}, path) == [
        "a, t: antt is 2.100000, expected 2.000000",
        "c, t: not in the baseline",
        "b, t: only in the baseline",
    ]
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(errors.FormatError, match="'other', expected"):
        ablations.read_baseline(path)


def test_constants_are_restored() -> None:
    before = lanes.FRESH, lanes.Lanes._divide.__defaults__
    with ablations.constant_set(lanes, "FRESH", 1.0):
        assert (lanes.FRESH, lanes.Lanes._divide.__defaults__) == (1.0, (1.0,))
    assert (lanes.FRESH, lanes.Lanes._divide.__defaults__) == before


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(AttributeError, match="_exchange"):
        ablations.replaced(_exchange=None)


@pytest.mark.slow
def test_all_results_equal_baseline() -> None:
    assert main(["sched", "ablations", "--sensitivity", "--check"]) == 0
