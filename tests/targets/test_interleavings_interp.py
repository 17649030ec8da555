"""Queues and cache under seeded interleavings: no violation without a fault, and every planted fault is found.

``make interleavings`` runs 10,000 of each scenario.
"""

import json

import pytest

from lab.campaigns.interleavings import FAULT_RUNS, SCENARIOS, explore, find, interleave, main
from lab.campaigns.models.cache_model import CacheModel
from lab.campaigns.models.drive_model import DriveModel
from lab.campaigns.models.faults_planted import FAULTS, HARMLESS, Edit, Fault, planted
from lab.campaigns.models.frame_model import FrameModel
from lab.campaigns.models.gather_model import GatherModel
from lab.campaigns.models.key_value_model import KeyValueModel
from lab.campaigns.models.known_model import KnownModel
from lab.campaigns.models.kv_device_model import StoreModel
from lab.campaigns.models.loss_models import LiesModel, LossModel
from lab.campaigns.models.pin_models import PinModel, ResidentModel
from lab.campaigns.models.queue_model import QueueModel
from lab.campaigns.models.recover_model import RecoverModel
from lab.campaigns.models.ring_model import RingModel
from lab.campaigns.models.span_model import SpanModel
from warpwell.cache import word

SEEDS = {0: range(5)} | {k: range(5 + 51 * (k - 1), 5 + 51 * k) for k in range(1, 5)}
"""Chunk -> its seeds. The first chunk runs in `make test`."""

ONE_PER_SCENARIO = """
    recheck-removed fence-removed doorbell-relaxed run-not-acquired
    any-cid-believed old-entries-kept generation-kept completion-before-value
    silence-starves launch-begins-late version-ignored first-acquire-relaxed
    credit-too-many run-dirty-forgotten span-escapes row-without-a-second-look
    units-generation-ignored drive-answered-early kept-not-dirty generation-too-late
    claim-forgotten
""".split()
"""The planted fault of each scenario that is found soonest."""


@pytest.mark.parametrize("chunk", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in SEEDS if k)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_violation(scenario: str, chunk: int) -> None:
    violations = [o for o in explore(scenario, SEEDS[chunk]) if o.violation is not None]
    assert not violations, "\n".join(f"seed {o.seed}: {o.violation}" for o in violations)


@pytest.mark.parametrize(("scenario", "seed"), [("workers", 2495)])
def test_a_seed_that_found_a_defect_finds_none(scenario: str, seed: int) -> None:
    assert interleave(scenario, seed).violation is None


@pytest.mark.quick(*ONE_PER_SCENARIO)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    found = find(fault, fault.seed)
    assert found.seed is not None, f"{fault.description}: not found in {FAULT_RUNS} interleavings"


@pytest.mark.quick("head-before-key")
@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: fault.name)
def test_a_harmless_change_violates_nothing(fault: Fault) -> None:
    assert find(fault, runs=20).violation is None


@pytest.mark.quick("QueueModel", "CacheModel")
@pytest.mark.parametrize(
    "model",
    [
        QueueModel,
        LiesModel,
        LossModel,
        RingModel,
        CacheModel,
        FrameModel,
        SpanModel,
        GatherModel,
        ResidentModel,
        PinModel,
        KnownModel,
        KeyValueModel,
        StoreModel,
        DriveModel,
        RecoverModel,
    ],
)
def test_a_seed_replays(model: type) -> None:
    def run(seed: int) -> tuple:
        made = model(seed)
        return made.check(), made.run.trace_hash

    for seed in range(3):
        assert run(seed) == run(seed)


def test_a_fault_is_gone_after_its_block() -> None:
    fault = next(f for f in FAULTS if f.name == "generation-of-2-bits")
    with planted(fault):
        assert word.generation_of(word.evicted(word.pack(0, 3, word.VALID))) == 0
    assert word.generation_of(word.evicted(word.pack(0, 3, word.VALID))) == 4


def test_a_fault_whose_text_is_gone_is_an_error() -> None:
    fault = Fault("none", "queue", "", (Edit("queues.submission", "ring", "no such text", ""),))
    with pytest.raises(LookupError, match="0 places"), planted(fault):
        pass


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "1", "--seed", "7", "--processes", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    summaries = [(r["scenario"], r["first_seed"], r["runs"], r["violations"]) for r in results]
    assert summaries == [(scenario, 7, 1, []) for scenario in SCENARIOS]
    assert main(["--replay", "7", "--scenario", "queue"]) == 0
    assert "no violation" in capsys.readouterr().out
    assert main(["--faults", "phase-relaxed"]) == 0
    assert "phase-relaxed" in capsys.readouterr().out


def test_a_violation_says_where() -> None:
    fault = next(f for f in FAULTS if f.name == "phase-relaxed")
    found = find(fault)
    assert found.seed is not None
    with planted(fault):
        outcome = interleave("queue", found.seed, trace=20)
    assert outcome.violation is not None and "last accesses" in outcome.violation and "seed" in outcome.violation


def test_each_scenario_has_a_fault_in_make_test() -> None:
    assert sorted(f.scenario for f in FAULTS if f.name in ONE_PER_SCENARIO) == sorted(SCENARIOS)
