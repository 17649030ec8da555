"""The memory of a scheduler is bounded, for any run time and any number of names."""

import io
import json
from typing import Any

import pytest

from lab.sched.rates import ClassTable, Matrix, Pair
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Profile, residency, tenants
from warpwell.scheduler.core import Core
from warpwell.scheduler.events import Event, Log
from warpwell.scheduler.executor import Capacity
from warpwell.scheduler.extend import Kind, Request, Task
from warpwell.scheduler.policies import POLICIES, live
from warpwell.scheduler.report.prometheus import MAX_TENANTS, OTHER_TENANTS, LogMetrics
from warpwell.scheduler.tenants import Tenants


def events(count: int) -> list[Event]:
    return [Event(float(k), "arrive", k, "k") for k in range(count)]


def test_a_log_keeps_all_or_the_last() -> None:
    every, last = Log(), Log(max_events=80)
    for event in events(1000):
        every.add(event)
        last.add(event)
        assert len(last) <= 90
    assert (len(every), every.dropped) == (1000, 0)
    assert len(last) == 80 and last.dropped == 920
    assert [e.task for e in last] == list(range(last.dropped, 1000))
    text = io.StringIO()
    last.write(text)
    assert json.loads(text.getvalue().splitlines()[0]) == {"about": {"dropped": last.dropped}}
    text.seek(0)
    assert len(Log.read(text)) == len(last)


@pytest.mark.parametrize("max_events", [0, -1, 2.5, True, "many"])
def test_a_log_of_a_length_that_cannot_be(max_events: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="max_events"):
        Log(max_events=max_events)


def tasks(core: Core, first: int, last: int) -> None:
    """Run tasks that are all different, in pairs, to their end."""
    for k in range(first, last, 2):
        made = [
            Task(
                f"k{i}",
                2048 + i,
                tenant=f"t{i}",
                profile=Profile(kind=kind, seconds=1e-3, resident=1056, bandwidth=0.5 + 1e-6 * i, need=1 - 1e-6 * i),
            )
            for i, kind in ((k, Kind.MEMORY), (k + 1, Kind.COMPUTE))
        ]
        for task in made:
            core.submit(Request("r", [task], core.executor.now()))
        while core.busy:
            core.executor.wait(core.step())


def tables(root: object) -> dict[str, int]:
    """Sizes of all containers that an object of the scheduler reaches by its attributes."""
    found: dict[str, int] = {}
    visited, todo = {id(root)}, [("", root)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict | list | set):
            found[path] = len(value)
        elif type(value).__module__.startswith("warpwell."):
            names = list(getattr(value, "__dict__", ())) + list(getattr(type(value), "__slots__", ()))
            for name in names:
                inner = getattr(value, name, None)
                if id(inner) not in visited:
                    visited.add(id(inner))
                    todo.append((f"{path}.{name}", inner))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_remembered_of_kernels_is_bounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (residency, live):
        monkeypatch.setattr(module, "REMEMBERED", 64)
    monkeypatch.setattr(tenants, "MAX_IDLE_TENANTS", 64)
    capacity = Capacity()
    table = Matrix([Pair("k", "k", (0.5, 0.5))], ClassTable(capacity))
    core = Core(Simulator(table, capacity, mode="drain"), name, keep=False, log=Log(kinds=()), rates=table)
    tasks(core, 0, 500)
    large = {name: size for name, size in tables(core).items() if size > 150}
    assert not large
    assert len(core.tenants) <= 64


def test_tenants_that_want_something_are_not_forgotten() -> None:
    accounts = Tenants(Capacity())
    held = accounts.account("holds")
    held.held = 1
    waiting = accounts.account("waits")
    accounts.add_waiting(waiting)
    for number in range(10_000):
        accounts.account(f"t{number}")
    assert len(accounts) <= tenants.MAX_IDLE_TENANTS
    assert accounts["holds"] is held and accounts["waits"] is waiting
    named = Tenants(Capacity(), {f"t{k}": 1 for k in range(2000)})
    assert len(named) == 2000, "tenants of the settings stay"


def test_a_request_of_more_tenants_than_are_remembered() -> None:
    core = Core(Simulator(ClassTable(), Capacity()), "lanes", keep=False, log=Log())
    count = tenants.MAX_IDLE_TENANTS + 10
    core.submit(Request("r", [Task("k", 1, Profile(Kind.MEMORY, 1e-3), tenant=f"t{k}") for k in range(count)]))
    while core.busy:
        core.executor.wait(core.step())
    assert sum(e.kind == "end" for e in core.log) == count


def test_metrics_are_of_so_many_tenants() -> None:
    metrics = LogMetrics("p")
    for number in range(MAX_TENANTS + 5):
        for kind in ("arrive", "launch", "end"):
            metrics.observe(Event(0.0, kind, number, "k", f"t{number}"))
    text = metrics.render()
    assert text.count("warpwell_launches_total{") == MAX_TENANTS + 1
    assert f'warpwell_launches_total{{policy="p",tenant="{OTHER_TENANTS}"}} 5' in text
