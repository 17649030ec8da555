"""DataLoader: one order for any number of ranks, exact resume, bounded prefetch, nothing left behind."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import closing
from warpwell.errors import ArgumentError, ForkError, KeyMissingError
from warpwell.kv import Permutation
from warpwell.kv.keys import as_keys
from warpwell.train.loader import DataLoader, Prefetch

# The threads of the parent do nothing that a child here waits for.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Records:
    """The part of a store that loaders use, over keys that are given; ``x`` of key k is k."""

    def __init__(self, keys: Any) -> None:
        self.key_list = keys
        self.lock = threading.Lock()
        self.calls = 0
        self.active = 0
        self.absent: set[int] = set()
        self.fail_on: int | None = None

    def keys_array(self) -> Any:
        return self.key_list

    def get_many(self, keys: Any) -> Any:
        with self.lock:
            self.calls += 1
            self.active += 1
        try:
            key_words = as_keys(keys).words
            x = key_words if key_words.ndim == 1 else key_words[:, 0]
            if self.fail_on in x:
                raise OSError("planted")
            found = np.array([int(k) not in self.absent for k in x], bool)
            return {"x": x.copy(), "y": (x & 0xFF).astype(np.uint8)}, found
        finally:
            with self.lock:
                self.active -= 1


class DeviceRecords(Records):
    """The same with futures of its own, as a store on a GPU has; counts the futures without a waiter."""

    device = "cuda"
    schema = ww.kv.Schema({"x": ("int64", ()), "y": ("uint8", ())})

    def __init__(self, keys: Any) -> None:
        super().__init__(keys)
        self.flying = 0
        self.max_flying = 0

    def get_async(self, keys: Any) -> Any:
        self.flying += 1
        self.max_flying = max(self.max_flying, self.flying)
        return self.Pending(self, keys)

    class Pending:
        def __init__(self, records: "DeviceRecords", keys: Any) -> None:
            self.records, self.keys, self.waited = records, keys, False

        def wait(self) -> Any:
            if not self.waited:
                self.waited = True
                self.records.flying -= 1
            return self.records.get_many(self.keys)


KINDS = [Records, DeviceRecords]


def ids(batch: Any) -> list[int]:
    assert batch["x"].flags.c_contiguous and batch["y"].flags.c_contiguous
    assert np.array_equal(batch["x"] & 0xFF, batch["y"])
    return list(batch["x"].tolist())


def batches(loader: DataLoader) -> list[list[int]]:
    return [ids(batch) for batch in loader]


def together(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """Join the ranks' batches, batch by batch."""
    assert len({len(rank_ids) for rank_ids in per_rank}) == 1
    return [[i for rank_ids in step for i in rank_ids] for step in zip(*per_rank, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


SIZES = {"n": st.integers(0, 200), "batch": st.integers(1, 40), "seed": st.integers(0, 2**40)}


@settings(max_examples=examples(60))
@given(
    **SIZES,
    world=st.sampled_from([1, 2, 3, 4, 7]),
    drop=st.booleans(),
    prefetch=st.integers(0, 3),
    kind=st.sampled_from(KINDS),
)
def test_ranks_deliver_one_order(
    n: int, batch: int, seed: int, world: int, drop: bool, prefetch: int, kind: Callable[[Any], Any]
) -> None:
    store = kind(np.arange(n) + 5)
    options = {"seed": seed, "prefetch": prefetch, "world_size": world, "drop_last": drop}
    loaders = [DataLoader(store, batch, rank=r, **options) for r in range(world)]
    for epoch in range(2):
        per_rank = [batches(loader) for loader in loaders]
        steps = together(per_rank)
        assert {len(steps)} == {len(loader) for loader in loaders}
        order = (Permutation(n, seed, epoch).slice(0, n) + 5).tolist() if n else []
        delivered = n // (batch * world) * (batch * world) if drop else n
        assert flat(steps) == order[:delivered]
        # A single process has the same global batches, which are dealt out to the ranks.
        single = DataLoader(store, batch * world, seed=seed, drop_last=drop)
        single.set_epoch(epoch)
        assert batches(single) == steps
        dealt = DataLoader(store, batch, seed=seed)
        dealt.set_epoch(epoch)
        complete = n // (batch * world) * world
        hands = [rank_steps for step in zip(*per_rank, strict=True) for rank_steps in step]
        assert batches(dealt)[:complete] == hands[:complete]
        if steps and not drop:
            last = [len(rank_steps[-1]) for rank_steps in per_rank]
            assert max(last) - min(last) <= 1


@settings(max_examples=examples(60))
@given(
    **SIZES,
    world=st.integers(1, 4),
    later=st.integers(1, 4),
    later_batch=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_a_resumed_run_delivers_exactly_the_rest(
    n: int, batch: int, seed: int, world: int, later: int, later_batch: int, kind: Any, data: st.DataObject
) -> None:
    store = kind(np.arange(n) * 3)
    first = [DataLoader(store, batch, seed=seed, rank=r, world_size=world) for r in range(world)]
    done = data.draw(st.integers(0, 2 * len(first[0])))
    delivered: list[list[list[int]]] = []
    for loader in first:
        rank_batches: list[list[int]] = []
        while len(rank_batches) < done:
            for b in loader:
                rank_batches.append(ids(b))
                if len(rank_batches) == done:
                    break
        delivered.append(rank_batches)
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    second = [DataLoader(store, later_batch, rank=r, world_size=later) for r in range(later)]
    for loader in second:
        loader.load_state_dict(state)
        assert loader.state_dict() == state and loader.epoch == state["epoch"]
    steps = together(delivered)
    while second[0].epoch < 3 if n else False:
        steps += together([batches(loader) for loader in second])
    order = [Permutation(n, seed, epoch).slice(0, n) * 3 for epoch in range(3 if n else 0)]
    assert flat(steps) == (np.concatenate(order).tolist() if n else [])


@pytest.mark.parametrize(
    "keys",
    [
        np.array([9, -4, 7, 7, 3]),
        range(100, 0, -7),
        range(0),
        range(2**62, 2**63, 2**60),
        [b"a", b"a\0", b"16 bytes exactly"],
        ["one", 2, b"three"],
        np.array([2**63 - 1, -(2**63)]),
        range(-(2**63), 2**63, 2**63 - 1),
    ],
)
def test_without_shuffle_keys_come_in_their_order(keys: Any) -> None:
    def raw(keys: Any) -> list[bytes]:
        return [keys.raw(k) for k in range(keys.size)]

    listed = as_keys(list(keys))
    requested: list[bytes] = []

    class RecordingStore(Records):
        def get_many(self, keys: Any) -> Any:
            requested.extend(raw(as_keys(keys)))
            return super().get_many(keys)

    loader = DataLoader(RecordingStore(np.arange(3)), 2, shuffle=False, keys=keys, prefetch=0)
    assert loader.samples == listed.size
    for _ in range(2):
        assert sum(len(batch["x"]) for batch in loader) == listed.size
    assert requested == 2 * raw(listed)


def test_epochs_follow_one_another() -> None:
    loader = DataLoader(Records(np.arange(50)), 8, seed=1)
    first, second = flat(batches(loader)), flat(batches(loader))
    assert loader.epoch == 2 and first != second and sorted(first) == sorted(second)
    assert loader.state_dict()["position"] == 0
    loader.set_epoch(1)
    assert flat(batches(loader)) == second
    assert flat(batches(DataLoader(Records(np.arange(50)), 8, seed=2))) not in (first, second)


def test_an_iteration_left_early_is_over() -> None:
    loader = DataLoader(Records(np.arange(50)), 8, seed=1)
    head = [ids(batch) for _, batch in zip(range(2), loader, strict=False)]
    assert loader.epoch == 0 and loader.state_dict()["position"] == 16
    assert flat(batches(loader))[:16] != flat(head)
    assert loader.epoch == 2


def test_an_iterator_goes_on_where_it_was() -> None:
    loader = DataLoader(Records(np.arange(50)), 8, seed=1)
    complete = flat(batches(DataLoader(Records(np.arange(50)), 8, seed=1)))
    iterator = iter(loader)
    assert iter(iterator) is iterator
    first = ids(next(iterator)) + ids(next(iterator))
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 16)
    assert first + [i for batch in iterator for i in ids(batch)] == complete
    # An old iterator does not change the loader's position.
    old = iter(loader)
    next(old)
    loader.load_state_dict(state)
    next(old)
    assert loader.state_dict() == state
    assert flat(batches(loader)) == complete[16:]
    old.close()  # type: ignore[attr-defined]
    assert next(old, None) is None


def test_an_exhausted_iterator_does_not_move_the_next() -> None:
    loader = DataLoader(Records(np.arange(10)), 4)
    old = iter(loader)
    assert len(list(old)) == 3
    new = iter(loader)
    next(new)
    assert next(old, None) is None
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 4)
    new.close()  # type: ignore[attr-defined]


def test_the_state_after_the_last_batch_leaves_nothing() -> None:
    """So that work at the end of an epoch is done by the run that resumes."""
    loader = DataLoader(Records(np.arange(20)), 8)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 20)
    loader.load_state_dict(state)
    assert batches(loader) == [] and loader.epoch == 1
    assert len(batches(loader)) == 3


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_fetched_ahead_than_asked_for(prefetch: int) -> None:
    store = Records(np.arange(100))
    iterator = iter(DataLoader(store, 5, prefetch=prefetch))
    for delivered in range(8):
        until(lambda: store.calls >= delivered + prefetch)
        time.sleep(0.02)
        assert store.calls == delivered + prefetch
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    waiting = DeviceRecords(np.arange(100))
    assert len(batches(DataLoader(waiting, 5, prefetch=prefetch))) == 20
    assert (waiting.max_flying, waiting.flying) == (prefetch, 0)


