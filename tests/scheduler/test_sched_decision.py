"""The source's decision rule: cases worked by hand, the cost formula, and the same through the policy."""

import json
import math

import pytest
from tests.harness.scripted_executor import ScriptedExecutor

from lab.sched.fitting import read_model, write_model
from warpwell import errors
from warpwell.scheduler import Profile
from warpwell.scheduler.core import Core
from warpwell.scheduler.decision import SOURCE, SourceModel, gain, together, worth
from warpwell.scheduler.extend import Capacity, Kind, Request, Task
from warpwell.scheduler.policies.source import Source

M, C = Kind.MEMORY, Kind.COMPUTE

# Preempt iff C < T and d * n * C + S1 * (T - C) > S0 * T, that is iff C < T and (S1 - S0) * T > (S1 - d * n) * C.
CASES = {
    # The design's example: 0.50 * T > 1.05 * C, so T > 2.1 C.
    "example, just long enough": (dict(s0=1.10, n=0.55, s1=1.60, t=211, c=100, d=1.0), True),  # 105.5 > 105
    "example, just too short": (dict(s0=1.10, n=0.55, s1=1.60, t=209, c=100, d=1.0), False),  # 104.5 < 105
    # A memory-intensive kernel stays, d = 0.90: 0.50 * T > (1.60 - 0.495) * C = 1.105 C, so T > 2.21 C.
    "memory stays, long enough": (dict(s0=1.10, n=0.55, s1=1.60, t=2220, c=1000, d=0.90), True),  # 1110 > 1105
    "memory stays, too short": (dict(s0=1.10, n=0.55, s1=1.60, t=2200, c=1000, d=0.90), False),  # 1100 < 1105
    # The source's bounds for d, at T = 2.2 C: 0.97 needs (1.60 - 0.5335) / 0.5 = 2.133 C, 0.83 needs 2.287 C.
    "least decay of memory": (dict(s0=1.10, n=0.55, s1=1.60, t=220, c=100, d=0.97), True),
    "most decay of memory": (dict(s0=1.10, n=0.55, s1=1.60, t=220, c=100, d=0.83), False),
    # Two memory-intensive ones (0.48 each); compute comes, memory stays: 0.98 T > (1.94 - 0.432) C, so T > 1.5388 C.
    "memory + memory becomes memory + compute": (dict(s0=0.96, n=0.48, s1=1.94, t=1.54e6, c=1e6, d=0.90), True),
    "the same, a little too late": (dict(s0=0.96, n=0.48, s1=1.94, t=1.53e6, c=1e6, d=0.90), False),
    # Two compute-intensive ones (0.95 + 0.10); memory comes, the faster stays: 0.75 T > (1.80 - 0.95) C, T > 1.1333 C.
    "compute + compute, memory comes": (dict(s0=1.05, n=0.95, s1=1.80, t=115, c=100, d=1.0), True),
    "compute + compute, memory comes too late": (dict(s0=1.05, n=0.95, s1=1.80, t=113, c=100, d=1.0), False),
    # Nothing to gain for any T.
    "a worse combination": (dict(s0=1.60, n=0.80, s1=1.10, t=1e9, c=1, d=1.0), False),
    "an equal combination": (dict(s0=1.10, n=0.55, s1=1.10, t=1e9, c=1, d=1.0), False),
    # C >= T: the running pair ends before the preemption does, however good the next pair would be.
    "as long as the remaining time": (dict(s0=0.50, n=1.0, s1=2.00, t=100, c=100, d=1.0), False),  # though 100 > 50
    "longer than the remaining time": (dict(s0=0.10, n=1.0, s1=2.00, t=50, c=100, d=1.0), False),
    "a free preemption": (dict(s0=1.10, n=0.55, s1=1.11, t=1, c=0, d=0.90), True),
    "nothing left": (dict(s0=1.10, n=0.55, s1=1.60, t=0, c=0, d=1.0), False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule_by_hand(case: str) -> None:
    figures, preempts = CASES[case]
    assert worth(**figures) is preempts


def test_the_gain_is_what_the_rule_compares() -> None:
    # 1 * 0.55 * 100 + 1.60 * (300 - 100) - 1.10 * 300 = 55 + 320 - 330
    assert gain(1.10, 0.55, 1.60, 300, 100, 1.0) == pytest.approx(45.0)


def test_kernels_that_never_part_make_any_better_combination_worth_it() -> None:
    assert together([1.0, 1.0], [0.0, 0.0]) == math.inf
    assert worth(1.0, 0.5, 1.1, math.inf, 10.0, 1.0)
    assert not worth(1.0, 0.5, 1.0, math.inf, 10.0, 1.0)


def test_the_time_together_ends_with_the_first() -> None:
    # 6 alone-seconds at half speed are 12, 4 at 0.8 are 5
    assert together([6.0, 4.0], [0.5, 0.8]) == pytest.approx(5.0)
    assert together([], []) == 0.0


def test_cycles_of_a_preemption_by_hand() -> None:
    # (0.09526 * 0.5 + 0.01633) * (32768 + 16384) * 16 = 0.06396 * 786432
    assert SOURCE.preempt_cycles(0.5, 32768, 16384, 16) == pytest.approx(50300.19, rel=1e-7)
    # without misses 61 bytes a cycle, with nothing but misses 9.0 (notes)
    assert 1 / SOURCE.preempt_cycles(0.0, 1, 0, 1) == pytest.approx(61.24, rel=1e-3)
    assert 1 / SOURCE.preempt_cycles(1.0, 1, 0, 1) == pytest.approx(8.961, rel=1e-3)


def test_the_source_constants_are_the_defaults() -> None:
    assert (SOURCE.slope, SOURCE.base, SOURCE.memory_decay, SOURCE.compute_decay) == (0.09526, 0.01633, 0.90, 1.0)
    assert SOURCE.r2 is None, "the source states none"
    assert (SOURCE.decay(C), SOURCE.decay(M), SOURCE.decay(None)) == (1.0, 0.90, 0.90)


def test_fitted_constants_replace_them(tmp_path) -> None:
    fitted = SourceModel(slope=0.1, base=0.02, memory_decay=0.85, r2=0.98, origin="H100")
    write_model(fitted, tmp_path / "model.json")
    assert read_model(tmp_path / "model.json") == fitted
    assert fitted.preempt_cycles(1.0, 100, 0, 1) == pytest.approx(12.0)
    assert fitted.decay(M) == 0.85


@pytest.mark.parametrize("text", ["", "[1]", '{"speed": 1}', '{"slope": "fast"}', '{"slope": -1}', '{"slope": NaN}'])
def test_a_file_that_holds_no_model_is_refused(tmp_path, text) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(errors.FormatError, match=r"model\.json"):
        read_model(path)


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(errors.MissingFileError, match="give a cost model"):
        read_model(tmp_path / "none.json")


def test_constants_that_cannot_be() -> None:
    with pytest.raises(errors.ArgumentError, match="memory_decay"):
        SourceModel(memory_decay=1.5)
    assert json.loads(json.dumps(SourceModel().__dict__))["slope"] == 0.09526


# -- the same through the policy ----------------------------------------------------------------------------


class Table:
    """Normalized IPC by the running classes, in any order."""

    name = "by hand"

    def together(self, jobs, placements):
        rates = {"C": [1.0], "M": [1.0], "CC": [0.55, 0.55], "MM": [0.55, 0.55], "CM": [0.80, 0.80]}
        return list(rates["".join(sorted("M" if j.task.profile.kind is M else "C" for j in jobs))])


def weighed(running, newcomer, *, seconds, cost, **options):
    """Let two kernels run, let a third arrive, and return what the log says of it."""
    core = Core(ScriptedExecutor(Capacity(modes=("drain", "switch")), cost=cost), Source(**options), rates=Table())
    for kind, length in zip(running, seconds, strict=True):
        core.submit(Request("r", [Task(kind.value, 1000, Profile(kind=kind, seconds=length))]))
    core.step()
    assert len(core.running) == 2
    core.submit(Request("new", [Task("new", 1000, Profile(kind=newcomer, seconds=1.0))]))
    core.step()
    return [event for event in core.log if event.kind in ("preempt", "hold")]


@pytest.mark.parametrize(
    ("running", "newcomer", "d", "limit"),
    [((C, C), M, 1.0, 2.1), ((M, M), C, 0.90, 2.21)],
    ids=["compute stays", "memory stays"],
)
def test_the_policy_preempts_from_the_threshold_on(running, newcomer, d, limit) -> None:
    # S0 = 1.10, n = 0.55, S1 = 1.60. T is the shorter rest over its rate: 5.5 s alone at 0.55 are 10 s.
    for factor, kind in ((1.01, "preempt"), (0.99, "hold")):
        cost = 10.0 / (limit * factor)
        (event,) = weighed(running, newcomer, seconds=(5.5, 11.0), cost=cost)
        assert event.kind == kind
        why = event.why
        assert why["S0"] == pytest.approx(1.10) and why["S1"] == pytest.approx(1.60)
        assert why["n"] == pytest.approx(0.55) and why["d"] == d
        assert why["T"] == pytest.approx(10.0) and why["C"] == pytest.approx(cost)
        assert (why["gain"] > 0) is (kind == "preempt")


def test_the_policy_weighs_only_better_combinations() -> None:
    assert weighed((M, C), C, seconds=(5.0, 5.0), cost=0.0) == [], "nothing is better than memory + compute"
    assert weighed((M, C), M, seconds=(5.0, 5.0), cost=0.0) == []
    assert weighed((C, C), C, seconds=(5.0, 5.0), cost=0.0) == [], "an equal one is not better"


def test_the_policy_does_not_preempt_without_a_prediction() -> None:
    core = Core(ScriptedExecutor(truth=Truth()), Source(), rates=Table())
    for kind in (C, C):
        core.submit(Request("r", [Task(kind.value, 1000, Profile(kind=kind, seconds=None))]))
    core.step()
    core.submit(Request("new", [Task("new", 1000, Profile(kind=M, seconds=1.0))]))
    core.step()
    (event,) = [event for event in core.log if event.kind in ("preempt", "hold")]
    assert event.kind == "hold" and event.why["rule"] == "no prediction"


class Truth(dict):
    def get(self, task, default=None):
        return Profile(kind=task.profile.kind, seconds=10.0)


def test_what_is_too_dear_is_not_done() -> None:
    assert weighed((C, C), M, seconds=(1.0, 1.0), cost=9.0)[0].kind == "hold"  # C >= T


def test_below_the_limit_the_best_combination_is_launched_whatever_the_order() -> None:
    core = Core(ScriptedExecutor(), Source(), rates=Table())
    for name, kind in (("a", C), ("b", C), ("c", M)):
        core.submit(Request("r", [Task(name, 1000, Profile(kind=kind, seconds=1.0))]))
    core.step()
    assert core.running[1].task.name == "c"


def test_a_preempted_kernel_goes_before_new_ones_at_equal_rank() -> None:
    # memory + memory run, compute replaces one; when compute has ended, a new memory-intensive one waits too
    core = Core(ScriptedExecutor(), Source(), rates=Table())
    for name in ("m0", "m1"):
        core.submit(Request("r", [Task(name, 10000, Profile(kind=M, seconds=10.0))]))
    core.step()
    core.submit(Request("c", [Task("c", 1000, Profile(kind=C, seconds=1.0))]))
    core.submit(Request("m2", [Task("m2", 1000, Profile(kind=M, seconds=1.0))]))
    while len([e for e in core.log if e.kind == "launch"]) < 4:
        core.executor.wait(core.step())
    (victim,) = [e.name for e in core.log if e.kind == "preempt"]
    assert [e.name for e in core.log if e.kind == "launch"] == ["m0", "m1", "c", victim], "not m2, which is new"


def test_below_the_limit_part_of_what_runs_makes_room_without_a_test_of_the_cost() -> None:
    executor = ScriptedExecutor(cost=1e9)
    core = Core(executor, Source(), rates=Table())
    core.submit(Request("a", [Task("a", 10**5, Profile(kind=M, seconds=1.0))]))
    core.step()
    core.submit(Request("b", [Task("b", 10**5, Profile(kind=C, seconds=1.0))]))
    core.step()
    (_, _, first), (_, _, halved), (_, _, second) = executor.calls
    assert first.workers is None
    assert halved == second.workers == 4 * 132, "half of 8 blocks on each of 132 multiprocessors"
    # A small job takes free workers, and no running job must make room.
    executor = ScriptedExecutor()
    core = Core(executor, Source(), rates=Table())
    for name, blocks in (("a", 500), ("b", 500)):
        core.submit(Request(name, [Task(name, blocks, Profile(kind=M, seconds=1.0))]))
    core.step()
    assert [call[0] for call in executor.calls] == ["launch", "launch"]
