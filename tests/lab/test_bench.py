"""The runner of benchmarks: schema, medians, comparison, baselines and the page of figures."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench import AGENTS, BENCHMARKS, SCRIPTS, baseline, cli, compare, machine, page, runner, schema


def figure(name: str, runs: list[float], better: str = "higher", **more: Any) -> dict[str, Any]:
    return {
        "id": f"b/{name}",
        "value": sorted(runs)[len(runs) // 2],
        "unit": "1/s",
        "better": better,
        "runs": runs,
    } | more


def result(*figures: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "benchmark": "b",
        "commit": "0123abcd",
        "dirty": False,
        "date": "2026-11-28",
        "busy": False,
        "seconds": 1.5,
        "machine": {"cpu": "C", "cores": 2, "emulated": []},
        "options": {"device": "cpu", "quick": True},
        "figures": list(figures),
    } | changed


# -- schema -----------------------------------------------------------------------------------------------------------


def test_schema_accepts_all_fields() -> None:
    more = {
        "goal": 2.0,
        "ceiling": {"id": "copy", "value": 3.0},
        "peers": [{"name": "p", "version": "1", "value": 1.0}],
    }
    assert schema.validate(result(figure("x", [1.0, 2.0, 3.0], **more)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (result(schema=2), "schema 2"),
        (result(busy=1), "'busy'"),
        ({"schema": 1}, "no field"),
        ([], "must be an object"),
        (result(figure("x", [1.0]), figure("x", [1.0])), "twice"),
        (result(figure("x", [1.0], better="more")), "'better'"),
        (result(figure("x", [1.0]) | {"runs": []}), "'runs'"),
        (result(figure("x", [1.0]) | {"value": float("nan")}), "'value'"),
        (result(figure("x", [1.0]) | {"value": True}), "'value'"),
        (result(figure("x", [1.0]) | {"id": "c/x"}), "begin with"),
        (result(figure("x", [1.0], colour="red")), "unknown"),
        (result(figure("x", [1.0], peers=[{"name": "p"}])), "version"),
    ],
)
def test_schema_refuses_other_objects(wrong: Any, message: str) -> None:
    with pytest.raises(schema.SchemaError, match=message):
        schema.validate(wrong)


def test_schema_reads_files_lists_and_folders(tmp_path: Path) -> None:
    schema.write(tmp_path / "a.json", result())
    schema.write(tmp_path / "b.json", [result(), result(benchmark="c")])
    assert [r["benchmark"] for r in schema.read(tmp_path)] == ["b", "b", "c"]
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(schema.SchemaError, match="not JSON"):
        schema.read(tmp_path)


def test_stored_results_are_valid() -> None:
    for folder in baseline.machine_folders():
        assert not any(r["busy"] for r in schema.read(folder))


# -- comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "new", "better", "worse"),
    [
        ([100.0], [90.0], "higher", True),
        ([100.0], [110.0], "higher", False),
        ([100.0], [110.0], "lower", True),
        ([100.0], [90.0], "lower", False),
        ([99.0, 100.0, 101.0], [89.0, 90.0, 91.0], "higher", True),
    ],
)
def test_change_above_the_limit_is_reported(base: Any, new: Any, better: str, worse: bool) -> None:
    (change,) = compare.compare_results(result(figure("x", base, better)), result(figure("x", new, better)))
    assert change.worse == worse and ("REGRESSION" in str(change)) == worse


@pytest.mark.parametrize(
    ("base", "new"),
    [
        ([100.0], [95.5]),
        ([100.0], [104.5]),
        ([90.0, 100.0, 110.0], [85.0, 86.0, 87.0]),
        ([99.0, 100.0, 101.0], [75.0, 86.0, 95.0]),
        ([0.0], [0.0]),
    ],
)
def test_noise_is_not_reported(base: Any, new: Any) -> None:
    assert not compare.compare_results(result(figure("x", base)), result(figure("x", new)))


def test_missing_figure_is_a_regression_and_a_new_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    base, larger = result(figure("x", [1.0])), result(figure("x", [1.0]), figure("y", [1.0]))
    assert compare.report([larger], [base]) == 1 and "MISSING    b/y" in capsys.readouterr().out
    assert compare.report([base], [larger]) == 0 and "new        b/y" in capsys.readouterr().out
    assert compare.report([base], []) == 1 and compare.report([base], [], partial=True) == 0


def test_busy_base_and_other_options_are_refused() -> None:
    good = result(figure("x", [1.0]))
    with pytest.raises(compare.NotComparableError, match="busy"):
        compare.compare_results(good | {"busy": True}, good)
    with pytest.raises(compare.NotComparableError, match="options"):
        compare.compare_results(good, good | {"options": {}})
    assert not compare.compare_results(good, good | {"busy": True})


def test_compare_command_has_three_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema.write(tmp_path / "base.json", result(figure("x", [100.0])))
    schema.write(tmp_path / "new.json", result(figure("x", [50.0])))
    schema.write(tmp_path / "busy.json", result(figure("x", [100.0]), busy=True))
    base, new, busy = (str(tmp_path / f"{name}.json") for name in ("base", "new", "busy"))
    assert cli.main(["compare", base, base]) == 0
    assert cli.main(["compare", base, new]) == 1
    assert cli.main(["compare", base, new, "--tolerance", "0.6"]) == 0
    assert cli.main(["compare", busy, new]) == 2
    assert cli.main(["compare", base, str(tmp_path / "none.json")]) == 2


def test_revisions_run_alternately(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The fake sides differ by a fifth; the order within a pair alternates after one warm-up each."""
    ran: list[str] = []
    (tmp_path / "lab" / "bench").mkdir(parents=True)
    (tmp_path / "lab" / "bench" / "runner.py").touch()
    monkeypatch.setattr(compare, "checkout", lambda revision: contextlib.nullcontext(tmp_path))

    def run_once(name: str, setting: runner.Setting, root: Path) -> dict[str, Any]:
        side = "new" if root == machine.ROOT else "base"
        ran.append(side)
        return {"figures": [figure("x", [100.0 if side == "base" else 80.0])], "emulated": []}

    monkeypatch.setattr(runner, "run_once", run_once)
    status = compare.against("HEAD", ["b"], runner.Setting("cpu"), rounds=3)
    assert ran == ["base", "new", *["base", "new"], *["new", "base"], *["base", "new"]]
    assert status == 1 and "b/x: 100 -> 80" in capsys.readouterr().out


