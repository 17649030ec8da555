"""Chimera and SMK-DRF: decisions and schedules worked by hand, and the rules that hold for every policy."""

import dataclasses

import pytest

from lab.sched.metrics import measure
from lab.sched.policies import BASELINES, make_policy
from lab.sched.policies.chimera import Chimera
from lab.sched.policies.smk_drf import SmkDrf, dominant_share_counts
from lab.sched.rates import RateModel
from lab.sched.replay import replay
from lab.sched.simulator import Simulator
from lab.testing.policies import PolicyConformance
from warpwell import errors
from warpwell.scheduler import Policy, Profile
from warpwell.scheduler.extend import Capacity, Core, Job, Kind, Request, SourceModel, Task

WAVE = 1056
"""Blocks that the device holds: 8 on each of 132 multiprocessors."""
CAPACITY = Capacity()
SWITCH = 10e-6
"""Seconds to save the blocks of a kernel."""
MODEL = SourceModel(0.0, SWITCH * CAPACITY.clock / (8 * Profile().registers))


class LinearRates(RateModel):
    """A device on which the rate of a kernel is its share of the blocks."""

    name = "linear"

    def of(self, residents):
        return [resident.share for resident in residents]


def request(name: str, milliseconds: float, arrival: float = 0.0, waves: int = 10, priority: int = 0) -> Request:
    """Return a request of one kernel; `arrival` is in milliseconds."""
    task = Task(name, waves * WAVE, Profile(Kind.COMPUTE, 1e-3 * milliseconds), priority=priority)
    return Request(name, [task], 1e-3 * arrival)


def ends(policy: Policy, requests: list[Request], *, limit: int = 2, model: SourceModel = MODEL) -> dict[str, float]:
    """Return the milliseconds at which kernels end."""
    simulator = Simulator(LinearRates(CAPACITY), model=model, flag=0.0)
    result = replay(requests, Core(simulator, policy, limit=limit, rates=LinearRates(CAPACITY)))
    return {job.task.name: 1e3 * (job.ended or 0.0) for job in result.jobs}


FREE = dataclasses.replace(MODEL, base=0.0)
"""Switches that take no time."""


@pytest.mark.parametrize("name", BASELINES)
def test_kernels_share_evenly_while_both_run(name: str) -> None:
    """The first runs solo for 1 of 2 ms. Both have half until the second, of 0.5 ms, ends at 2 ms."""
    found = ends(make_policy(name), [request("first", 2.0), request("second", 0.5, 1.0)], model=FREE)
    assert found == pytest.approx({"second": 2.0, "first": 2.5})


@pytest.mark.parametrize("name", BASELINES)
def test_third_kernel_waits_for_a_place(name: str) -> None:
    """Two run at half rate and end at 1 and 1.5 ms; the third begins at 1 ms, and is solo from 1.5 ms on."""
    requests = [request("a", 0.5), request("b", 0.75), request("c", 1.0)]
    assert ends(make_policy(name), requests, model=FREE) == pytest.approx({"a": 1.0, "b": 1.5, "c": 2.25})


SWITCHED = {"urgent": 4.41, "victim": 11.02}
"""The victim of 10 waves of 1 ms leaves after 3.4 ms; saving takes 10 us, the urgent kernel 1 ms, restoring 10 us."""
FLUSHED = {"urgent": 4.4, "victim": 11.4}
"""The victim leaves at once; 0.4 ms of its fourth wave run twice."""
DRAINED = {"urgent": 5.0, "victim": 11.0}
"""The victim leaves at the end of its fourth wave."""


@pytest.mark.parametrize(
    ("bound", "idempotent", "expected"),
    [
        (15e-6, (), SWITCHED),
        (15e-6, ("victim",), SWITCHED),  # a switch loses 20 us, a flush 400 us
        (5e-6, (), SWITCHED),  # no technique meets the bound, so the fastest is chosen
        (5e-6, ("victim",), FLUSHED),
        (5e-6, ("urgent",), SWITCHED),
        (1e-3, ("victim",), DRAINED),  # a drain takes 0.6 ms, and loses no work
    ],
)
def test_chimera_chooses_the_technique_by_its_bound(
    bound: float, idempotent: tuple[str, ...], expected: dict[str, float]
) -> None:
    requests = [request("victim", 10.0), request("urgent", 1.0, 3.4, priority=1)]
    policy = Chimera(bound=bound, idempotent=idempotent)
    assert ends(policy, requests, limit=1) == pytest.approx(expected, rel=1e-6)


