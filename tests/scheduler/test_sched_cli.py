"""Output and errors of ``python -m lab sched simulate`` and ``sched trace``."""

import json

import pytest

from lab.commands import main
from lab.sched.experiment import Experiment, chosen
from lab.sched.policies import NAMES
from lab.sched.traces.recipe import Recipe
from warpwell.scheduler.decision import SourceModel
from warpwell.scheduler.events import Log

SMALL = ["--kernels", "120"]


def output_of(capsys, *arguments):
    assert main(["sched", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def failing(capsys, *arguments):
    assert main(["sched", *(str(a) for a in arguments)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("warpwell: error: ") and "Traceback" not in out.err
    return out.err


def test_simulate(capsys):
    out = output_of(capsys, "simulate", *SMALL, "--policy", "source,lanes", "--seed", "3")
    for text in ("STP", "ANTT", "fairness", "p99 memory", "lanes", "class table (H100)", "imputed: priority"):
        assert text in out
    assert "…" not in out


def test_all_policies_as_json(capsys):
    found = json.loads(output_of(capsys, "simulate", *SMALL, "--policy", "all", "--json", "--load", "inf"))
    assert list(found["policies"]) == list(NAMES)
    assert found["load"] == "inf" and found["kernels"] >= 120 and found["rates"] == "class table (H100)"
    for values in found["policies"].values():
        assert 0.5 < values["stp"] < 2.5 and values["antt"] >= 1.0 and 0 < values["fairness"] <= 1
        assert values["kernels"] == found["kernels"] and values["failed"] == 0
        assert set(values["turnaround"]) == {"compute", "memory"}


def test_the_host_takes_its_time(capsys):
    def stp(host):
        options = [*SMALL, "--load", "inf", "--policy", "left-over", "--json", "--host", host]
        found = json.loads(output_of(capsys, "simulate", *options))
        assert found["host"] == pytest.approx(1e-6 * float(host))
        return found["policies"]["left-over"]["stp"]

    assert stp("0") > stp("50") > stp("500")
    assert "host" in output_of(capsys, "simulate", *SMALL, "--host", "145")
    assert "--host is -3.0: give a number from 0" in failing(capsys, "simulate", "--host", "-3")


@pytest.mark.parametrize("mode", ["switch", "drain"])
def test_the_same_seed_gives_the_same_log(tmp_path, capsys, mode):
    def log(name, seed):
        path = tmp_path / name
        output_of(capsys, "simulate", *SMALL, "--policy", "lanes", "--log", str(path), "--seed", seed, "--mode", mode)
        return path.read_text()

    assert log("a", "3") == log("b", "3") != log("c", "4")
    header = json.loads(log("a", "3").splitlines()[0])["about"]
    assert (header["policy"], header["seed"], header["mode"]) == ("lanes", 3, mode)
    assert header["rates"] == "class table (H100)"
    assert "imputed" in header


def test_each_policy_has_a_log(tmp_path, capsys):
    out = output_of(
        capsys, "simulate", "--kernels", "60", "--policy", "source,left-over", "--log", tmp_path / "l.jsonl", "--json"
    )
    names = [tmp_path / f"l.{name}.jsonl" for name in ("source", "left-over")]
    assert json.loads(out)["logs"] == [str(name) for name in names]
    assert [Log.read(name.read_text().splitlines()).about["policy"] for name in names] == ["source", "left-over"]


def test_rates_of_a_file(tmp_path, capsys):
    path = tmp_path / "pairs.json"
    path.write_text('{"format": "warpwell-pairs/1", "device": "mine", "pairs": []}')
    found = json.loads(output_of(capsys, "simulate", *SMALL, "--policy", "source", "--matrix", str(path), "--json"))
    assert "mine" in found["policies"]["source"]["rates"]


def test_a_trace_and_back(tmp_path, capsys):
    path = tmp_path / "t.csv"
    out = output_of(capsys, "trace", "--kernels", "50", "--mix", "pure", "--out", str(path))
    assert "memory0" in out and "imputed: priority" in out
    described = json.loads(output_of(capsys, "trace", "--trace", str(path), "--json"))
    assert described["kernels"] >= 50 and described["load"] == pytest.approx(1.5)
    assert set(described["applications"]["memory0"]) >= {"kernels", "seconds", "memory_seconds", "requests"}
    from_trace, generated = (
        json.loads(output_of(capsys, "simulate", *SMALL, "--policy", "source", "--error", "0", "--json", *options))
        for options in (["--trace", str(path)], ["--kernels", "50", "--mix", "pure"])
    )
    assert from_trace["policies"]["source"]["stp"] == pytest.approx(generated["policies"]["source"]["stp"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "magic"], "magic.*source"),
        (["--policy", ","], "expected some of"),
        (["--load", "0"], "load"),
        (["--load", "-1"], "load"),
        (["--kernels", "0"], "kernels"),
        (["--kernels", "-3"], "kernels is -3"),
        (["--limit", "0"], "limit"),
        (["--mix", "none"], "half"),
        (["--error", "-1"], "error"),
        (["--seed", "-1"], "seed"),
        (["--urgent", "2"], "urgent"),
        (["--matrix", "none.json"], "none.json"),
        (["--trace", "none.csv"], "none.csv"),
        (["--arrivals", "none.csv"], "none.csv"),
        (["--model", "none.json"], "none.json"),
        (["--models", "x*"], "app0"),
        (["--log", "no/such/folder/log"], "create it"),
        (["--log", "/"], "is a folder"),
        (["--trace", "/"], "/"),
        (["--load", "nan"], "load"),
        (["--urgent", "nan"], "urgent"),
    ],
)
def test_options_that_cannot_be(capsys, options, says):
    import re

    assert re.search(says, failing(capsys, "simulate", *SMALL, *options))


def test_a_trace_of_less_than_one_kernel(capsys):
    assert "kernels is -3" in failing(capsys, "trace", "--kernels", "-3")


def test_columns_and_values_of_a_trace_that_cannot_be(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("request,arrival,kernel,seconds,colour\n1,0,k,1,red\n")
    assert "colour" in failing(capsys, "simulate", "--trace", path)
    path.write_text("request,arrival,kernel,seconds\n1,-1,k,1\n")
    assert "line 2: arrival is '-1'" in failing(capsys, "trace", "--trace", path)
    path.write_text("request,arrival,kernel,seconds,memory\n1,1,k,1,-5\n")
    assert "memory is '-5'" in failing(capsys, "trace", "--trace", path)


def test_experiments_are_plain_data():
    small = Experiment(Recipe(kernels=60, seed=2))
    again = Experiment(Recipe(kernels=60, seed=2))
    first, second = (experiment.metrics("left-over", experiment.recipe.make()) for experiment in (small, again))
    timing = {"decision_mean", "decision_p99"}
    assert {k: v for k, v in first.items() if k not in timing} == {k: v for k, v in second.items() if k not in timing}
    assert chosen("all") == list(NAMES) and chosen("left-over, left-over,source") == ["left-over", "source"]


def test_the_policy_reckons_with_the_constants_that_were_fitted():
    log = Log()
    Experiment(Recipe(kernels=300, seed=2), model=SourceModel(memory_decay=0.25)).run("source", log=log)
    assert {event.why["d"] for event in log if event.why.get("rule") == "worth"} == {0.25}
