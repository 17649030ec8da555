"""The log keeps events of many tasks that are alike as one, and shows them as events."""

from __future__ import annotations

from warpwell.scheduler.events import Event, Log, Many


def test_events_of_many_are_shown_dropped_and_handed_on_as_those_of_one() -> None:
    class Theirs(Log):
        def add(self, event: Event) -> None:
            super().add(event)

    logs = [Log(), Log(most=8), Theirs(), Log(most=8)]
    for k in range(12):
        many = Many("end", "t", "a", range(4 * k, 4 * k + 4), [k + 0.25 * j for j in range(4)], {"p": 0}, "ran", "abcd")
        for log in logs[:3]:
            log.note_many(many)
            log.note([(k, "launch", k, "u", "b", {})])
        for j in range(4):
            logs[3].add(Event(k + 0.25 * j, "end", 4 * k + j, "t", "a", {"p": 0, "ran": "abcd"[j]}))
        logs[3].add(Event(k, "launch", k, "u", "b"))
    whole, last, theirs, one = (log.events for log in logs)
    assert len(whole) == len(logs[0]) == 60 and theirs == whole
    assert whole[5] == Event(1.0, "end", 4, "t", "a", {"p": 0, "ran": "a"})
    assert last == whole[-len(last) :] and one == whole[-len(one) :]
    for log in logs[1], logs[3]:
        assert 8 <= len(log) == len(log.events) <= 9 and log.dropped + len(log) == 60
    only = Log(most=1)
    only.note_many(Many("arrive", "t", "a", range(5), 1.0, {}))
    assert only.events == [Event(1.0, "arrive", 4, "t", "a")] and only.dropped == 4


def test_who_reads_while_the_first_events_are_dropped_sees_no_hole() -> None:
    log = Log(most=8)
    seen: list[list[int]] = []

    class Watched(list):  # type: ignore[type-arg] # a thread may read between any two changes
        def __setitem__(self, *args: object) -> None:
            super().__setitem__(*args)  # type: ignore[arg-type]
            seen.append([event.task for event in log.events])

        def __delitem__(self, which: object) -> None:
            super().__delitem__(which)  # type: ignore[arg-type]
            seen.append([event.task for event in log.events])

    log._noted = Watched()
    for k in range(0, 60, 5):
        log.note([(0.0, "launch", k, "u", "b", {})])
        log.note_many(Many("end", "t", "a", range(k + 1, k + 5), 1.0, {}))
    assert seen
    for tasks in seen:
        assert tasks == list(range(tasks[0], tasks[-1] + 1))
