"""Timeline, metrics and explanations, all made of a log."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from warpwell.scheduler.events import Event, Log
from warpwell.scheduler.report.explain import QUIET, duration, sentences
from warpwell.scheduler.report.prometheus import BUCKETS, LogMetrics, write_text
from warpwell.scheduler.report.timeline import residency_intervals, write_trace

WORTH = {
    "rule": "worth",
    "victim": 1,
    "newcomer": 2,
    "S0": 1.1,
    "S1": 1.6,
    "n": 0.55,
    "T": 0.02,
    "C": 0.005,
    "d": 1.0,
    "gain": 1.0 * 0.55 * 0.005 + 1.6 * 0.015 - 1.1 * 0.02,
}


def sample() -> Log:
    """Two memory kernels, one of which is preempted for a compute kernel; one that fails, and the kernels after it."""
    log = Log()
    log.about = {"policy": "source", "device": "cpu"}
    for event in (
        Event(0.0, "arrive", 0, "mvt", "a"),
        Event(0.0, "launch", 0, "mvt", "a", {"rule": "best combination", "co_runners": []}),
        Event(0.1, "arrive", 1, "atax", "a"),
        Event(0.1, "launch", 1, "atax", "a", {"rule": "best combination", "co_runners": [0], "workers": 4}),
        Event(0.2, "arrive", 2, "gemm", "b"),
        Event(0.2, "hold", 2, "gemm", "b", {**WORTH, "C": 0.03}),
        Event(0.3, "preempt", 1, "atax", "a", {**WORTH, "for": 2, "mode": "drain"}),
        Event(0.35, "stop", 1, "atax", "a", {"done": 7}),
        Event(0.35, "launch", 2, "gemm", "b", {"rule": "best combination", "co_runners": [0]}),
        Event(0.4, "reject", 3, "huge", "b", {"rule": "memory", "bytes": 100, "most": 10}),
        Event(1.0, "end", 2, "gemm", "b", {"ran": 0.65, "preemptions": 0}),
        Event(
            1.0, "launch", 1, "atax", "a", {"rule": "best combination", "co_runners": [0], "whole": "a barrier, line 3"}
        ),
        Event(1.2, "fail", 0, "mvt", "a", {"error": "IndexRangeError('index 9')"}),
        Event(1.2, "cancel", 3, "mvt2", "a", {"rule": "failed before it", "by": 0}),
        Event(1.5, "end", 1, "atax", "a", {"ran": 0.75, "preemptions": 1}),
        Event(1.6, "arrive", 4, "late", "a"),
        Event(1.6, "launch", 4, "late", "a", {"rule": "arrival"}),
        Event(1.7, "arrive", 5, "waits", "a"),
    ):
        log.add(event)
    return log


def test_stays_are_the_times_on_the_device() -> None:
    found = [(s.task, s.start, s.end, s.lane, s.outcome, s.preempt_time) for s in residency_intervals(sample())]
    assert found == [
        (0, 0.0, 1.2, 0, "failed", None),
        (1, 0.1, 0.35, 1, "preempted", 0.3),
        (2, 0.35, 1.0, 1, "done", None),
        (1, 1.0, 1.5, 1, "done", None),
        (4, 1.6, 1.7, 0, "running", None),
    ]


def test_a_place_holds_one_task_at_a_time() -> None:
    log = Log()
    for k in range(40):  # each task overlaps the two after it
        log.add(Event(float(k), "launch", k, "k"))
        if k >= 2:
            log.add(Event(k + 0.5, "end", k - 2, "k"))
    found = residency_intervals(log)
    assert {s.lane for s in found} == {0, 1, 2}
    for lane in range(3):
        spans = [s for s in found if s.lane == lane]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))


def test_a_task_whose_owner_died_is_there_twice() -> None:
    log = Log()
    log.add(Event(0.0, "launch", 0, "k"))
    log.add(Event(1.0, "launch", 0, "k"))
    log.add(Event(2.0, "end", 0, "k"))
    assert [(s.end, s.outcome) for s in residency_intervals(log)] == [(1.0, "lost"), (2.0, "done")]


def test_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    log = sample()
    log.add(Event(2.0, "hold", 5, "waits", "a", {"T": math.inf, "co_runners": [math.nan]}))
    path = tmp_path / "trace.json"
    write_trace(log, path)
    trace = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert trace["otherData"] == {"policy": "source", "device": "cpu"}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "task"]
    assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * sum(s.end - s.start for s in residency_intervals(log)))
    assert {(e["name"], e["tid"]) for e in slices} == {("mvt", 0), ("atax", 1), ("gemm", 1), ("late", 0)}
    leaving = [e for e in trace["traceEvents"] if e.get("cat") == "leaving"]
    assert [(e["ts"], e["dur"]) for e in leaving] == [(pytest.approx(3e5), pytest.approx(5e4))]
    counts = [(e["ts"] / 1e6, *e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert (0.35, 1, 2) in counts and (0.35, 2, 1) in counts and counts[-1] == (1.7, 1, 1)
    tenants = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    assert tenants == ["a", "b"]


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Read the text format strictly, by its grammar."""
    families: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    types: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[2] not in types
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram")
            types[name] = kind
            continue
        match = re.fullmatch(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)', line)
        assert match, line
        name, labels, value = match.groups()
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert types.get(name) or types[base] == "histogram", line
        assert (types.get(name) == "counter") == name.endswith("_total")
        pairs = re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', labels or "")
        key = tuple(sorted((k, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), v)) for k, v in pairs))
        assert key not in families.setdefault(name, {}), line
        families[name][key] = float(value)
    return families