def test_without_prefetch_nothing_is_fetched_ahead() -> None:
    store = DeviceRecords(np.arange(100))
    for number, _ in enumerate(DataLoader(store, 10, prefetch=0), 1):
        assert store.calls == number and store.flying == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["break", "raise", "close", "forget", "error"])
def test_stopping_early_leaves_nothing_behind(kind: Callable[[Any], Any], how: str) -> None:
    store = kind(np.arange(1000))
    list(DataLoader(store, 200))  # starts the threads that all iterations share
    threads = threading.active_count()
    for _ in range(10):
        loader = DataLoader(store, 5, prefetch=6, shuffle=False)
        if how == "break":
            for _ in loader:
                break
        elif how == "raise":
            with pytest.raises(ZeroDivisionError):
                for batch in loader:
                    ids(batch)[0] // 0
        elif how == "close":
            iterator = iter(loader)
            next(iterator)
            iterator.close()  # type: ignore[attr-defined]
            assert next(iterator, None) is None
        elif how == "forget":
            iterator = iter(loader)
            del iterator
        else:
            store.fail_on = 17
            with pytest.raises(OSError, match="planted"):
                batches(loader)
        gc.collect()
        assert closing.wait_until_closed(HANG_SECONDS)  # as close() of the store does
        assert store.active == 0 and getattr(store, "flying", 0) == 0
        calls = store.calls
        assert threading.active_count() <= threads + 4
    time.sleep(0.05)
    assert store.calls == calls


