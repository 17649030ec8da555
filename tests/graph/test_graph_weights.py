"""Weights and in-edges of graphs on disk, from files and from chunks, in bounded memory."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.graphs import given_rows

from warpwell.cli import main
from warpwell.errors import ArgumentError, FormatError, MissingFileError
from warpwell.graph import Graph, build, convert, generate
from warpwell.graph.external import ExternalSort
from warpwell.graph.generate import random_edges

SMALL = 1 << 16
HEAD = "%%MatrixMarket matrix coordinate "
Rows = list[tuple[int, int, float]]


def rows_of(graph: Graph, part: str = "") -> Rows:
    """Return all edges of a graph with their weights, in order; in-edges as they are stored."""
    offsets, edges, weights = given_rows(graph, part)
    assert (offsets.dtype, edges.dtype, weights.dtype) == (np.int64, graph.destinations, graph.weights)
    sources = np.repeat(np.arange(graph.vertices), np.diff(offsets))
    return list(zip(sources.tolist(), edges.tolist(), weights.tolist(), strict=True))


def chunks(rows: list[tuple[int, int, Any]], size: int = 7) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    for start in range(0, len(rows), size):
        sources, destinations, weights = zip(*rows[start : start + size], strict=True)
        yield np.array(sources, np.int64), np.array(destinations, np.int64), np.array(weights)


def lightest_both_ways(rows: Rows) -> Rows:
    """Return both directions of each edge once, with the smallest weight."""
    found: dict[tuple[int, int], float] = {}
    for source, destination, weight in rows:
        for edge in ((source, destination), (destination, source)):
            found[edge] = min(found.get(edge, weight), weight)
    return sorted((*edge, weight) for edge, weight in found.items())


EDGES = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-4, 4))


@given(st.lists(EDGES, min_size=1, max_size=120), st.booleans(), st.integers(1, 30), st.sampled_from([1, 0.5]))
def test_weights_stay_with_their_edges(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, undirected: bool, size: int, unit: float
) -> None:
    rows = [(source, destination, weight * unit) for source, destination, weight in rows]
    out = tmp_path_factory.mktemp("any") / "graph.ww"
    graph = build(chunks(rows, size), out, undirected=undirected, in_edges=True)
    assert graph.weights == ("int32" if unit == 1 else "float32") and graph.in_edges
    assert rows_of(graph) == (lightest_both_ways(rows) if undirected else sorted(rows))
    swapped = sorted((destination, source, weight) for source, destination, weight in rows_of(graph))
    assert rows_of(graph, "in_") == swapped
    assert graph.in_degrees().tolist() == np.bincount([r[0] for r in swapped], minlength=graph.vertices).tolist()


@pytest.mark.parametrize("samples", [4, 1024])
@pytest.mark.parametrize("undirected", [False, True])
def test_a_sort_that_spills_equals_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undirected: bool, samples: int
) -> None:
    """Few edges many times, so that equal ones with other weights are in all runs and cross blocks."""
    monkeypatch.setattr("warpwell.graph.external._SAMPLES", samples)
    random = np.random.default_rng(3)
    ends, weights = random.integers(0, 20, (2, 30_000)), random.integers(-99, 99, 30_000)
    rows = list(zip(*ends.tolist(), weights.tolist(), strict=True))
    graphs = [
        build(chunks(rows, 1000), tmp_path / f"{memory}.ww", undirected=undirected, memory_bytes=memory, in_edges=True)
        for memory in (SMALL, 1 << 26)
    ]
    for file in sorted(graphs[0].path.iterdir()):
        assert file.read_bytes() == (graphs[1].path / file.name).read_bytes()
    assert rows_of(graphs[0]) == (lightest_both_ways(rows) if undirected else sorted(rows))


VALUES = {
    "int32": [0, 1, -1, 2**24 + 1, 2**31 - 1, -(2**31)],
    "float32": [0.0, -0.0, 1.5, -2.5, 1e-45, -1e-45, 3.4e38, -3.4e38],
}


@given(
    st.lists(
        st.tuples(*[st.sampled_from([0, 2047, 2048, 2**31, 2**32 - 1])] * 2, st.integers(0, 7), st.integers(0, 1)),
        min_size=1,
        max_size=200,
    )
)
def test_weights_are_sorted_exactly(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int, int, int]]
) -> None:
    """All weights become floats if one is a float."""
    rows: list[tuple[int, int, Any]] = []
    with ExternalSort(tmp_path_factory.mktemp("sort"), 256) as sort:
        for source, destination, number, kind in edges * 9:
            dtype = list(VALUES)[kind]
            weight = np.array([VALUES[dtype][number % len(VALUES[dtype])]], dtype)
            sort.add(np.array([source]), np.array([destination]), weight)
            rows.append((source, destination, weight[0]))
        columns = [np.concatenate(column) for column in zip(*sort.blocks(), strict=True)]
    dtype = "float32" if any(kind for *_, kind in edges) else "int32"
    assert sort.weights == columns[2].dtype == dtype
    expected = sorted((source, destination, weight.astype(dtype).item()) for source, destination, weight in rows)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_the_sort_keeps_to_its_memory(tmp_path: Path) -> None:
    count = 50_000
    random = np.random.default_rng(2)
    memory = 4 * SMALL
    with ExternalSort(tmp_path, memory) as sort:
        for _ in range(count // 1000):
            assert sort._buffer.nbytes <= memory // 2
            sort.add(*random.integers(0, 1000, (2, 1000)), random.random(1000).astype(np.float32))
        assert max(part.nbytes for part in sort._parts()) <= memory // 2
        assert sort._file is not None and sort._file.tell() == 16 * count
        assert list(tmp_path.iterdir()) == []


def test_the_dtype_of_weights(tmp_path: Path) -> None:
    def made(values: Any, **options: Any) -> Graph:
        edges = [(np.array([0]), np.array([1]), np.array([weight])) for weight in values]
        return build(edges, tmp_path / "g.ww", overwrite=True, **options)

    for weights, kind in (([3, -4], "int32"), ([3, 2**31], "float32"), ([3.0], "float32"), ([2, 0.5], "float32")):
        assert made(weights).weights == kind
        assert rows_of(made(weights)) == sorted((0, 1, weight) for weight in weights)
    assert rows_of(made([3.0, 4], weights="int32")) == [(0, 1, 3), (0, 1, 4)]
    assert made([3], weights=False).weights is None
    assert rows_of(made([1 << 24 | 1], weights="float32")) == [(0, 1, 1 << 24)]
    for weights, options, problem in (
        ([0.5], {"weights": "int32"}, "0.5 does not fit int32"),
        ([2**31], {"weights": "int32"}, "2147483648 does not fit int32"),
        ([float("nan")], {}, "nan does not fit float32"),
        ([1e39], {}, "does not fit float32"),
    ):
        with pytest.raises(FormatError, match=problem):
            made(weights, **options)
    with pytest.raises(ArgumentError, match="weights is 'int64'"):
        made([1], weights="int64")
    with pytest.raises(ArgumentError, match="integers or floats, not complex"):
        made([1j])
    with pytest.raises(ArgumentError, match="some chunks of edges have weights and some do not"):
        column = np.array([1])
        build([(column, column, column), (column, column)], tmp_path / "h.ww")
    with pytest.raises(ArgumentError, match="has no weights: leave weights='int32' out"):
        build([(column, column)], tmp_path / "h.ww", weights="int32")
    assert [path.name for path in tmp_path.iterdir()] == ["g.ww"]


def test_destinations_take_eight_bytes_where_four_do_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test lowers the limit, because a graph above it is too large."""
    monkeypatch.setattr(sys.modules["warpwell.graph.build"], "SMALL", 5)
    for vertices, kind in ((5, "int32"), (6, "int64")):
        graph = build([(np.array([0]), np.array([vertices - 1]))], tmp_path / f"{vertices}.ww")
        assert (graph.destinations, graph.load()[1].dtype, graph.load()[1].tolist()) == (kind, kind, [vertices - 1])


