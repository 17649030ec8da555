"""Rows and neighborhoods for training, without PyTorch."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.harness.until import HANG_SECONDS, until

import warpwell as ww
from warpwell import errors

ROWS = 500
X = np.random.default_rng(0).standard_normal((ROWS, 6), np.float32)
Y = np.random.default_rng(1).integers(0, 9, ROWS)
ROW_NUMBERS = [3, -1, 3, 499, 0, 250]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    X.tofile(tmp_path / "x.raw")
    schema = pa.schema(
        [("x", pa.list_(pa.float32(), 6)), ("y", pa.int64()), ("text", pa.string()), ("holes", pa.int64())]
    )
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), schema) as file:
        for first, end in ((0, 200), (200, 201), (201, ROWS)):
            rows = end - first
            lists = pa.FixedSizeListArray.from_arrays(pa.array(X[first:end].ravel()), 6)
            file.write_batch(
                pa.record_batch(
                    [lists, pa.array(Y[first:end]), pa.array(["a"] * rows), pa.array([None] * rows, pa.int64())], schema
                )
            )
    return tmp_path


def sources(folder: Path) -> dict[str, Any]:
    table = ww.table.open(folder / "t.arrow")
    return {
        "files": {"x": folder / "x.npy", "y": str(folder / "y.npy")},
        "raw file": {"x": (folder / "x.raw", {"dtype": "float32", "shape": (ROWS, 6)}), "y": Y},
        "behind a cache": {"x": (folder / "x.npy", {"cache": "16KiB"}), "y": folder / "y.npy"},
        "columns": {"x": table["x"], "y": table["y"]},
    }


def took(dataset: Any, connection: Any) -> None:
    connection.send((dataset.take(np.array(ROW_NUMBERS) % ROWS), os.getpid()))


@pytest.mark.quick("files", "behind a cache")
@pytest.mark.parametrize("kind", ["files", "raw file", "behind a cache", "columns"])
def test_rows_are_the_same_in_all_processes(folder: Path, kind: str) -> None:
    dataset = ww.train.Dataset(sources(folder)[kind])
    assert len(dataset) == ROWS and dataset.names == ["x", "y"]
    records = dataset.__getitems__(ROW_NUMBERS)
    assert np.array_equal(records.fields["x"], X[ROW_NUMBERS]) and np.array_equal(records.fields["y"], Y[ROW_NUMBERS])
    assert np.array_equal(dataset[-2]["x"], X[-2]) and dataset[-2]["y"] == Y[-2]
    for method in ("fork", "spawn") if kind == "columns" else ("fork",):
        context = multiprocessing.get_context(method)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=took, args=(dataset, sender), daemon=True)
        child.start()
        assert receiver.poll(HANG_SECONDS)
        fields, pid = receiver.recv()
        child.join(HANG_SECONDS)
        assert child.exitcode == 0 and pid != os.getpid()
        assert np.array_equal(fields["x"], X[ROW_NUMBERS]) and np.array_equal(fields["y"], Y[ROW_NUMBERS])
    again = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(again.take(np.arange(ROWS))["x"], X)


def test_columns_of_one_table_are_read_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ww.table.open(folder / "t.arrow", device="cpu") as table:
        dataset = ww.train.Dataset({"y": table["y"], "z": Y, "x": table["x"], "again": table["y"]})
    reads: list[list[str]] = []
    take = ww.table.Selection.take

    def recorded_take(selection: Any, names: list[str]) -> Any:
        reads.append(names)
        return take(selection, names)

    monkeypatch.setattr(ww.table.Selection, "take", recorded_take)
    with dataset:
        fields = dataset.take(np.array(ROW_NUMBERS))
    assert reads == [["y", "x"]] and list(fields) == ["y", "z", "x", "again"]
    for name, expected in (("x", X), ("y", Y), ("z", Y), ("again", Y)):
        assert np.array_equal(fields[name], expected[ROW_NUMBERS])


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_a_dataset_leaves_nothing_open(folder: Path, close: bool) -> None:
    dataset = ww.train.Dataset(folder / "t.arrow", columns=["y", "x"])
    assert dataset.take(np.array([0, 499]))["y"].tolist() == [Y[0], Y[499]]
    assert opened(folder)
    if close:
        dataset.close()
    else:
        del dataset
    gc.collect()  # a closed mapping stays while views of it exist
    until(lambda: not opened(folder))


def opened(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open or mapped."""
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [name for name in [os.readlink(fd)] if name.startswith(str(folder))]
    return found


