"""The log drops its oldest events, hands events to subclasses, and can be read while it drops some."""

from __future__ import annotations

from warpwell.scheduler.events import Event, Log


def test_a_log_keeps_the_last_events_and_gives_a_subclass_each() -> None:
    class Counting(Log):
        count = 0

        def add(self, event: Event) -> None:
            self.count += 1
            super().add(event)

    logs = [Log(), Log(max_events=8), Counting()]
    for k in range(60):
        for log in logs:
            log.add(Event(float(k), "launch", k, "u", "b", {"p": 0}))
    every, last, counted = (log.events for log in logs)
    assert len(every) == len(logs[0]) == 60 and counted == every and logs[2].count == 60
    assert every[5] == Event(5.0, "launch", 5, "u", "b", {"p": 0})
    assert last == every[-len(last) :] and 8 <= len(logs[1]) <= 9 and logs[1].dropped + len(logs[1]) == 60


def test_events_are_consecutive_while_the_first_ones_are_dropped() -> None:
    log = Log(max_events=8)
    snapshots: list[list[int]] = []

    class Watched(list):  # type: ignore[type-arg] # a thread may read between any two changes
        def append(self, value: object) -> None:
            super().append(value)
            snapshots.append([event.task for event in log.events])

        def __delitem__(self, which: object) -> None:
            super().__delitem__(which)  # type: ignore[arg-type]
            snapshots.append([event.task for event in log.events])

    log._events = Watched()
    for k in range(60):
        log.add(Event(0.0, "launch", k, "u", "b", {}))
    assert len(snapshots) > 60
    for tasks in snapshots:
        assert tasks == list(range(tasks[0], tasks[-1] + 1))