# -- runner -----------------------------------------------------------------------------------------------------------


def test_runs_are_merged_by_their_medians() -> None:
    first = [figure("x", [1.0, 2.0, 9.0], ceiling={"id": "c", "value": 10.0})]
    second = [figure("x", [4.0], ceiling={"id": "c", "value": 20.0})]
    (alone,) = runner.merge([first])
    assert alone["runs"] == [1.0, 2.0, 9.0] and alone["value"] == 2.0
    (both,) = runner.merge([first, second])
    assert both["runs"] == [2.0, 4.0] and both["value"] == 3.0 and both["ceiling"]["value"] == 15.0


def test_record_makes_figures_of_the_schema() -> None:
    record = runner.Record("b")
    assert record("x", [3, 1, 2], "1/s", ceiling=("c", 4), peers=[("p", "1", 2)], goal=1) == 2.0
    record("y", 5, "s", better="lower")
    assert schema.validate(result(*record.figures))


def test_settings_choose_by_device_size_and_option() -> None:
    for device, quick, value in (("cpu", True, 1), ("cpu", False, 2), ("cuda", True, 3), ("cuda", False, 4)):
        assert runner.Setting(device, quick).pick((1, 2), (3, 4), "n") == value
    setting = runner.Setting("cpu", True, {"n": "7", "sizes": "1,2", "seconds": "0.5"})
    assert setting.pick((1, 2), (3, 4), "n") == 7 and setting.option("sizes", [8]) == [1, 2]
    assert setting.option("seconds", 1.0) == 0.5 and setting.option("other", None) is None


def test_what_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    found = runner.benchmark("b", needs={"gpu"})(lambda setting, record: None)
    assert found.missing() == "needs a GPU"
    assert runner.benchmark("b")(lambda setting, record: None).missing() is None