def test_an_open_array_is_used_in_its_process_only(folder: Path) -> None:
    with ww.open(folder / "x.npy", device="cpu") as x:
        dataset = ww.train.Dataset({"x": x, "y": Y})
        assert np.array_equal(dataset.take(np.array([5, 4]))["x"], X[[5, 4]])
        with pytest.raises(TypeError, match="send its path, and open it again there"):
            pickle.dumps(dataset)
        dataset.close()
        assert x[0, 0] == X[0, 0]  # closing the dataset has not closed the array


def test_an_open_array_with_a_cache_is_refused_after_a_fork(folder: Path) -> None:
    with ww.open(folder / "x.npy", device="cpu", cache="64KiB") as x:
        dataset = ww.train.Dataset({"x": x})
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=send_error, args=(dataset, sender), daemon=True)
        child.start()
        assert receiver.poll(HANG_SECONDS)
        name, message = receiver.recv()
        child.join(HANG_SECONDS)
    assert name == "ForkError" and "by its path" in message


def send_error(dataset: Any, connection: Any) -> None:
    try:
        dataset[0]
    except Exception as error:
        connection.send((type(error).__name__, str(error)))


def test_a_loader_delivers_rows_in_its_order_and_resumes(folder: Path) -> None:
    dataset = ww.train.Dataset(folder / "t.arrow", columns=["y"])
    loader = ww.train.DataLoader(dataset, batch_size=64, seed=5)
    order = ww.kv.Permutation(ROWS, 5, 0).slice(0, ROWS)
    batches = iter(loader)
    first = [next(batches)["y"] for _ in range(3)]
    state = loader.state_dict()
    again = ww.train.DataLoader(dataset, batch_size=32)
    again.load_state_dict(state)
    remaining = [batch["y"] for batch in again]
    assert np.array_equal(np.concatenate(first + remaining), Y[order])


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({}, errors.ArgumentError, "without fields"),
        ({"x": "x.npy", "y": Y[:7]}, errors.ArgumentError, "'x' has 500, 'y' has 7"),
        ({"x": "nowhere.npy"}, errors.MissingFileError, "nowhere"),
        ({"x": 3}, errors.ArgumentError, "pass the path of a .npy file"),
        ({"x": np.float64(3)}, errors.ArgumentError, "pass the path of a .npy file"),
        ({"x": np.array(["a"])}, errors.DTypeError, "pass numbers"),
    ],
)
def test_fields_that_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: Any, error: Any, says: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(error, match=says):
        ww.train.Dataset(fields)


def test_columns_and_rows_that_cannot_be(folder: Path) -> None:
    with pytest.raises(errors.DTypeError, match=r"'text' is a column of string"):
        ww.train.Dataset(folder / "t.arrow", columns=["text"])
    with pytest.raises(errors.ArgumentError, match=r"'holes' has 500 nulls"):
        ww.train.Dataset(folder / "t.arrow", columns=["holes"])
    dataset = ww.train.Dataset({"y": folder / "y.npy"})
    with pytest.raises(errors.IndexRangeError, match="index 500 of a dataset of 500"):
        dataset[500]
    with pytest.raises(errors.ArgumentError, match="index 'a' of a dataset"):
        dataset.__getitems__(["a"])  # type: ignore[list-item]