def test_chimera_flushes_blocks_that_have_just_begun() -> None:
    """After 5 us of a wave, a flush loses less than the 20 us of a switch: 1 + 3.005 ms, and 7 ms after that."""
    requests = [request("victim", 10.0), request("urgent", 1.0, 3.005, priority=1)]
    found = ends(Chimera(idempotent=["victim"]), requests, limit=1)
    assert found == pytest.approx({"urgent": 4.005, "victim": 11.005})


def test_chimera_preempts_only_for_a_higher_priority() -> None:
    requests = [request("first", 1.0), request("equal", 1.0, 0.1), request("urgent", 1.0, 0.2, priority=1)]
    found = ends(Chimera(), requests, limit=1, model=FREE)
    assert found == pytest.approx({"urgent": 1.2, "first": 2.0, "equal": 3.0})


def jobs(*profiles: Profile, blocks: int = 100_000) -> list[Job]:
    """Return jobs of kernels that hold these resources."""
    return [Job(task := Task(f"{k}", blocks, profile), Request("r", [task]), 0.0) for k, profile in enumerate(profiles)]


def test_smk_drf_gives_the_smallest_dominant_share_the_next_block() -> None:
    """Blocks of an eighth of registers and threads, and of a sixteenth of both with 64 of 227 KiB of shared memory.

    Shares in turn: .125 and .282, then .375, .564, .625, .846, .75. A seventh block of the first needs 17/16 of the
    registers, a fourth one of the second 256 KiB.
    """
    small = Profile(registers=32 << 10, threads=256, resident=8 * 132)
    shared = Profile(registers=16 << 10, threads=128, shared=64 << 10, resident=3 * 132)
    assert dominant_share_counts(jobs(small, shared), CAPACITY) == [6, 3]
    assert dominant_share_counts(jobs(shared, small), CAPACITY) == [3, 6]


def test_smk_drf_counts_threads_and_block_slots() -> None:
    """Blocks of half the threads, and blocks that need nothing but one of 32 slots: 16 of these have the same share."""
    threads = Profile(registers=0, threads=1024, resident=2 * 132)
    slots = Profile(registers=0, threads=0, resident=32 * 132)
    assert dominant_share_counts(jobs(threads, slots), CAPACITY) == [2, 30]
    assert dominant_share_counts(jobs(slots, slots), CAPACITY) == [16, 16]
    assert dominant_share_counts(jobs(threads, threads), CAPACITY) == [1, 1]


def test_smk_drf_gives_a_small_kernel_no_more_than_it_has() -> None:
    small = Profile(registers=32 << 10, threads=256, resident=8 * 132)
    assert dominant_share_counts([*jobs(small, blocks=200), *jobs(small)], CAPACITY) == [2, 6]


def test_smk_drf_lets_a_kernel_wait_whose_blocks_do_not_fit() -> None:
    """Blocks that hold all shared memory of a multiprocessor run one kernel after the other."""
    huge = Profile(Kind.COMPUTE, 1e-3, shared=227 << 10, resident=132)
    requests = [Request(f"{k}", [Task(f"{k}", 1320, huge)]) for k in range(2)]
    assert ends(SmkDrf(), requests, model=FREE) == pytest.approx({"0": 1.0, "1": 2.0})


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="'orion'"):
        make_policy("orion")


def test_flush_runs_the_lost_blocks_again() -> None:
    simulator = Simulator(LinearRates(CAPACITY), model=MODEL)
    core = Core(simulator, "source", rates=LinearRates(CAPACITY))
    job = core.submit(request("a", 10.0))[0]
    core.step()
    simulator.wait(3.4e-3)
    simulator.preempt(job, "flush")
    while core.busy:
        simulator.wait(core.step())
    assert [event.why["done"] for event in core.log if event.kind == "stop"] == [3 * WAVE]
    assert measure([job], core.log).makespan == pytest.approx(10.4e-3)


class TestChimera(PolicyConformance):
    def make(self) -> Policy:
        return Chimera(idempotent=["memory"])


class TestSmkDrf(PolicyConformance):
    def make(self) -> Policy:
        return SmkDrf()