def test_a_store_on_a_device_is_closed_right_after_a_loop_was_left(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv", {"x": ("int64", ())}) as store:
        store.put_many(np.arange(100), {"x": np.arange(100)})
    store = ww.kv.open(tmp_path / "s.kv", device="cpu")
    for _ in DataLoader(store, 5, prefetch=6):
        break
    store.close()
    assert store.closed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_errors_come_after_the_batches_before_them(kind: Callable[[Any], Any], prefetch: int) -> None:
    order = Permutation(100, 3).slice(0, 100).tolist()
    store = kind(np.arange(100))
    store.fail_on = order[35]
    loader = DataLoader(store, 10, seed=3, prefetch=prefetch)
    delivered = []
    iterator = iter(loader)
    with pytest.raises(OSError, match="planted"):
        for batch in iterator:
            delivered.append(ids(batch))
    assert next(iterator, None) is None
    assert len(delivered) == 3 and loader.state_dict()["position"] == 30
    # the state describes the last delivered batch, so a resumed run skips no batch
    store.fail_on = None
    loader.load_state_dict(loader.state_dict())
    assert flat(delivered) + flat(batches(loader)) == order


def test_after_an_error_nothing_is_in_flight() -> None:
    store = DeviceRecords(np.arange(10))
    store.fail_on = 2
    ahead: Prefetch[int] = Prefetch(iter(range(10)), lambda k: store.get_async(np.array([k])), 4)
    assert [next(ahead)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="planted"):
        next(ahead)
    assert (store.flying, store.calls) == (0, 6 + 1)  # the failed future is waited on twice
    assert next(ahead, None) is None


def test_errors_of_a_submission_come_in_their_turn() -> None:
    class Full(DeviceRecords):
        submitted = 0

        def get_async(self, keys: Any) -> Any:
            self.submitted += 1
            if self.submitted == 5:
                raise MemoryError("planted")
            return super().get_async(keys)

    count = 0
    store = Full(np.arange(100))
    with pytest.raises(MemoryError, match="planted"):
        for _ in DataLoader(store, 10, prefetch=3):
            count += 1
    assert (count, store.submitted, store.flying) == (4, 5, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys_are_named(kind: Callable[[Any], Any]) -> None:
    store = kind(np.arange(40))
    store.absent = {17}
    loader = DataLoader(store, 10, shuffle=False)
    count = 0
    with pytest.raises(KeyMissingError, match=r"key 17 .1 of a batch of 10") as raised:
        for _ in loader:
            count += 1
    assert count == 1 and raised.value.key == (17).to_bytes(8, "little")
    assert loader.state_dict()["position"] == 10


def test_a_store_without_records() -> None:
    loader = DataLoader(Records(np.empty(0, np.int64)), 10)
    assert len(loader) == 0 and batches(loader) == [] and loader.epoch == 1
    loader.load_state_dict(loader.state_dict())


def test_fewer_samples_than_ranks() -> None:
    loaders = [DataLoader(Records(np.arange(3)), 2, rank=r, world_size=5) for r in range(5)]
    got = [batches(loader) for loader in loaders]
    assert [len(rank_batches) for rank_batches in got] == [1] * 5
    assert flat(flat(got)) == Permutation(3).slice(0, 3).tolist()  # type: ignore[arg-type]
    assert [len(rank_batches[0]) for rank_batches in got] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.0}, "an integer"),
        ({"batch_size": True}, "batch_size"),
        ({"rank": 2, "world_size": 2}, "from 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 0}, "world_size"),
        ({"prefetch": -1}, "prefetch"),
        ({"seed": "a"}, "seed"),
        ({"keys": 5}, "keys"),
        ({"seed": 1.5}, "seed"),
        ({"shuffle": "no"}, "True or False"),
        ({"shuffle": None}, "shuffle"),
        ({"drop_last": 2}, "drop_last"),
        ({"prefetch": float("inf")}, "an integer"),
        ({"keys": "abc"}, "keys"),
        ({"keys": range(2**63, 2**63 + 9)}, "64-bit"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        DataLoader(Records(np.arange(10)), **options)


def test_what_is_no_store() -> None:
    for store in (None, 3):
        with pytest.raises(ArgumentError, match=r"kv\.open"):
            DataLoader(store)
    with pytest.raises(ArgumentError, match="options of the Dataset"):
        DataLoader(ww.train.Dataset(Records(np.arange(3))), keys=range(2))


def test_a_loader_tells_what_it_delivers() -> None:
    loader = DataLoader(Records(np.arange(10)), 4, seed=3, rank=1, world_size=2)
    assert repr(loader) == (
        "<DataLoader of <Dataset of Records: 10 records of value>: 2 batches of 4, shuffled with seed 3, rank 1 of 2,"
        " epoch 0>"
    )
    assert "1 batch of 16, in the order of keys, epoch 2" in repr(_at_epoch(2))


def _at_epoch(epoch: int) -> DataLoader:
    loader = DataLoader(Records(np.arange(10)), 16, shuffle=False)
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version 2"),
        ({"samples": 9}, "other keys"),
        ({"keys": 1}, "other keys"),
        ({"position": 11}, "unchanged state"),
        ({"position": -1}, "position"),
        ({"epoch": "x"}, "epoch"),
        ({"seed": None}, "seed"),
    ],
)
def test_states_that_cannot_be(change: dict[str, Any], match: str) -> None:
    loader = DataLoader(Records(np.arange(10)), 4, seed=6)
    before = loader.state_dict()
    with pytest.raises(ArgumentError, match=match):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before
    for wrong in ({}, None, {"seed": 1}):
        with pytest.raises(ArgumentError, match="state_dict"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]


