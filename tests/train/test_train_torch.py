"""Rows and neighborhoods on storage for PyTorch and PyTorch Geometric; skipped if these are not installed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.harness import train_ragged as ragged
from tests.harness import train_sage as sage
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # imports of third-party libraries raise warnings
    pytest.mark.timeout(240),
]

ROWS = 300
X = np.random.default_rng(0).standard_normal((ROWS, 5), np.float32)
WORKER_METHODS = [(0, None), (2, "fork"), (2, "spawn")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    sage.make(path)
    np.save(path / "rows.npy", X)
    rows = pa.table({"y": np.arange(ROWS)})
    with pa.ipc.new_file(str(path / "t.arrow"), rows.schema) as file:
        file.write_table(rows)
    return path


def dataset(folder: Path) -> ww.train.Dataset:
    return ww.train.Dataset({"x": folder / "rows.npy", "y": ww.table.open(folder / "t.arrow")["y"]})


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_a_data_loader_delivers_rows(folder: Path, workers: int, method: str | None) -> None:
    data = dataset(folder)
    data.take(np.arange(3))  # opens the files before the workers start
    for collate in (ww.train.Dataset.collate, None):
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=64,
            num_workers=workers,
            multiprocessing_context=method,
            collate_fn=collate,
            persistent_workers=workers > 0,
        )
        for _ in range(2):
            batches = list(loader)
            assert torch.equal(torch.cat([b["x"] for b in batches]), torch.from_numpy(X))
            assert torch.cat([b["y"] for b in batches]).tolist() == list(range(ROWS))
        del loader
        if method == "spawn":
            break  # each worker imports torch


def test_collate_shares_memory_and_refuses_what_is_not_ours(folder: Path) -> None:
    records = dataset(folder).__getitems__([1, 2])
    tensors = ww.train.Dataset.collate(records)
    records.fields["x"][0, 0] = 77
    assert tensors["x"][0, 0] == 77
    with pytest.raises(errors.ArgumentError, match=r"warpwell\.train\.Dataset"):
        ww.train.Dataset.collate([{"x": 1}])


def test_items_of_bfloat16_are_tensors_of_it(tmp_path: Path) -> None:
    values = torch.arange(64).to(torch.bfloat16)
    values.view(torch.int16).numpy().tofile(tmp_path / "b.raw")
    data = ww.train.Dataset({"x": (tmp_path / "b.raw", {"dtype": "bfloat16"})})
    found = ww.train.Dataset.collate(data.__getitems__([3, 60]))["x"]
    assert found.dtype == torch.bfloat16 and found.tolist() == [3, 60]


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_batches_are_those_of_their_numbers(folder: Path, workers: int, method: str | None) -> None:
    neighbors = sage.neighbors(folder)
    x = torch.from_numpy(np.load(folder / "x.npy"))
    numbers = [3, 11, 0, 8, 9]
    for number, batch in zip(numbers, sage.loader(folder, numbers, workers, method), strict=True):
        found = neighbors[number]
        assert batch.n_id.tolist() == found.nodes.tolist() and batch.e_id.tolist() == found.edges.tolist()
        assert batch.edge_index.tolist() == [found.sources.tolist(), found.targets.tolist()]
        assert batch.batch_size == sage.BATCH and batch.input_id.tolist() == found.nodes[: sage.BATCH].tolist()
        assert batch.num_sampled_nodes == found.node_counts and torch.equal(batch.x, x[batch.n_id])


def test_a_loader_of_the_first_epoch(folder: Path) -> None:
    neighbors = sage.neighbors(folder)
    features = ww.train.Dataset({"x": folder / "x.npy"})
    loader = neighbors.loader(features)
    assert len(loader) == len(neighbors) == len(list(loader))
    assert next(iter(loader)).num_nodes == len(neighbors[0].nodes)
    with pytest.raises(errors.ArgumentError, match="shuffle= is decided by Neighbors"):
        neighbors.loader(features, shuffle=True)
    with pytest.raises(errors.IndexRangeError):
        list(neighbors.loader({"x": np.zeros(3)}, [0]))


def expected(folder: Path, steps: int) -> list[str]:
    """Return the losses of plain indexing of tensors in memory over recorded batches."""
    from torch_geometric.data import Data

    recorded = [(b.n_id, b.edge_index, b.batch_size) for b in sage.loader(folder, range(steps), 0, None)]
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("x", "y"))
    training = sage.Training()
    return [training.step(Data(x=x[n], y=y[n], edge_index=e, batch_size=size)) for n, e, size in recorded]


def start(folder: Path, steps: int, workers: int, method: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.harness.train_sage", str(folder), str(steps), str(workers), str(method)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], text=True, stderr=subprocess.PIPE, start_new_session=True
    )


def losses(folder: Path) -> list[str]:
    path = folder / "losses.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_a_run_that_is_killed_and_resumed_has_the_losses_of_memory(
    tmp_path: Path, workers: int, method: str | None
) -> None:
    sage.make(tmp_path)
    steps = 40
    run = start(tmp_path, steps, workers, method)
    until(lambda: len(losses(tmp_path)) >= 7 or run.poll() is not None, 120)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert 7 <= len(losses(tmp_path)) < steps
    run = start(tmp_path, steps, workers, method)
    _, errors_text = run.communicate(timeout=120)
    assert run.returncode == 0, errors_text
    found: dict[int, set[str]] = {}
    for line in losses(tmp_path):
        number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)  # a step whose checkpoint was not saved is taken again
    assert [found[k] for k in range(steps)] == [{loss} for loss in expected(tmp_path, steps)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_a_run_over_ragged_records_that_is_killed_five_times(tmp_path: Path, workers: int, method: str | None) -> None:
    ragged.make(tmp_path)
    training = ragged.Training()
    expected_steps = [training.step(batch) for batch in ragged.batches_in_memory()]
    steps = tmp_path / "steps.txt"
    command = [sys.executable, "-m", "tests.harness.train_ragged", str(tmp_path), str(workers), str(method)]
    chance = random.Random(workers)
    for _ in range(5):
        run = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, start_new_session=True)
        target = len(read_steps(steps)) + chance.randrange(3, 14)
        until(lambda run=run, target=target: len(read_steps(steps)) >= target or run.poll() is not None, 120)
        assert run.poll() is None
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The run has resumed: only steps after the last checkpoint are repeated.
    assert len(read_steps(steps)) < len(expected_steps) + 10
    assert sorted(set(read_steps(steps)), key=lambda line: int(line.split()[0])) == expected_steps
    resumed = ragged.Training()
    resumed.load(tmp_path / "checkpoint.pt")
    assert all(map(torch.equal, resumed.model.parameters(), training.model.parameters()))


def read_steps(path: Path) -> list[str]:
    """Return the complete lines of a file."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_ctrl_c_ends_workers_and_program(tmp_path: Path, workers: int, method: str | None) -> None:
    sage.make(tmp_path)
    run = start(tmp_path, 100_000, workers, method)
    until(lambda: len(losses(tmp_path)) >= 3 or run.poll() is not None, 120)
    os.killpg(run.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the process group
    _, errors_text = run.communicate(timeout=HANG_SECONDS)
    assert run.returncode not in (0, None) and "KeyboardInterrupt" in errors_text
    until(lambda: not alive(run.pid))


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_program_without_workers_imports_torch_only_where_it_is_asked_for(folder: Path) -> None:
    program = f"""
import sys, warpwell as ww
data = ww.train.Dataset({{"x": {str(folder / "rows.npy")!r}}})
data[3]
assert "torch" not in sys.modules
"""
    done: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_collate_makes_tensors_of_the_records_of_a_store(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv", schema={"x": ("float32", (5,)), "y": ("int64", ())}) as store:
        store.put_many(np.arange(ROWS) * 3, {"x": X, "y": np.arange(ROWS)})
    with ww.kv.open(tmp_path / "s.kv") as store:
        data = ww.train.Dataset(store, key_field="key")
        batches = list(torch.utils.data.DataLoader(data, batch_size=64, collate_fn=ww.train.Dataset.collate))
    assert torch.equal(torch.cat([b["x"] for b in batches]), torch.from_numpy(X))
    assert torch.cat([b["key"] for b in batches]).tolist() == list(range(0, 3 * ROWS, 3))


def test_collate_leaves_bytes_as_they_are(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.update({"a": b"1", "b": b"2\0"})
        batch = ww.train.Dataset.collate(ww.train.Dataset(store, key_field="key").__getitems__([1, 0]))
        assert batch == {"key": [b"b", b"a"], "value": [b"2\0", b"1"]}
        with pytest.raises(errors.ArgumentError, match="your own collate_fn"):
            ww.train.Dataset.collate(ww.train.Dataset(store).__getitems__([1, 0]))


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_ragged_fields_are_lists_of_tensors(tmp_path: Path, workers: int, method: str | None) -> None:
    images = [np.arange(k % 9, dtype=np.uint8) + k for k in range(40)]
    boxes = [np.full((k % 3, 4), k, np.float32) for k in range(40)]
    schema = {"image": ("uint8", (None,)), "name": "str", "raw": "bytes", "boxes": ("float32", (None, 4))}
    with ww.kv.create(tmp_path / "s.kv", schema=schema) as store:
        names = [str(k) for k in range(40)]
        raw = [name.encode() for name in names]
        store.put_many(np.arange(40), {"image": images, "name": names, "raw": raw, "boxes": boxes})
    with ww.kv.open(tmp_path / "s.kv") as store:
        data = ww.train.Dataset(store, key_field="key", on_error="skip")
        sampler = ww.train.Sampler(data, 16, seed=3)
        loader = torch.utils.data.DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=ww.train.Dataset.collate,
            num_workers=workers,
            multiprocessing_context=method,
        )
        expected = list(sampler)
        sampler.set_epoch(0)
        batches = list(loader)
    assert [batch["key"].tolist() for batch in batches] == expected and len(loader) == 3
    for batch in batches:
        assert batch["skipped"] == [] and batch["name"] == [str(k) for k in batch["key"].tolist()]
        assert batch["raw"] == [str(k).encode() for k in batch["key"].tolist()]
        for k, image, box in zip(batch["key"].tolist(), batch["image"], batch["boxes"], strict=True):
            assert torch.equal(image, torch.from_numpy(images[k])) and torch.equal(box, torch.from_numpy(boxes[k]))


def test_a_list_of_tensors_is_sent_as_it_is() -> None:
    from multiprocessing.reduction import ForkingPickler

    from warpwell.train.tensors import TensorList

    even = TensorList([torch.arange(3), torch.arange(0), torch.arange(2)])
    mixed = TensorList([torch.zeros(2), torch.zeros(2, 3), "a"])
    for items in (even, mixed, TensorList(mixed[:2]), TensorList()):
        copy = ForkingPickler.loads(ForkingPickler.dumps(items))
        assert len(copy) == len(items)
        for a, b in zip(copy, items, strict=True):
            assert a == b if isinstance(b, str) else torch.equal(a, b) and a.dtype == b.dtype


def fails(record: Any) -> Any:
    raise ZeroDivisionError("no image")


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS)
def test_an_error_of_decode_in_a_worker_names_the_key(tmp_path: Path, workers: int, method: str | None) -> None:
    with ww.kv.create(tmp_path / "s.kv") as store:
        store.put_many([f"k{k}" for k in range(4)], [b"v"] * 4)
    with ww.kv.open(tmp_path / "s.kv") as store:
        data = ww.train.Dataset(store, decode=fails)
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=method)
        with pytest.raises(errors.ArgumentError, match="ZeroDivisionError for the record of key b'k0': no image"):
            list(loader)


