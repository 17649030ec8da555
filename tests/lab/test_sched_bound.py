"""The fluid bound of measured pairs, and the re-issue of kernels in the simulator."""

import pytest

from lab.sched.bound import bound
from lab.sched.rates import ClassTable, Matrix, Pair
from lab.sched.residency import ResidentKernel
from lab.sched.simulator import Simulator
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.extend import Capacity, Job, Kind, Placement, Request, Task

CAPACITY = Capacity()


def work(name: str, seconds: float | None) -> Task:
    return Task(name, 1, Profile(kind=Kind.MEMORY, seconds=seconds))


def test_the_bound_takes_the_best_pair_for_each_part_of_the_work() -> None:
    pytest.importorskip("scipy")
    pairs = Matrix([Pair("a", "b", (0.5, 0.5)), Pair("b", "a", (1.0, 0.5))])
    # Two seconds of `b` with `a` at half of its rate, and one more second of `a` solo.
    assert bound([work("a", 2.0), work("b", 1.0), work("b", 1.0)], pairs) == pytest.approx(4.0 / 3.0)
    assert bound([work("a", 2.0)], pairs) == pytest.approx(1.0)
    assert bound([work("c", 2.0), work("a", 1.0)], pairs) == pytest.approx(1.0)


@pytest.mark.parametrize("tasks", [[], [work("a", None)]])
def test_a_bound_of_nothing_is_refused(tasks: list[Task]) -> None:
    pytest.importorskip("scipy")
    with pytest.raises(errors.ArgumentError, match="task"):
        bound(tasks, Matrix([]))


@pytest.mark.parametrize("mode", ["drain", "switch"])
@pytest.mark.parametrize("younger", [False, True])
def test_a_reissued_kernel_is_younger_in_a_simulation(mode: str, younger: bool) -> None:
    simulator = Simulator(ClassTable(CAPACITY), CAPACITY, mode=mode, flag=0.0)
    profiles = {kind: Profile(kind=kind, seconds=20e-3, resident=1056, threads=256, registers=1 << 15) for kind in Kind}
    compute, memory = (
        Job(task := Task(kind.value, 105600, profiles[kind]), Request("r", [task]), 0.0)
        for kind in (Kind.COMPUTE, Kind.MEMORY)
    )
    simulator.launch(compute, Placement())
    simulator.wait(1e-3)
    simulator.launch(memory, Placement(workers=792))
    simulator.resize(compute, 264, younger)
    simulator.wait(10e-3)
    rates = [simulator.progress(job) / job.task.blocks for job in (compute, memory)]
    assert rates[1] > 0.4 if younger else rates[1] < 0.15  # solo, it does 0.45 in this time
    assert rates[0] > 0.4


def test_three_that_halve_each_other_have_a_third_each() -> None:
    pairs = Matrix([Pair("a", "a", (0.5, 0.5), shares) for shares in ((1.0, 1.0),)], ClassTable(CAPACITY))
    residents = [ResidentKernel("a", Profile(kind=Kind.MEMORY), 1.0)] * 3
    assert pairs.of(residents) == pytest.approx([1 / 3] * 3)
