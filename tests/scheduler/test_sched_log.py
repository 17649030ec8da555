"""The log drops its oldest events, hands events to subclasses, and can be read while it drops some."""

from __future__ import annotations

import threading

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

    def add() -> None:
        for k in range(20_000):
            log.add(Event(0.0, "launch", k, "u", "b", {}))

    writer = threading.Thread(target=add)
    writer.start()
    while writer.is_alive():
        tasks = [event.task for event in log.events]
        assert len(tasks) <= 8 and (not tasks or tasks == list(range(tasks[0], tasks[-1] + 1)))
    assert [event.task for event in log.events] == list(range(19_992, 20_000)) and log.dropped == 19_992
