"""Queue pairs as the host sees them: PRP lists, the loss record, abort and rewind."""

from __future__ import annotations

import numpy as np
import pytest

from warpwell import errors
from warpwell.nvme import completion_word1
from warpwell.queues import QueuePairs
from warpwell.queues import layout as at
from warpwell.targets import memory_for


def pairs_of(**options: object) -> QueuePairs:
    return QueuePairs(memory_for("cpu"), **{"count": 2, "depth": 64, "staging_bytes": 4096, **options})  # type: ignore[arg-type]


def record(pairs: QueuePairs, index: int) -> np.ndarray:
    return pairs._device.words[index * at.Q_WORDS :][: at.Q_WORDS]


@pytest.mark.parametrize(
    ("staging", "entries"), [(512, 0), (4096, 0), (8192, 0), (16384, 3), (1 << 16, 15), (2 << 20, 511)]
)
def test_lists_name_the_pages_of_staging_and_cross_no_page(staging: int, entries: int) -> None:
    pairs = pairs_of(staging_bytes=staging, lists=True)
    for index in range(2):
        fields = record(pairs, index)
        assert fields[at.Q_SQ] % 4096 == fields[at.Q_CQ] % 4096 == fields[at.Q_STAGING] % 4096 == 0
        assert fields[at.Q_LISTS] != 0
        for cid in range(pairs.ids if entries else 0):
            address = int(fields[at.Q_LISTS]) + (cid << int(fields[at.Q_LIST_SHIFT]))
            assert address // 4096 == (address + 8 * entries - 1) // 4096
            found = pairs._shared.words[(address - pairs._shared.address) // 8 :][:entries]
            staging_start = int(fields[at.Q_STAGING]) + cid * staging
            assert (found == staging_start + 4096 * np.arange(1, entries + 1)).all()


def test_without_lists_there_are_none() -> None:
    pairs = pairs_of(staging_bytes=1 << 16)
    assert record(pairs, 0)[at.Q_LISTS] == 0


@pytest.mark.parametrize("options", [{"depth": 32}, {"staging_bytes": (2 << 20) + 4096}])
def test_lists_that_a_controller_could_not_follow_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(errors.ArgumentError):
        pairs_of(lists=True, **options)


def test_doorbells_are_those_of_the_records() -> None:
    pairs = pairs_of()
    for index, (tail, head) in enumerate(pairs.doorbells()):
        assert (record(pairs, index)[at.Q_SQ_DOORBELL], record(pairs, index)[at.Q_CQ_DOORBELL]) == (tail, head)
        assert head - tail >= 64


def test_a_queue_may_have_another_identifier() -> None:
    pairs = pairs_of()
    pairs.set_queue_id(1, 7)
    fields = record(pairs, 1)
    assert fields[at.Q_SQID] == pairs.ports[1, at.P_SQID] == 7
    fields[at.Q_IN_USE] = 1
    first = (int(fields[at.Q_IDS]) - pairs._device.address) // 8
    pairs._device.words[first + at.ID_STATE], pairs._device.words[first + at.ID_OPCODE] = at.TAKEN, 2
    assert pairs.opcodes_in_use() == {2} and pairs.abort() == 1
    word1 = pairs._shared.words[(int(fields[at.Q_CQ]) - pairs._shared.address) // 8 + 1]
    assert word1 == completion_word1(0, 7, 0, 1, 0x371)


def test_the_first_reason_of_a_loss_is_kept() -> None:
    pairs = pairs_of()
    assert pairs.loss() is None
    pairs.lose("its process ended")
    pairs.lose("it does not answer")
    assert pairs.loss() == "its process ended" and pairs._loss[at.LOSS_KIND] == at.LOST


@pytest.mark.parametrize(
    ("sqhd", "sqid", "cid", "message"),
    [
        (0, 2, 45, "command 45 was not in flight"),
        (64, 2, 1, "head is 64 of 64"),
        (0, 9, 1, "names submission queue 9"),
        (3, 2, 5, "command 5 was not in flight"),
    ],
)
def test_a_bad_completion_is_told_in_words(sqhd: int, sqid: int, cid: int, message: str) -> None:
    pairs = pairs_of()
    pairs._loss[: at.LOSS_ENTRY + 1] = at.BAD_COMPLETION, 2, completion_word1(sqhd, sqid, cid, 1, 0x281)
    loss = pairs.loss()
    assert loss is not None and message in loss and "queue 2" in loss and "unrecovered read error" in loss


def test_a_word_that_a_relay_stored_is_a_loss() -> None:
    pairs = pairs_of()
    pairs._shared.words[(pairs.loss_address - pairs._shared.address) // 8 + at.LOSS_KIND] = at.LOST
    loss = pairs.loss()
    assert loss is not None and "does not respond" in loss


def test_ids_in_flight_are_aborted_and_nothing_is_rewound_before() -> None:
    pairs = pairs_of()
    states = {0: at.TAKEN, 3: at.ASYNC | (64 << 8), 31: at.ORPHAN, 7: at.DONE | (5 << 8)}
    fields = record(pairs, 1)
    fields[at.Q_IN_USE] = len(states)
    first = (int(fields[at.Q_IDS]) - pairs._device.address) // 8
    for cid, state in states.items():
        pairs._device.words[first + cid * at.ID_WORDS + at.ID_STATE] = state
    fields[at.Q_TICKET] = fields[at.Q_TAIL] = fields[at.Q_CQ_HEAD] = 77
    assert pairs.abort() == 3
    ring = pairs._shared.words[(int(fields[at.Q_CQ]) - pairs._shared.address) // 8 :][: 2 * 64].reshape(64, 2)
    assert [int(entry) for entry in ring[:4, 1]] == [
        completion_word1(0, 2, cid, 1, 0x371) for cid in (0, 64 + 3, 31)
    ] + [0]
    assert (fields[at.Q_TICKET], fields[at.Q_TAIL], fields[at.Q_CQ_HEAD]) == (0, 0, 0)
    with pytest.raises(errors.SharingError, match="4 command ids are in use"):
        pairs.rewind()


def test_rewound_queues_are_as_new() -> None:
    pairs, fresh = pairs_of(), pairs_of()
    for index in range(2):
        fields = record(pairs, index)
        fields[[at.Q_TICKET, at.Q_TAIL, at.Q_CQ_LOCK, at.Q_CQ_HEAD, at.Q_SQ_HEAD, at.Q_READY_TAIL, at.Q_READY_HEAD]] = 5
        for area in (at.Q_TURNS, at.Q_MARKS):
            pairs._device.words[(int(fields[area]) - pairs._device.address) // 8 :][: pairs.depth] = 9
        rings = (int(fields[at.Q_SQ]) - pairs._shared.address) // 8
        pairs._shared.words[rings : rings + 80 * 64 // 8] = -1
        for doorbell in (at.Q_SQ_DOORBELL, at.Q_CQ_DOORBELL):
            pairs._shared.words[(int(fields[doorbell]) - pairs._shared.address) // 8] = 5
    pairs.ports[:, at.P_SQ_HEAD] = pairs.ports[:, at.P_CQ_TAIL] = 40
    pairs._device.words[(pairs.progress - pairs._device.address) // 8 + 1] = 1
    pairs.lose("gone")
    pairs.rewind()
    for rewound, new in ((pairs._device, fresh._device), (pairs._shared, fresh._shared)):
        addresses = (new.words > 1 << 20) | (rewound.words > 1 << 20)
        assert (rewound.words[~addresses] == new.words[~addresses]).all() and pairs.loss() is None