def test_data_begin_with_a_page(tmp_path: Path) -> None:
    graph = generate("urand", 8, tmp_path / "g.ww", weights="int32")
    for path in (graph.offsets_path, graph.edges_path, graph.weights_path):
        assert path.stat().st_size == 4096 + np.load(path).nbytes


def test_what_the_description_promises_is_there(tmp_path: Path) -> None:
    def fresh() -> Graph:
        return generate("urand", 4, tmp_path / "g.ww", weights="int32", undirected=False, in_edges=True, overwrite=True)

    names = ("weights", "in_offsets", "in_edges", "in_weights", "heads", "order")
    for path in (tmp_path / "g.ww" / f"{name}.npy" for name in names):
        fresh()
        path.unlink()
        with pytest.raises(MissingFileError, match=f"{path.name} is missing"):
            Graph.open(tmp_path / "g.ww")
    for key, value in (
        ("weights", "int8"),
        ("destinations", "int16"),
        ("in_edges", 1),
        ("weights", 0),
        ("order", "any"),
    ):
        meta = json.loads((fresh().path / "graph.json").read_text())
        (tmp_path / "g.ww" / "graph.json").write_text(json.dumps(meta | {key: value}))
        with pytest.raises(FormatError, match=f"{key!r} is {value!r}"):
            Graph.open(tmp_path / "g.ww")
    np.save(fresh().edges_path, np.full(fresh().edges, 16, np.int32))
    (tmp_path / "g.ww" / "in_edges.npy").unlink()
    bad = Graph(tmp_path / "g.ww", 16, 256, False, destinations="int32")
    np.save(bad.edges_path, np.full(256, 16, np.int32))
    with pytest.raises(FormatError, match="outside of 0 to 15"):
        bad.in_degrees()