def test_metrics_count_what_the_log_says() -> None:
    metrics = LogMetrics("source").observe_all(sample())
    metrics.set_service(2, 3, 10)
    found = parsed(metrics.render())

    def of(name: str, tenant: str, **more: str) -> float:
        return found[name][tuple(sorted({"policy": "source", "tenant": tenant, **more}.items()))]

    assert of("warpwell_tasks_arrived_total", "a") == 4
    assert of("warpwell_tasks_ended_total", "a", outcome="done") == 1
    assert of("warpwell_tasks_ended_total", "a", outcome="failed") == 1
    assert of("warpwell_tasks_ended_total", "a", outcome="cancelled") == 1
    assert of("warpwell_tasks_ended_total", "b", outcome="rejected") == 1
    assert of("warpwell_launches_total", "a") == 4
    assert of("warpwell_preemptions_total", "a", mode="drain") == 1
    assert of("warpwell_preemptions_declined_total", "b") == 1
    assert of("warpwell_tasks", "a", state="running") == 1
    assert of("warpwell_tasks", "a", state="waiting") == 1
    assert of("warpwell_tasks", "b", state="waiting") == 0
    assert of("warpwell_resident_seconds_total", "a") == pytest.approx(1.2 + 0.25 + 0.5)
    assert of("warpwell_turnaround_seconds_sum", "a") == pytest.approx(1.4)
    assert of("warpwell_turnaround_seconds_bucket", "a", le="1") == 0
    assert of("warpwell_turnaround_seconds_bucket", "a", le="2.5") == 1
    assert of("warpwell_turnaround_seconds_bucket", "a", le="+Inf") == of("warpwell_turnaround_seconds_count", "a")
    assert of("warpwell_queueing_seconds_sum", "b") == pytest.approx(0.15)
    assert of("warpwell_leaving_seconds_sum", "a") == pytest.approx(0.05)
    assert found["warpwell_owner_restarts_total"][()] == 2 and found["warpwell_clients"][()] == 3
    buckets = found["warpwell_queueing_seconds_bucket"]
    listed = [
        buckets[tuple(sorted((*dict(policy="source", tenant="a").items(), ("le", le))))]
        for le in [str(b) if b < 1 else str(int(b)) if b == int(b) else str(b) for b in BUCKETS]
    ]
    assert listed == sorted(listed)


def test_a_tenant_sees_its_own_metrics_alone() -> None:
    metrics = LogMetrics("source").observe_all(sample())
    metrics.set_service(0, 1, 0)
    found = parsed(metrics.render("b"))
    assert found and all(dict(key)["tenant"] == "b" for family in found.values() for key in family)
    assert metrics.render("nobody") == ""


def test_labels_are_escaped_and_files_whole(tmp_path: Path) -> None:
    tenant = 'a"b\\c\nd'
    metrics = LogMetrics("p").observe_all([Event(0.0, "arrive", 0, "k", tenant)])
    write_text(tmp_path / "warpwell.prom", metrics.render())
    found = parsed((tmp_path / "warpwell.prom").read_text())
    assert dict(next(iter(found["warpwell_tasks_arrived_total"])))["tenant"] == tenant
    assert [p.name for p in tmp_path.iterdir()] == ["warpwell.prom"]