def test_states_tell_keys_apart() -> None:
    state = DataLoader(Records(np.arange(10)), 4).state_dict()
    for keys in (np.arange(1, 11), np.arange(10)[::-1], [b"a"] * 10, np.arange(11)):
        with pytest.raises(ArgumentError, match="other keys"):
            DataLoader(Records(keys), 4).load_state_dict(state)
    # the same keys, named in another way
    DataLoader(Records(np.arange(3)), 4, keys=range(10)).load_state_dict(state)
    DataLoader(Records(np.arange(3)), 4, keys=[int(k).to_bytes(8, "little") for k in range(10)]).load_state_dict(state)


def test_an_iterator_is_refused_after_a_fork() -> None:
    iterator = iter(DataLoader(Records(np.arange(1000)), 5))
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(iterator)
        except ForkError as error:
            code = 0 if "each process" in str(error) else 2
        finally:
            iterator.close()  # type: ignore[attr-defined]
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(ids(next(iterator))) == 5
    iterator.close()  # type: ignore[attr-defined]


def test_an_iterator_that_is_alive_does_not_hold_up_the_exit() -> None:
    text = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np, test_train_loader as t\n"
        "iterator = iter(t.DataLoader(t.Records(np.arange(1000)), 5))\n"
        "next(iterator)\n"
    )
    done = subprocess.run([sys.executable, "-c", text, str(Path(__file__).parent)], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("change", [{"shuffle": "yes"}, {"skipped": ["zz"]}, {"skipped": None}])
def test_a_state_that_is_refused_changes_nothing(change):
    loader = ww.train.DataLoader({"x": np.arange(100)}, batch_size=10, seed=1)
    before = loader.state_dict()
    with pytest.raises(ArgumentError):
        loader.load_state_dict({**before, "seed": 9, "epoch": 3, **change})
    assert loader.state_dict() == before


# -- the order without the records -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
def test_a_sampler_has_the_batches_and_the_states_of_a_loader(drop: bool) -> None:
    dataset = ww.train.Dataset({"x": np.arange(50) * 2})
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "rank": 1, "world_size": 3, "drop_last": drop}
    sampler, loader = ww.train.Sampler(dataset, **options), DataLoader(dataset, **options)
    assert len(sampler) == len(loader)
    for _ in range(2):
        iter(sampler)  # PyTorch creates an iterator that it does not use
        epoch = sampler.epoch
        drawn = list(sampler)  # as if PyTorch's workers were far ahead of the loop
        states = []
        for k, batch in enumerate(loader):
            assert [2 * row for row in drawn[k]] == batch["x"].tolist()
            states.append(loader.state_dict())
            assert sampler.state_dict(k + 1) == states[-1] == loader.state_dict(k + 1)
            assert states[-1]["epoch"] == epoch
        assert sampler.state_dict() == states[-1] and len(drawn) == len(states)
        assert sampler.epoch == loader.epoch == epoch + 1
    for state in (states[1], states[-1]):
        for again in (ww.train.Sampler(dataset, 7), DataLoader(dataset, 7)):
            again.load_state_dict(state)
            assert again.state_dict() == state == again.state_dict(0)
        sampler.load_state_dict(state)
        resumed = list(sampler)
        count = len(resumed)
        assert resumed == drawn[len(drawn) - count :] and sampler.epoch == 2
        assert sampler.state_dict(count)["position"] == states[-1]["position"]
        with pytest.raises(ArgumentError, match=f"the iteration has {count}"):
            sampler.state_dict(count + 1)


def test_a_sampler_wants_a_dataset() -> None:
    with pytest.raises(ArgumentError, match=r"warpwell\.train\.Dataset"):
        ww.train.Sampler(range(10))  # type: ignore[arg-type]
