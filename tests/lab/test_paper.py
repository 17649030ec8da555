"""The paper command: shapes that must fail on wrong data, verdicts, the documents' statements, the table."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from lab.paper import command, report, shapes
from lab.paper import experiment as paper
from lab.paper.experiment import AGREES, BUSY, DISAGREES, FAILED, UNAVAILABLE, Experiment, Outcome, documents

RIGHT = {
    "rises": (shapes.rises, [[1.0, 2.0, 1.95, 3.0]], {}),
    "falls": (shapes.falls, [[3.0, 2.0, 2.05, 1.0]], {}),
    "linear": (shapes.linear, [[1, 2, 4], [10.0, 19.0, 36.0], 0.8], {}),
    "saturates": (shapes.saturates, [[1, 2, 4, 8, 16], [10.0, 20.0, 40.0, 41.0, 40.0]], {"at": 4, "factor": 2}),
    "ratio": (shapes.ratio, [1.5, 1.1, 1.5], {}),
    "between": (shapes.between, [1.0, 0.5, 1.0], {}),
    "crosses": (shapes.crosses, [[1, 2, 4], [3.0, 1.0, 1.0], [2.0, 2.0, 2.0], 2], {}),
    "ordered": (shapes.ordered, [{"a": 2.0, "b": 1.0, "c": 3.0}, ["c", "a", "b"]], {}),
    "equal": (shapes.equal, ["hold", "hold"], {}),
}
WRONG = {
    "a curve that falls": ("rises", 0, [1.0, 2.0, 1.8, 3.0]),
    "a curve that is constant": ("rises", 0, [1.0, 1.0]),
    "a value that is missing": ("rises", 0, [1.0, math.nan, 3.0]),
    "a curve that rises": ("falls", 0, [3.0, 2.0, 2.2, 1.0]),
    "a bend": ("linear", 1, [10.0, 19.0, 30.0]),
    "more than linear": ("linear", 1, [10.0, 19.0, 60.0]),
    "no rate": ("linear", 1, [0.0, 0.0, 0.0]),
    "early saturation": ("saturates", 1, [38.0, 40.0, 40.0, 41.0, 40.0]),
    "late saturation": ("saturates", 1, [10.0, 12.0, 14.0, 18.0, 40.0]),
    "a collapse behind the saturation point": ("saturates", 1, [10.0, 20.0, 40.0, 41.0, 20.0]),
    "too large a ratio": ("ratio", 0, 1.7),
    "too small a ratio": ("ratio", 0, 0.7),
    "a ratio of nothing": ("ratio", 0, math.nan),
    "below the range": ("between", 0, 0.4),
    "above the range": ("between", 0, 1.1),
    "not in the range": ("between", 0, math.nan),
    "a late crossover": ("crosses", 1, [3.0, 3.0, 1.0]),
    "two crossovers": ("crosses", 1, [3.0, 1.0, 3.0]),
    "no crossover": ("crosses", 1, [3.0, 3.0, 3.0]),
    "another order": ("ordered", 1, ["a", "c", "b"]),
    "another decision": ("equal", 0, "preempt"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_shape_agrees_with_right_data(name):
    check, values, options = RIGHT[name]
    assert check("claim", *values, **options).agrees


@pytest.mark.parametrize("fault", WRONG)
def test_a_shape_disagrees_with_wrong_data(fault):
    name, position, value = WRONG[fault]
    check, values, options = RIGHT[name]
    found = check("claim", *values[:position], value, *values[position + 1 :], **options)
    assert not found.agrees
    assert found.found


def test_an_outcome_without_checks_does_not_agree():
    assert not Outcome("nothing", []).agrees


NAME = "bam/threads"
YES, NO = shapes.Check("yes", True, "1"), shapes.Check("no", False, "2")


@pytest.fixture
def load(monkeypatch):
    """Return a function that sets the load of other programs."""
    loads = []

    class Meter:
        cores, cpu_seconds = 2, 0.5
        other_cores = property(lambda self: loads[0])
        busy = property(lambda self: loads[0] > 0.5)
        __enter__ = __exit__ = lambda self, *details: self if not details else None

    monkeypatch.setattr(paper, "Load", Meter)
    loads.append(0.0)
    return lambda cores: loads.__setitem__(0, cores)


def verdict(tmp_path, *outcomes, timed=True):
    left = list(outcomes)

    def run(setting, document):
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return paper.carry_out(Experiment(NAME, run, timed), paper.Setting(tmp_path))


def test_the_last_run_decides(load, tmp_path):
    good, bad = Outcome("", [YES]), Outcome("", [YES, NO])
    assert (verdict(tmp_path, good).status, verdict(tmp_path, good).runs) == (AGREES, 1)
    assert (verdict(tmp_path, bad, bad, good).status, verdict(tmp_path, bad, good).runs) == (AGREES, 2)
    for cores in (0.0, 2.0):
        load(cores)
        assert (verdict(tmp_path, bad, bad, bad).status, verdict(tmp_path, bad, bad, bad).runs) == (DISAGREES, 3)
    assert verdict(tmp_path, bad, timed=False).runs == 1


def test_a_busy_machine_is_no_excuse_unless_the_emulated_drive_is_slow_too(load, tmp_path):
    load(2.0)
    assert verdict(tmp_path, *[Outcome("", [NO], instrument=YES)] * 3).status == DISAGREES
    result = verdict(tmp_path, *[Outcome("", [NO], instrument=NO)] * 3)
    assert result.status == BUSY and "2.0 of 2 cores" in result.reason
    assert verdict(tmp_path, Outcome("", [YES], instrument=NO)).status == AGREES
    load(0.0)
    assert verdict(tmp_path, *[Outcome("", [NO], instrument=NO)] * 3).status == DISAGREES


def test_what_cannot_be_run_or_fails_is_reported(load, tmp_path):
    missing = verdict(tmp_path, paper.Unavailable("needs a GPU"))
    assert (missing.status, missing.reason) == (UNAVAILABLE, "needs a GPU")
    failed = verdict(tmp_path, ValueError("one"), ValueError("two"), ValueError("three"))
    assert (failed.status, failed.reason) == (FAILED, "ValueError: three")


def test_every_experiment_has_a_statement_of_its_document():
    names = [experiment.name for experiment in command.experiments([])]
    assert sorted(names) == sorted(documents())
    for name, document in documents().items():
        assert document.document and document.figure and document.title, name
        assert document.numbers or "shape only" in document.value, f"{name}: no values, and not 'shape only'"
        assert document.quotes or name == "taxi/duckdb", name
        for number in document.numbers.values():
            json.dumps(number)


def test_a_group_or_a_single_experiment_is_chosen():
    names = [experiment.name for experiment in command.experiments(["scheduling/cost", "taxi"])]
    assert names[-1] == "scheduling/cost" and "taxi/times" in names and "cluster/ffts" not in names
    with pytest.raises(ValueError, match="unknown experiment 'none'"):
        command.experiments(["none"])


def results():
    good = paper.Result(NAME, AGREES, Outcome("5,000 reads/s (emulated)", [YES]), runs=2, cpu_seconds=1.5)
    bad = paper.Result("bam/lines", DISAGREES, Outcome("1.0x | 2.0x", [YES, NO]), "load 1.0", runs=3)
    missing = paper.Result("taxi/rapids", UNAVAILABLE, reason="needs a GPU")
    return [good, bad, missing]


def test_the_table_has_documents_values_ours_and_the_verdict():
    stream = io.StringIO()
    report.print_table(results(), Console(file=stream, width=200))
    text = " ".join(stream.getvalue().split())
    for part in (
        "Figure 6",
        "16 K to 64 K",
        "5,000 reads/s (emulated)",
        "agrees in 1 of 1 checks, run 2",
        "disagrees in 1 of 2 checks, run 3: no: 2; load 1.0",
    ):
        assert part in text
    assert "cannot run here: needs a GPU" in text
    assert "disagree: bam/lines" in text
    assert "1 agree, 1 disagree, 0 not judged (busy machine), 1 cannot run here; 0 s, 2 CPU s" in text


def test_page_and_json(tmp_path):
    text = report.page(results(), {"cores": 2})
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "- bam/lines: yes: 1; no: 2 (disagrees)" in text
    assert len(rows) == 5 and all(row.replace(r"\|", "").count("|") == 5 for row in rows)
    report.write_json(tmp_path / "a.json", results(), {"cores": 2})
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["experiments"][1]["outcome"]["checks"][1] == dataclasses.asdict(NO)
    assert content["experiments"][1]["document"]["figure"] == "Figure 8"


def test_the_command_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WARPWELL_LOG_LEVEL", "ERROR")
    argv = ["scheduling/cost", "scheduling/decay", "scheduling/decisions", "--quick"]
    assert command.main([*argv, "--json", str(tmp_path / "a.json"), "--page", str(tmp_path / "a.md")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "slope 0.09526, base 0.01633" in text and "3 agree" in text
    assert (tmp_path / "a.md").read_text(encoding="utf-8").startswith("# Experiments")
    statuses = [entry["status"] for entry in json.loads((tmp_path / "a.json").read_text())["experiments"]]
    assert statuses == [AGREES] * 3


def test_a_shape_that_disagrees_makes_the_status_1(monkeypatch, capsys):
    from lab.paper import scheduling

    wrong = scheduling.SourceModel(slope=0.2)
    monkeypatch.setattr(scheduling, "MODEL", wrong)
    assert command.main(["scheduling/cost"]) == 1
    assert "disagree: scheduling/cost" in capsys.readouterr().out


def test_trips_are_made_up_without_the_published_months(monkeypatch, tmp_path):
    from lab.paper import taxi

    monkeypatch.setenv("TAXI_DATA", str(tmp_path))
    data = taxi.trips(20_000)
    assert data.origin == "made-up trips" and set(data.columns) == {taxi.PICKUP, *taxi.COLUMNS}
    share = (data.columns[taxi.PICKUP] == data.quarter).mean()
    assert taxi.SHARE / 3 < share < taxi.SHARE * 3
    assert data.whole_columns(6) == 7 * 8 * data.rows and data.needed(6) < 1.2 * 8 * data.rows
