"""`Batch`: short launches in order as one task. Each launch is a block, so preemption happens between launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .task import Task

BATCH_LAUNCH_SECONDS = 0.3e-3
"""Solo time below which consecutive launches of a request become one task: about what a single submission costs the
host (H200: 0.15 to 0.4 ms a decision with its launch)."""


class Batch:
    """Launches that run one after the other in one stream.

    Parameters
    ----------
    tasks : sequence of Task
        The distinct launches.
    order : sequence of int
        Position in `tasks` of each launch.
    """

    def __init__(self, tasks: Sequence[Task], order: Sequence[int]) -> None:
        self.tasks = tasks
        self.order = order
        self.kernel = tasks[order[0]].launch.kernel

    def cut(self, args: Any, device: str) -> BatchBlocks:
        """Return the batch in the form of a `BlockLaunch`."""
        return BatchBlocks(self, device)


class BatchBlocks:
    """A `Batch` as executors see it: a `BlockLaunch` whose blocks are launches."""

    preemptible = True
    participants: tuple[Any, ...] = ()
    ends_at_once = True

    def __init__(self, launch: Batch, device: str) -> None:
        from ..targets import LaunchFlag  # an arbiter of programs starts sooner without NumPy, which this imports

        self.launch = launch
        self.device = device
        self.blocks = len(launch.order)
        self.flag = LaunchFlag(device)
        self._cuts: list[Any] = []

    def begin(self) -> None:
        """Begin the arguments of each launch. All arrays are in device memory."""
        for task in self.launch.tasks:
            cut = task.launch.cut(task.arguments, self.device)
            cut.begin()
            self._cuts.append(cut)

    def prepare(self) -> None:
        """Compile nothing: each launch has been measured, so it is compiled."""

    def end(self) -> None:
        """End the arguments; raise the first error that device code latched."""
        cuts, self._cuts = self._cuts, []
        failure: BaseException | None = None
        for cut in cuts:
            try:
                cut.end()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """Make loops of device code that ask `failed` end soon."""
        self.flag.interrupt()
        for cut in self._cuts:
            cut.abort()

    def forms_of(self, gpu: Any) -> BatchForms:
        """Return the compiled launches on a GPU, between `begin` and `end`."""
        return BatchForms([gpu.forms(cut) for cut in self._cuts], self.launch.order)

    def work(self, control: int, worker: int) -> None:
        """Run launches in the calling thread until no launch is left, or the thread must leave (CPU)."""
        import numpy as np

        from ..targets import view_of
        from ..targets.blocks import CONTROL_WORDS, CURSOR, DONE, STOP

        record = view_of(control, 8 * CONTROL_WORDS, np.int64)
        tasks, order = self.launch.tasks, self.launch.order
        while worker >= record[STOP] and record[CURSOR] < self.blocks:
            position = int(record[CURSOR])
            record[CURSOR] = position + 1
            task = tasks[order[position]]
            task.launch(*task.arguments, device="cpu", flag=self.flag)
            record[DONE] = position + 1


class BatchForms:
    """The compiled launches of a batch, as rows of a queue.

    Attributes
    ----------
    rows : list
        The row of each distinct kernel; None: Python launches it.
    can_withdraw : bool
        Whether a launch that was pushed to a queue can be withdrawn.
    """

    def __init__(self, forms: Sequence[Any], order: Sequence[int]) -> None:
        self.forms = forms
        self.order = order
        self.rows = [form.plain_row() for form in forms]
        self.can_withdraw = all(row is not None for row in self.rows)

    def resources(self, form: str) -> dict[str, int]:
        """Return the resources of the first launch."""
        return dict(self.forms[self.order[0]].resources("plain"))


def batched(tasks: Sequence[Task], order: Sequence[int], name: str, nbytes: int) -> Task:
    """Return one task for launches in order; `tasks` are the distinct launches, with arrays of `nbytes` bytes."""
    counts = Counter(order)
    seconds = [counts[index] * (task.profile.seconds or 0.0) for index, task in enumerate(tasks)]
    first, longest = tasks[0], tasks[seconds.index(max(seconds))]
    # An access that writes replaces a reading access of the same range.
    every = sorted((a for task in tasks for a in task.accesses), key=lambda a: a.writes)
    accesses = {(a.start, a.end, a.space): a for a in every}
    return Task(
        name,
        len(order),
        replace(longest.profile, seconds=sum(seconds)),
        launch=Batch(tasks, order),
        tenant=first.tenant,
        priority=first.priority,
        deadline=first.deadline,
        memory=max(nbytes, *[task.memory for task in tasks]),
        resident_bytes=nbytes,
        accesses=list(accesses.values()),
    )