# -- files -------------------------------------------------------------------------------------------------------


def converted(folder: Path, text: str, name: str, **options: Any) -> Rows:
    data = text.encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    graph = convert(folder / name, folder / "graph.ww", overwrite=True, **options)
    if graph.weights is not None:
        return rows_of(graph)
    sources = np.repeat(np.arange(graph.vertices), graph.degrees())
    return [(s, d, 0) for s, d in zip(sources.tolist(), graph.load()[1].tolist(), strict=True)]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.wel", "0 1 5\n1 2 -7\n", [(0, 1, 5), (1, 2, -7)]),
        ("a.wel", "0 1 5\n1 2 .25\n2 0 1e3\n", [(0, 1, 5), (1, 2, 0.25), (2, 0, 1000)]),
        (
            "a.mtx",
            HEAD + "real symmetric\n3 3 2\n2 1 5\n3 3 .5\n",
            [(0, 1, 5), (1, 0, 5), (2, 2, 0.5)],
        ),
        ("a.mtx", HEAD + "integer skew-symmetric\n3 3 1\n2 1 5\n", [(0, 1, -5), (1, 0, 5)]),
        ("a.csv", "src,dst\n0,1\n3,2\n", [(0, 1, 0), (3, 2, 0)]),
        ("a.csv", 'Weight,name,Target,source\n1.5,"x, y",1,0\n2,b,2,"1"\n', [(0, 1, 1.5), (1, 2, 2)]),
        ("a.csv", 'w,to,"from"\n1,"1",0\n2,"2","1"\n\n3,0,0', [(0, 0, 3), (0, 1, 1), (1, 2, 2)]),
        ("a.csv", "tag,src,dst\n#art,0,1\n#music,1,2\nnews,2,3\n", [(0, 1, 0), (1, 2, 0), (2, 3, 0)]),
        ("a.mtx", HEAD + "unsigned-integer general\n3 3 2\n1 2 5\n2 3 4000000000\n", [(0, 1, 5), (1, 2, 4e9)]),
        ("a.tsv.gz", "# c\nfrom\tto\tw\n0\t1\t9\n1\t0\t-8\n", [(0, 1, 9), (1, 0, -8)]),
        ("a.txt", "source\ttarget\n0\t1\n", [(0, 1, 0)]),
    ],
)
def test_files_with_weights_or_named_columns(tmp_path: Path, name: str, text: str, rows: Rows) -> None:
    assert converted(tmp_path, text, name) == rows
    assert converted(tmp_path, text, name, weights=False) == [(*row[:2], 0) for row in rows]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    for weight, options in (
        ("0.25", {"weights": "int32"}),
        ("3000000000", {"weights": "int32"}),
        ("nan", {}),
        ("1e39", {}),
    ):
        with pytest.raises(
            FormatError, match=rf"a.wel: the weight \S+ does not fit {options.get('weights', 'float32')}"
        ):
            converted(tmp_path, f"0 1 5\n1 2 {weight}\n", "a.wel", **options)
    with pytest.raises(FormatError, match="expected 'source target weight'"):
        converted(tmp_path, "0 1\n", "a.el", weights="int32")
    with pytest.raises(ArgumentError, match="has no weights"):
        converted(tmp_path, HEAD + "pattern general\n2 2 1\n1 2\n", "a.mtx", weights="int32")
    with pytest.raises(ArgumentError, match="is a matrix; leave columns"):
        converted(tmp_path, HEAD + "pattern general\n2 2 1\n1 2\n", "a.mtx", columns=("a", "b"))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".ww"] == []


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_values_of_scipy(tmp_path: Path, kind: str) -> None:
    matrix = scipy.sparse.random_array((200, 200), density=0.5, format="csr", rng=1)
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix.asformat(kind))
    graph = convert(tmp_path / "a.npz", tmp_path / "a.ww")
    assert np.array_equal(graph.load()[1], matrix.indices)
    assert np.array_equal(given_rows(graph)[2], matrix.data.astype(np.float32))
    matrix.data[:] = 1
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix.asformat(kind))
    assert convert(tmp_path / "a.npz", tmp_path / "b.ww").weights is None
    assert convert(tmp_path / "a.npz", tmp_path / "c.ww", weights="int32").weights == "int32"