def test_the_module_can_be_inspected_without_pytorch(tmp_path: Path) -> None:
    for module in ("torch", "torch_geometric"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    program = """
import copy, inspect, pickle, pydoc
import warpwell as ww
import numpy as np
from warpwell import errors
assert not hasattr(ww.train, "__wrapped__") and not hasattr(ww.train, "nothing")
members = dict(inspect.getmembers(ww.train))
assert {*ww.train.__all__} <= {*members} and {*ww.train.__all__} <= {*dir(ww.train)}
text = pydoc.render_doc(ww.train, renderer=pydoc.plaintext)
for name in ww.train.__all__:
    entry = getattr(ww.train, name)
    assert inspect.getdoc(entry).splitlines()[0] in text, name
    assert copy.copy(entry) is entry and pickle.loads(pickle.dumps(entry)) is entry
    inspect.signature(entry), inspect.getsource(entry)
graph = ww.graph.build([(np.array([0, 1]), np.array([1, 2]))], "g.ww", undirected=True)
try:
    ww.train.Neighbors(graph, [1], 1).loader({"x": np.zeros(3)})
except errors.ArgumentError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert "needs torch_geometric: install Warpwell's extra [train]" in done.stdout, done.stderr


# -- neighborhoods ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ww.graph.Graph:
    """Directed; a vertex of many in-edges, and some of none."""
    rng = np.random.default_rng(2)
    ends = rng.integers(0, 300, (2, 2000))
    ends[1, :300] = 7
    ends[1][ends[1] >= 280] = 7
    return ww.graph.build([(ends[0], ends[1])], tmp_path_factory.mktemp("graph") / "g.ww", vertices=300, in_edges=True)


InEdges = Callable[[int], tuple[int, np.ndarray[Any, Any]]]


def in_edges_of(graph: ww.graph.Graph) -> InEdges:
    """Return a function from a vertex to the position of its first in-edge and the vertices of all."""
    offsets, edges = np.array(graph.map(graph.in_offsets_path)), np.array(graph.map(graph.in_edges_path))
    positions, order = graph.positions, graph.stored_order()

    def in_edges(vertex: int) -> tuple[int, np.ndarray[Any, Any]]:
        stored = positions[vertex]
        return int(offsets[stored]), order[edges[offsets[stored] : offsets[stored + 1]]]

    return in_edges


def check(in_edges: InEdges, found: Any, fanouts: list[int]) -> None:
    """Check a neighborhood by its definition."""
    assert len(np.unique(found.nodes)) == len(found.nodes) == sum(found.node_counts)
    assert len(found.sources) == len(found.targets) == len(found.edges) == sum(found.edge_counts)
    assert len(np.unique(found.edges)) == len(found.edges)
    nodes, edges = np.cumsum([0, *found.node_counts]), np.cumsum([0, *found.edge_counts])
    for hop, fanout in enumerate(fanouts):
        hop_edges = slice(edges[hop], edges[hop + 1])
        by_target: dict[int, list[int]] = {}
        for source, target, edge in zip(
            found.sources[hop_edges], found.targets[hop_edges], found.edges[hop_edges], strict=True
        ):
            assert nodes[hop] <= target < nodes[hop + 1] and source < nodes[hop + 2]
            by_target.setdefault(int(target), []).append(int(edge))
            first, neighbors = in_edges(int(found.nodes[target]))
            assert first <= edge < first + len(neighbors)
            assert neighbors[edge - first] == found.nodes[source]
        for position in range(nodes[hop], nodes[hop + 1]):
            degree = len(in_edges(int(found.nodes[position]))[1])
            drawn = by_target.get(position, [])
            assert len(drawn) == len(set(drawn)) == (degree if fanout < 0 else min(degree, fanout))


@pytest.mark.parametrize("fanouts", [[4, 3], [-1], [1], [0, 5], []])
@pytest.mark.parametrize("order", ["given", "degree"])
def test_neighborhoods_are_what_they_say(graph: ww.graph.Graph, fanouts: list[int], order: str, tmp_path: Path) -> None:
    if order == "degree":
        offsets, edges = graph.load()
        ends = np.repeat(np.arange(300), np.diff(offsets)), edges
        graph = ww.graph.build([ends], tmp_path / "g.ww", vertices=300, in_edges=True, order=order)
    neighbors = ww.train.Neighbors(graph, fanouts, 64, seed=3)
    nbytes = len(pickle.dumps(neighbors))
    epoch = list(neighbors)
    assert len(pickle.dumps(neighbors)) == nbytes, "nothing that was read is sent to other processes"
    assert len(epoch) == len(neighbors) == 5
    assert sorted(np.concatenate([batch.nodes[: batch.batch_size] for batch in epoch])) == list(range(300))
    in_edges = in_edges_of(graph)
    for neighborhood in epoch:
        check(in_edges, neighborhood, fanouts)


def sampled(neighbors: Any, number: int) -> list[Any]:
    found = neighbors[number]
    return [found.nodes.tolist(), found.sources.tolist(), found.targets.tolist(), found.edges.tolist()]


def test_a_batch_is_a_function_of_its_number(graph: ww.graph.Graph) -> None:
    neighbors = ww.train.Neighbors(graph.path, [4, 3], 50, seed=3, vertices=np.arange(0, 300, 2))
    forwards = [sampled(neighbors, number) for number in range(9)]
    again = pickle.loads(pickle.dumps(neighbors))
    assert [sampled(again, number) for number in reversed(range(9))][::-1] == forwards
    assert forwards[0] != forwards[3] and sorted(forwards[0][0][:50]) != sorted(forwards[3][0][:50])  # epochs differ
    partial = ww.train.Neighbors(graph, [4, 3], 50, seed=4, vertices=np.arange(0, 300, 2))
    assert sampled(partial, 0) != forwards[0]
    # A run that a later version resumes draws the same neighbors.
    assert forwards[8][3][:6] == RECORDED_EDGES


RECORDED_EDGES = [826, 827, 829, 830, 1193, 1194]


def test_draws_are_uniform_and_distinct(graph: ww.graph.Graph) -> None:
    first, in_edges = in_edges_of(graph)(7)
    neighbors = ww.train.Neighbors(graph, [3], 1, seed=1, vertices=[7])
    counts = np.zeros(len(in_edges))
    draws = 600
    for number in range(draws):
        counts[neighbors[number].edges - first] += 1
    expected = draws * 3 / len(in_edges)
    assert counts.sum() == 3 * draws
    # Chi-square with len - 1 degrees of freedom: a tolerance of five standard deviations.
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - len(in_edges)) < 5 * np.sqrt(2 * len(in_edges))


def test_neighbors_that_cannot_be(graph: ww.graph.Graph, tmp_path: Path) -> None:
    directed = ww.graph.build([(np.arange(3), np.arange(3))], tmp_path / "d.ww")
    with pytest.raises(errors.FormatError, match="in_edges=True"):
        ww.train.Neighbors(directed, [1], 1)
    for options, says in (
        ({"fanouts": [-2]}, "fanouts"),
        ({"batch_size": 0}, "batch_size"),
        ({"vertices": [1, 1]}, "must be distinct"),
        ({"vertices": [300]}, "300 of a graph"),
        ({"vertices": [0.5]}, "a list or an array"),
        ({"drop_last": True, "batch_size": 301}, "no"),
    ):
        with pytest.raises(errors.ArgumentError, match=says):
            ww.train.Neighbors(graph, **{"fanouts": [1], "batch_size": 2, **options})


def test_a_damaged_graph_is_found_and_not_followed(tmp_path: Path) -> None:
    graph = ww.graph.build([(np.array([0, 1]), np.array([1, 0]))], tmp_path / "g.ww", in_edges=True)
    edges = np.load(graph.in_edges_path, mmap_mode="r+")
    edges[0] = 1 << 20
    del edges
    with pytest.raises(errors.FormatError, match="does not exist"):
        ww.train.Neighbors(graph, [2], 2)[0]