@pytest.mark.parametrize("busy", [False, True])
def test_busy_machines_are_marked(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    seconds = iter([100.0, 118.0 if busy else 111.0] * 2)
    monkeypatch.setattr(machine, "cpu_seconds", lambda: next(seconds))
    own = iter([0.0, 10.0] * 2)
    monkeypatch.setattr(machine, "own_seconds", lambda: next(own))
    clock = iter([0.0, 10.0] * 2)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    with machine.Load() as load:
        pass
    assert load.busy == busy and load.cpu_seconds == 10.0 and load.other_cores == (0.8 if busy else 0.1)
    assert machine.is_loaded() == busy


def test_a_series_after_a_busy_minute_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark before must not count as another program: the load average would still contain it."""
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(machine, "cpu_seconds", lambda: 100.0)
    assert not machine.is_loaded(0.0)


def test_unknown_load_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_seconds", lambda: None)
    with machine.Load() as load:
        pass
    assert not load.busy


def test_every_benchmark_has_a_module() -> None:
    folder = machine.ROOT / "lab" / "bench"
    found = {".".join(p.relative_to(folder).with_suffix("").parts) for p in folder.rglob("*.py")}
    assert {module for module, _ in (BENCHMARKS | SCRIPTS).values()} <= found and set(AGENTS) <= set(SCRIPTS)
    sources = "".join(path.read_text() for path in folder.rglob("*.py"))
    for name in BENCHMARKS:
        assert f'@benchmark("{name}"' in sources
    assert set(baseline.PLAN["cpu"]) | set(baseline.PLAN["cuda"]) <= set(BENCHMARKS)
    assert all(name in cli.listing() for name in BENCHMARKS | SCRIPTS)


# -- baselines and the page -------------------------------------------------------------------------------------------


def test_busy_results_do_not_become_baselines(tmp_path: Path) -> None:
    refused = baseline.store([result(), result(benchmark="c", busy=True)], "m", tmp_path)
    assert refused == ["c"] and [path.name for path in (tmp_path / "m").iterdir()] == ["b.json"]


def test_one_file_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline.store, "__defaults__", (tmp_path,))
    schema.write(tmp_path / "all.json", [result(), result(benchmark="c")])
    assert baseline.main(["--import", str(tmp_path / "all.json"), "--machine", "m"]) == 0
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["b.json", "c.json"]


def test_page_has_a_column_for_each_machine(tmp_path: Path) -> None:
    (tmp_path / "introduction.md").write_text("# Figures\n")
    peers = [{"name": "Peer", "version": "1", "value": 1234.5}]
    more = {"goal": 3.0, "ceiling": {"id": "copy", "value": 4.0}, "peers": peers}
    first, second = figure("x", [1.0, 2.0, 3.0], **more), figure("y", [5.0], better="lower")
    schema.write(tmp_path / "h100" / "b.json", result(first))
    full = {"options": {"device": "cpu"}}
    schema.write(tmp_path / "two-cores" / "b.json", result(first, second, **full))
    (tmp_path / "h200" / "sched").mkdir(parents=True)
    text = page.render(tmp_path)
    assert text.startswith("# Figures\n") and "## b\n" in text and "h200" not in text
    found = "~2; 0.50; missed goal 3; Peer 1,234"
    assert "| figure | h100 0123abcd | two-cores 0123abcd, full data |\n|---|---|---|\n" in text
    assert f"| x (1/s; of copy) | {found} | {found} |\n| y (1/s) |  | 5 |" in text


def test_page_shows_the_chosen_figures_of_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema.write(tmp_path / "h100" / "b.json", result(figure("x", [1.0]), figure("y/z", [5.0])))
    monkeypatch.setitem(page.SHOWN, "b", ("y/*",))
    text = page.render(tmp_path)
    assert "| y/z (1/s) | 5 |" in text and "| x " not in text


def test_page_of_the_repository_is_up_to_date() -> None:
    assert page.main(["--check"]) == 0


# -- one benchmark ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stores_return_the_same_values_and_rates_of_all_systems() -> None:
    for package in ("lmdb", "rocksdict"):
        pytest.importorskip(package)
    from lab.bench import kv_host

    options = {"records": "300", "operations": "512", "rounds": "1", "workloads": "ycsb-a", "sizes": "128"}
    options |= {"write_sizes": "128", "images": "70"}
    record = runner.Record("kv-host")
    kv_host.run.run(runner.Setting("cpu", True, options), record)
    assert [f["id"] for f in record.figures] == [
        "kv-host/put/128B/group10000",
        "kv-host/write/128B/group10000",
        "kv-host/write/128B/group64",
        "kv-host/write/128B/group1",
        "kv-host/load/values",
        "kv-host/load/values/ratio",
        "kv-host/load/fields",
        "kv-host/load/fields/ratio",
        "kv-host/ycsb-a/batch256",
        "kv-host/ycsb-a/batch1",
        "kv-host/get/128B/batch256",
    ]
    peers = {f["id"].split("/")[1]: {peer["name"] for peer in f["peers"]} for f in record.figures if "peers" in f}
    assert peers == {key: {"LMDB", "RocksDB"} for key in ("put", "write", "ycsb-a", "get")} | {"load": {"LMDB"}}
    json.dumps(record.figures)


@pytest.mark.slow
def test_opening_is_compared(tmp_path: Path) -> None:
    from lab.bench import kv_open

    record = runner.Record("kv-open")
    kv_open.run.run(runner.Setting("cpu", True, {"records": "300", "processes": "2", "folder": str(tmp_path)}), record)
    figures = ("open", "open/median", "open/cpu", "cold", "private")
    assert {f["id"] for f in record.figures} == {
        f"kv-open/{s}{n}" for s in ("", "hashed/", "journal/") for n in figures
    }


@pytest.mark.slow
def test_warm_and_cold_reads_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    from lab.bench import kv_reads

    if kv_reads.on_tmpfs(tmp_path):
        pytest.skip("tmp_path is in memory")
    options = {"records": "300", "rounds": "1", "sizes": "128,ragged", "folder": str(tmp_path)}
    options |= {"cold_records": "300", "cold_rounds": "1", "cold_bytes": "1000", "batches": "8"}
    record = runner.Record("kv-reads")
    kv_reads.run.run(runner.Setting("cpu", True, options), record)
    found = {f["id"] for f in record.figures}
    assert {"kv-reads/warm/128/get", "kv-reads/warm/ragged/batch64", "kv-reads/cold/batch8/gather"} < found
    assert all(f["value"] > 0 for f in record.figures)
