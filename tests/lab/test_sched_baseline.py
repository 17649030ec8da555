"""``python -m lab sched check``: the default policy keeps its stored throughput, and a loss is found."""

import json
from pathlib import Path

import pytest

from lab.commands import main
from lab.sched import baseline
from warpwell import errors

TRACES = ("seven", "random mix")
SUMMARY = {"stp": 1.0, "stp_lowest": 0.9, "antt": 2.0}


def stored(titles: tuple[str, ...] = TRACES) -> baseline.Results:
    """Return the stored results of some traces."""
    return {title: baseline.read_baseline()[title] for title in titles}


def test_default_policy_keeps_its_throughput() -> None:
    assert baseline.losses(baseline.measure(TRACES), stored()) == []


def test_slower_policy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "POLICY", "first-come")
    messages = baseline.losses(baseline.measure(TRACES), stored())
    assert [message.partition(":")[0] for message in messages] == list(TRACES)


def test_losses_name_the_trace_and_what_is_accepted() -> None:
    results = {"a": SUMMARY | {"stp": 0.985}, "random mix": SUMMARY | {"stp": 0.965}, "b": SUMMARY}
    assert baseline.losses(results, {"a": SUMMARY, "random mix": SUMMARY, "c": SUMMARY}) == [
        "c: only in the baseline",
        "a: STP is 0.985 of the baseline, expected at least 0.99",
        "b: not in the baseline",
    ]


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baseline.write({"a": SUMMARY}, path)
    assert baseline.read_baseline(path) == {"a": SUMMARY}
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(errors.FormatError, match="'other', expected"):
        baseline.read_baseline(path)


def test_two_runs_give_the_same_log() -> None:
    log = baseline.log_of(0)
    assert log.count("\n") > 800
    assert log == baseline.log_of(0) != baseline.log_of(1)


@pytest.mark.slow
def test_all_traces_keep_their_throughput() -> None:
    assert main(["sched", "check"]) == 0