# -- generated weights ---------------------------------------------------------------------------------------------


def test_weights_of_gap(tmp_path: Path) -> None:
    """The weights are std::uniform_int_distribution(1, 255) of std::mt19937, restarted for each block."""
    weights = np.concatenate([chunk[2] for chunk in random_edges("urand", 15, degree=9, weights="int32")])
    model = []
    for block, count in ((0, 1 << 18), (1, (9 << 15) - (1 << 18))):
        stream = np.random.RandomState(27491095 + block)
        model += [1 + (int(draw) * 255 >> 32) for draw in stream.randint(0, 2**32, count, np.uint32)]
    assert weights.tolist() == model
    graph = generate("urand", 8, tmp_path / "g.ww", weights="float32")
    values = graph.map(graph.weights_path)
    assert values.min() > 0 and values.max() <= 1 and np.array_equal(values * 2**24, np.rint(values * 2**24))
    assert rows_of(graph) == sorted((d, s, w) for s, d, w in rows_of(graph))
    with pytest.raises(ArgumentError, match="weights is 'float64'"):
        generate("urand", 8, tmp_path / "h.ww", weights="float64")


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_command(*arguments: object) -> dict[str, Any]:
        assert main(["graph", *map(str, arguments), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    (tmp_path / "a.csv").write_text("b,a,c\n1,0,5\n2,1,6\n")
    report = run_command("convert", tmp_path / "a.csv", tmp_path / "a.ww", "--columns", "a,b,c", "--in-edges")
    assert (report["weights"], report["in_edges"], report["destinations"]) == ("int32", True, "int32")
    assert report["bytes_on_disk"] == 8 * 4096 + 2 * 4 * 8 + 4 * 2 * 4 + 3 * 16 + 3 * 8
    assert rows_of(Graph.open(tmp_path / "a.ww")) == [(0, 1, 5), (1, 2, 6)]
    convert_command = "convert", tmp_path / "a.csv", tmp_path / "a.ww", "--columns", "a,b,c", "--overwrite"
    report = run_command(*convert_command, "--weights", "none")
    assert (report["weights"], report["in_edges"]) == (None, False)
    report = run_command("generate", "urand", tmp_path / "u.ww", "--scale", 6, "--weights", "float32")
    assert (report["weights"], report["in_edges"]) == ("float32", True)
    degrees = Graph.open(tmp_path / "u.ww").degrees()
    report = run_command("info", tmp_path / "u.ww")
    assert (report["vertices"], report["edges"], report["weights"]) == (64, degrees.sum(), "float32")
    assert (report["largest_degree"], report["vertices_without_edges"]) == (degrees.max(), (degrees == 0).sum())