def test_nothing_is_kept_of_tasks_that_ended() -> None:
    metrics = LogMetrics("p")
    for k in range(1000):
        metrics.observe(Event(k, "arrive", k, "k"))
        metrics.observe(Event(k, "launch", k, "k"))
        metrics.observe(Event(k + 0.5, "end", k, "k"))
    assert not metrics._unfinished
    counts = parsed(metrics.render())["warpwell_turnaround_seconds_count"]
    assert counts == {(("policy", "p"), ("tenant", "default")): 1000}


def hover_texts(log: Log) -> dict[tuple[str, int, float], str]:
    return {(e.kind, e.task, e.time): text for e, text in sentences(log)}


def test_explanations_say_why_with_figures() -> None:
    texts = hover_texts(sample())
    assert len(texts) == len(sample())
    assert texts["launch", 0, 0.0] == (
        "mvt (task 0) was launched on the idle device: it makes the best combination of all waiting tasks."
    )
    launch = texts["launch", 1, 0.1]
    assert "alongside mvt (task 0)" in launch and "4 workers" in launch
    preempt = texts["preempt", 1, 0.3]
    # T = 20 ms, C = 5 ms: 0.55 * 5 + 1.6 * 15 = 26.75 > 1.1 * 20 = 22
    for figure in (
        "for gemm (task 2)",
        "T = 20 ms",
        "C = 5 ms",
        "S0 = 1.1",
        "S1 = 1.6",
        "0.55",
        "26.75 ms > ",
        "22 ms",
        "4.75 ms of work gained",
    ):
        assert figure in preempt
    assert "instead of atax (task 1)" in texts["hold", 2, 0.2] and "C is not below T" in texts["hold", 2, 0.2]
    assert "a barrier, line 3" in texts["launch", 1, 1.0]
    assert "IndexRangeError" in texts["fail", 0, 1.2] and "The other tasks continue" in texts["fail", 0, 1.2]
    assert "because mvt (task 0), which comes before it, failed" in texts["cancel", 3, 1.2]
    assert texts["reject", 3, 0.4] == "huge of tenant b was refused: it needs 100 bytes and may have 10."
    assert "750 ms on the device and 1 preemption." in texts["end", 1, 1.5]


def test_a_launch_behind_another_says_so() -> None:
    log = Log()
    log.add(Event(0.0, "arrive", 0, "compute"))
    log.add(Event(0.0, "arrive", 1, "memory"))
    why = {"rule": "next", "co_runners": [0], "behind": 1, "workers": 4, "share": 0.5}
    log.add(Event(1.0, "launch", 2, "memory", why=why))
    assert hover_texts(log)["launch", 2, 1.0] == (
        "memory (task 2) was launched behind memory (task 1) alongside compute (task 0): it is the next of its class, "
        "and begins when that task has left; it gets 4 workers (share = 0.5)."
    )


def test_rules_that_nobody_put_into_words_keep_their_figures() -> None:
    log = Log()
    log.add(Event(0.0, "launch", 0, "k", why={"rule": "new rule", "co_runners": [7], "score": 0.125}))
    log.add(Event(0.0, "preempt", 0, "k", why={"rule": "other", "mode": "drain", "margin": 3}))
    log.add(Event(0.0, "lost", 0, "k", why={"reason": "it was killed"}))
    launch, preempt, lost = (text for _, text in sentences(log))
    assert "'new rule'" in launch and "score = 0.125" in launch and "task 7" in launch
    assert "'other'" in preempt and "margin = 3" in preempt
    assert "it was killed" in lost


def test_a_higher_priority_in_words() -> None:
    log = Log()
    for number, name in enumerate(("gemm", "mvt", "triad")):
        log.add(Event(0.0, "arrive", number, name))
    why = {"rule": "priority", "C": 0.5, "rest": 0.25, "victim": 1, "newcomer": 2}
    log.add(Event(4.0, "hold", 2, "triad", why=why))
    log.add(Event(5.0, "preempt", 1, "mvt", why={**why, "rest": 1, "for": 2, "mode": "drain"}))
    texts = hover_texts(log)
    assert "instead of mvt (task 1)" in texts["hold", 2, 4.0]
    assert "priority is higher (C = 0.5, rest = 0.25)" in texts["hold", 2, 4.0]
    assert "for triad (task 2)" in texts["preempt", 1, 5.0] and "bytes" not in texts["preempt", 1, 5.0]


def test_decisions_alone() -> None:
    kinds = {e.kind for e, _ in sentences(sample())} - set(QUIET)
    assert kinds == {"launch", "hold", "preempt", "reject", "fail", "cancel"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (0.0021, "2.1 ms"), (3e-6, "3 us"), (0.0, "0 us"), (-0.004, "-4 ms"), (math.inf, "forever")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