def test_the_default_collate_of_pytorch_uses_columns(tmp_path: Path) -> None:
    schema = {"image": ("uint8", (None,)), "x": ("float32", (5,)), "label": "int64"}
    with ww.kv.create(tmp_path / "s.kv", schema=schema) as store:
        images = [np.arange(k % 4, dtype=np.uint8) for k in range(20)]
        store.put_many(np.arange(20), {"image": images, "x": X[:20], "label": np.arange(20)})
    with ww.kv.open(tmp_path / "s.kv") as store:
        data = ww.train.Dataset(store)
        parts = torch.utils.data.ConcatDataset([data, data])  # fetches records one by one
        for dataset in (data, torch.utils.data.Subset(data, range(20)), parts):
            batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=20)))
            assert list(batch) == ["image", "x", "label"] and torch.equal(batch["x"], torch.from_numpy(X[:20]))
            assert batch["label"].tolist() == list(range(20))
            assert [image.tolist() for image in batch["image"]] == [image.tolist() for image in images]


@pytest.mark.parametrize(("workers", "method"), WORKER_METHODS[:2])
def test_a_damaged_record_is_skipped_in_workers(tmp_path: Path, workers: int, method: str | None) -> None:
    with ww.kv.create(tmp_path / "s.kv", schema={"raw": "bytes", "label": "int64"}) as store:
        store.put_many(np.arange(50), {"raw": [bytes([k]) * 1000 for k in range(50)], "label": np.arange(50)})
    segment = next((tmp_path / "s.kv").glob("*.val"))
    contents = bytearray(segment.read_bytes())
    contents[contents.index(bytes([17]) * 1000) + 5] ^= 1
    segment.write_bytes(contents)
    with ww.kv.open(tmp_path / "s.kv") as store:
        data = ww.train.Dataset(store, on_error="skip")
        sampler = ww.train.Sampler(data, 8, seed=1)
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method}
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=data.collate, **options)
        labels = []
        for batch in loader:
            sampler.record_skipped(batch["skipped"])
            assert all(raw == bytes([k]) * 1000 for raw, k in zip(batch["raw"], batch["label"].tolist(), strict=True))
            labels += batch["label"].tolist()
        assert sorted(labels) == [k for k in range(50) if k != 17]
        assert sampler.skipped == sampler.state_dict()["skipped"] == [17]
