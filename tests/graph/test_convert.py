"""Graphs on disk: equal to SciPy's from the same edges, in bounded memory, complete or not there."""

import errno
import json
import os
import signal
import subprocess
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
from tests.harness.until import HANG_SECONDS, until

from warpwell._npy import npy_writer
from warpwell.errors import ArgumentError, FormatError, MissingFileError, StorageFullError
from warpwell.graph import Graph, bfs, build, convert
from warpwell.graph.build import default_memory_bytes
from warpwell.graph.external import ExternalSort
from warpwell.replacing import storage_full

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SMALL = 1 << 16
Pairs = list[tuple[int, int]]


def chunks(pairs: Pairs | npt.NDArray[np.int64], size: int = 1000) -> Iterator[tuple[npt.NDArray[np.int64], ...]]:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    for start in range(0, len(array), size):
        yield array[start : start + size, 0].copy(), array[start : start + size, 1].copy()


def rows_of(graph: Graph) -> Pairs:
    """All edges of a graph on disk, in stored order."""
    offsets, edges = graph.load()
    assert (offsets.dtype, edges.dtype) == (np.int64, np.int32)
    assert offsets.shape == (graph.vertices + 1,)
    assert edges.shape == (graph.edges,)
    sources = np.repeat(np.arange(graph.vertices), np.diff(offsets))
    return list(zip(sources.tolist(), edges.tolist(), strict=True))


def expected(pairs: Pairs, undirected: bool) -> Pairs:
    if undirected:
        return sorted({*pairs, *((destination, source) for source, destination in pairs)})
    return sorted(pairs)


def random_pairs(count: int, vertices: int, seed: int = 1) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vertices, (count, 2))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=200),
    st.booleans(),
    st.integers(1, 50),
    st.sampled_from(["given", "degree"]),
)
def test_any_edges_become_their_rows(
    tmp_path_factory: pytest.TempPathFactory, pairs: Pairs, undirected: bool, size: int, order: str
) -> None:
    out = tmp_path_factory.mktemp("any") / "graph.ww"
    graph = build(chunks(pairs, size), out, undirected=undirected, order=order, memory_bytes=SMALL)
    assert rows_of(graph) == expected(pairs, undirected)
    assert graph.vertices == max(map(max, pairs)) + 1
    assert graph.undirected is undirected
    if order == "degree":
        degrees = np.bincount([source for source, _ in rows_of(graph)], minlength=graph.vertices)
        by_degree = sorted(range(graph.vertices), key=lambda vertex: (-degrees[vertex], vertex))
        assert graph.stored_order().tolist() == by_degree
        assert graph.original(graph.stored_order()).tolist() == list(range(graph.vertices))


@pytest.mark.parametrize("in_edges", [False, True])
@pytest.mark.parametrize("undirected", [False, True])
def test_heads_are_the_first_neighbors(tmp_path: Path, undirected: bool, in_edges: bool) -> None:
    graph = build(
        chunks(random_pairs(900, 300)),
        tmp_path / "graph.ww",
        vertices=310,
        undirected=undirected,
        in_edges=in_edges,
        order="degree",
    )
    if not graph.in_edges:
        assert not graph.heads_path.exists()
        return
    heads = np.load(graph.heads_path)
    assert (heads.dtype, heads.shape) == (np.int32, (4 * 310,))
    offsets, edges = graph.map(graph.in_offsets_path), graph.map(graph.in_edges_path)
    for vertex in range(310):
        first = edges[offsets[vertex] : offsets[vertex + 1]][:4].tolist()
        assert heads[4 * vertex : 4 * vertex + 4].tolist() == first + [-1] * (4 - len(first))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4"])
@pytest.mark.parametrize("weighted", [False, True])
def test_vertices_and_weights_of_any_integer_type(tmp_path: Path, dtype: str, weighted: bool) -> None:
    pairs = [(0, 7), (3, 1), (9, 0), (9, 8), (5, 5), (100, 127)]
    sides = [np.array(side, dtype) for side in zip(*pairs, strict=True)]
    graph = build(
        [(*sides, sides[1])] if weighted else [tuple(sides)],
        tmp_path / "graph.ww",
        weights="int32" if weighted else None,
    )
    assert rows_of(graph) == sorted(pairs)
    if weighted:
        assert graph.map(graph.weights_path).tolist() == graph.load()[1].tolist()


@pytest.mark.parametrize(
    ("sides", "problem"),
    [
        (([0.0], [1.0]), "arrays of integers, not float64"),
        (([True], [False]), "arrays of integers, not bool"),
        (([[0]], [[1]]), r"shape \(1, 1\)"),
        (([0, 1], [1]), r"have \[2, 1\] items"),
        (([0, 1], [1, 0], [3]), r"have \[2, 2, 1\] items"),
        (([0], [-1]), "vertex -1 does not fit"),
        ((np.array([1], np.int8), np.array([-128], np.int8)), "vertex -128 does not fit"),
        (([0], [2**32]), "vertex 4294967296 does not fit.*Renumber"),
        ((np.array([1], np.uint64), np.array([2**64 - 1], np.uint64)), "vertex 18446744073709551615 does not fit"),
    ],
)
def test_chunks_that_are_refused_leave_nothing(tmp_path: Path, sides: tuple[Any, ...], problem: str) -> None:
    with pytest.raises((ArgumentError, FormatError), match=problem):
        build([tuple(map(np.asarray, sides))], tmp_path / "graph.ww")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("samples", [4, 1024])
def test_a_sort_that_spills_equals_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undirected: bool, samples: int
) -> None:
    monkeypatch.setattr("warpwell.graph.external._SAMPLES", samples)
    pairs = random_pairs(100_000, 300)
    small = build(chunks(pairs), tmp_path / "small.ww", undirected=undirected, memory_bytes=SMALL)
    large = build(chunks(pairs), tmp_path / "large.ww", undirected=undirected, memory_bytes=1 << 26)
    for file in ("offsets.npy", "edges.npy", "graph.json"):
        assert (small.path / file).read_bytes() == (large.path / file).read_bytes()
    matrix = scipy.sparse.coo_array((np.ones(len(pairs), np.int64), tuple(pairs.T)), (300, 300)).tocsr()
    if undirected:
        matrix = matrix + matrix.T
        matrix.sort_indices()
        assert np.array_equal(small.load()[0], matrix.indptr)
        assert np.array_equal(small.load()[1], matrix.indices)
    else:
        assert small.edges == matrix.sum() == len(pairs)
        assert rows_of(small) == sorted(map(tuple, pairs.tolist()))


def test_the_sort_spills_what_exceeds_its_memory(tmp_path: Path) -> None:
    pairs = random_pairs(50_000, 1000)
    with ExternalSort(tmp_path, SMALL) as sort:
        for sources, destinations in chunks(pairs):
            sort.add(sources, destinations)
        blocks = list(sort.blocks())
        assert sort._file is not None and sort._file.tell() == 8 * 50_000
        # The temporary file has no name.
        assert not list(tmp_path.iterdir())
    assert max(block[0].nbytes for block in blocks) <= SMALL
    got = np.concatenate([np.stack(block, axis=1) for block in blocks])
    assert np.array_equal(got, pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])


@given(
    st.lists(st.tuples(*[st.sampled_from([0, 5, 2047, 2**31 - 1, 2**31, 2**32 - 1])] * 2), max_size=60),
    st.booleans(),
)
def test_large_vertices_are_sorted_exactly(
    tmp_path_factory: pytest.TempPathFactory, pairs: Pairs, unique: bool
) -> None:
    with ExternalSort(tmp_path_factory.mktemp("wide"), 256, unique=unique) as sort:
        for sources, destinations in chunks(pairs * 20, 7):
            sort.add(sources, destinations)
        # Edges can be read several times.
        for _ in range(2):
            got = [pair for block in sort.blocks() for pair in zip(*(side.tolist() for side in block), strict=True)]
            assert got == (sorted(set(pairs)) if unique else sorted(pairs * 20))


def test_isolated_vertices_count_where_the_user_says_so(tmp_path: Path) -> None:
    graph = build(chunks([(1, 2)]), tmp_path / "a.ww", vertices=10)
    assert graph.load()[0].tolist() == [0, 0] + [1] * 9
    graph = build(chunks([]), tmp_path / "b.ww", vertices=3)
    assert (graph.vertices, graph.edges, rows_of(graph)) == (3, 0, [])


def test_self_loops_stay_unless_asked_otherwise(tmp_path: Path) -> None:
    pairs = [(1, 1), (0, 1), (1, 1)]
    assert rows_of(build(chunks(pairs), tmp_path / "a.ww")) == [(0, 1), (1, 1), (1, 1)]
    assert rows_of(build(chunks(pairs), tmp_path / "b.ww", undirected=True)) == [(0, 1), (1, 0), (1, 1)]
    assert rows_of(build(chunks(pairs), tmp_path / "c.ww", self_loops=False)) == [(0, 1)]


def test_convert_reads_files_and_tells_its_progress(tmp_path: Path) -> None:
    source = tmp_path / "edges.txt"
    source.write_text("# head\n3 1\n0 2\n3 0\n3 1\n")
    calls: list[tuple[str, int, int]] = []
    graph = convert(source, tmp_path / "graph.ww", progress=lambda *call: calls.append(call))
    assert rows_of(graph) == [(0, 2), (3, 0), (3, 1), (3, 1)]
    assert graph == Graph.open(tmp_path / "graph.ww")
    assert (graph.source, graph.undirected) == ("edges.txt", False)
    assert calls == [
        ("read", source.stat().st_size, source.stat().st_size),
        *(("write", done, 12) for done in (4, 8, 12)),
    ]
    meta = json.loads((graph.path / "graph.json").read_text())
    assert meta == {
        "format": "warpwell graph",
        "version": 3,
        "vertices": 4,
        "edges": 4,
        "undirected": False,
        "source": "edges.txt",
        "destinations": "int32",
        "weights": None,
        "in_edges": False,
        "order": "degree",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.txt", "graph.ww"]


def test_a_symmetric_matrix_is_an_undirected_graph(tmp_path: Path) -> None:
    source = tmp_path / "graph.mtx"
    source.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n5 5 2\n2 1\n3 3\n")
    graph = convert(source, tmp_path / "graph.ww")
    assert (graph.vertices, graph.undirected, rows_of(graph)) == (5, True, [(0, 1), (1, 0), (2, 2)])


def test_the_folder_may_be_read_by_whoever_the_umask_allows(tmp_path: Path) -> None:
    graph = build(chunks([(0, 1)]), tmp_path / "graph.ww")
    umask = os.umask(0)
    os.umask(umask)
    assert graph.path.stat().st_mode & 0o777 == 0o777 & ~umask


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    out = tmp_path / "graph.ww"
    build(chunks([(0, 1)]), out)
    with pytest.raises(ArgumentError, match=r"exists already.*--overwrite"):
        build(chunks([(0, 2)]), out)
    assert rows_of(Graph.open(out)) == [(0, 1)]
    build(chunks([(0, 2)]), out, overwrite=True)
    assert rows_of(Graph.open(out)) == [(0, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["graph.ww"]


def test_only_a_graph_is_ever_replaced(tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    link = tmp_path / "link.ww"
    link.symlink_to(out)
    for path in (out, out / "thesis.txt", link):
        with pytest.raises(ArgumentError, match="not a graph"):
            build(chunks([(0, 1)]), path, overwrite=True)
    assert (out / "thesis.txt").read_text() == "all of it"
    (out / "thesis.txt").unlink()
    build(chunks([(0, 1)]), out, overwrite=True)


def test_a_replaced_graph_survives_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "graph.ww"
    build(chunks([(0, 1)]), out)
    source = tmp_path / "edges.txt"
    source.write_text("0 2\n1 x\n")
    with pytest.raises(FormatError, match="row 2"):
        convert(source, out, overwrite=True)
    assert rows_of(Graph.open(out)) == [(0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.txt", "graph.ww"]


@pytest.mark.parametrize("stage", ["read", "write"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_nothing_stays_of_a_graph_that_failed(tmp_path: Path, stage: str, error: type[BaseException]) -> None:
    def progress(at: str, done: int, total: int) -> None:
        # With the temporary folder in place, and edges spilled or written.
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        if at == stage and done > 5000:
            raise error

    with pytest.raises(error):
        build(chunks(random_pairs(50_000, 100)), tmp_path / "graph.ww", memory_bytes=SMALL, progress=progress)
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, signal, sys
import numpy as np
from warpwell.errors import StorageFullError
from warpwell.graph import build

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
pairs = np.random.default_rng(1).integers(0, 100, (50_000, 2))
try:
    build([(pairs[:, 0].copy(), pairs[:, 1].copy())], sys.argv[1], memory_bytes=int(sys.argv[3]))
except StorageFullError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize(
    ("limit", "memory"),
    [(100_000, SMALL), (100_000, 1 << 24), (199_999, 1 << 24), (500, 1 << 24), (0, 1 << 24)],
)
def test_nothing_stays_when_the_disk_is_full(tmp_path: Path, limit: int, memory: int) -> None:
    # A limit on the size of files ends a write where a full disk would: in the spilled runs or in the edges.
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "graph.ww"), str(limit), str(memory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (2, "")
    assert "no space left" in run.stdout
    assert "Free some space" in run.stdout
    assert not list(tmp_path.iterdir())


def test_a_full_medium(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageFullError, match="/dev/full: no space left") as caught,
        storage_full(Path("/dev/full")),
        npy_writer(Path("/dev/full"), np.int64) as write,
    ):
        write(np.arange(10))
    assert caught.value.errno == errno.ENOSPC


ENDLESS = """
import sys
import numpy as np
from warpwell.graph import build

def edges():
    while True:
        yield np.arange(10_000), np.arange(10_000)

build(edges(), sys.argv[1], memory_bytes=1 << 20)
"""


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path / "graph.ww")], stderr=subprocess.PIPE)
    try:
        until(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in errors
    assert not list(tmp_path.iterdir())


def test_arguments_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "graph.ww"
    with pytest.raises(ArgumentError, match=r"must be 65,536 to [\d,]+ bytes, got 1000"):
        build(chunks([(0, 1)]), out, memory_bytes=1000)
    with pytest.raises(ArgumentError, match=r"memory_bytes must be 65,536 to [\d,]+ bytes"):
        build(chunks([(0, 1)]), out, memory_bytes=1 << 60)
    with pytest.raises(ArgumentError, match="vertices is -1"):
        build(chunks([(0, 1)]), out, vertices=-1)
    with pytest.raises(FormatError, match="vertex 5 does not fit 5 vertices"):
        build(chunks([(0, 5)]), out, vertices=5)
    with monkeypatch.context() as patch, pytest.raises(FormatError, match=r"take 32 GiB, more memory .* renumber"):
        patch.setattr(sys.modules["warpwell.graph.build"], "_memory_of", lambda name: 1 << 30)
        build(chunks([(0, 2**32 - 1)]), out)
    with pytest.raises(MissingFileError, match="create the folder first"):
        build(chunks([(0, 1)]), tmp_path / "missing" / "graph.ww")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(FormatError, match=r"empty\.txt holds no edge"):
        convert(tmp_path / "empty.txt", out)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
    assert default_memory_bytes() >= 1 << 28


def test_a_graph_whose_files_do_not_fit_is_refused(tmp_path: Path) -> None:
    def fresh() -> Path:
        return build(chunks([(0, 1), (1, 2)]), tmp_path / "graph.ww", overwrite=True).path

    with pytest.raises(MissingFileError, match="no such graph"):
        Graph.open(tmp_path / "missing.ww")
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="convert it"):
        Graph.open(tmp_path / "file")
    for name, problem in (
        ("graph.json", "not a graph"),
        ("edges.npy", "missing"),
        ("offsets.npy", "missing"),
    ):
        (fresh() / name).rename(tmp_path / "elsewhere")
        with pytest.raises((MissingFileError, FormatError), match=problem):
            Graph.open(tmp_path / "graph.ww")
        (tmp_path / "elsewhere").rename(tmp_path / "graph.ww" / name)
    for text, problem in (
        ("{", "JSON"),
        ("[]", "not a JSON object"),
        ("{}", "does not describe"),
        (
            '{"format": "warpwell graph", "version": 4}',
            r"version 4, but this Warpwell reads version 3\. Make the graph",
        ),
        ('{"format": "warpwell graph", "version": 2, "vertices": 3}', "version 2, .*Make the graph again with"),
        ('{"format": "warpwell graph", "version": 1, "vertices": 3}', "version 1, .*Make the graph again with"),
        ('{"format": "warpwell graph", "version": 3, "vertices": "3"}', "'vertices' is '3'"),
        ('{"format": "warpwell graph", "version": 3, "vertices": 3, "edges": -1}', "'edges' is -1"),
    ):
        (fresh() / "graph.json").write_text(text)
        with pytest.raises(FormatError, match=problem):
            Graph.open(tmp_path / "graph.ww")
    for array, problem in (
        (np.arange(3), r"shape \(3,\)"),
        (np.arange(2.0), "float64"),
        (np.arange(2), "int64"),
        (np.array([None, None]), "object"),
    ):
        np.save(fresh() / "edges.npy", array)
        with pytest.raises(FormatError, match=problem):
            Graph.open(tmp_path / "graph.ww")
    np.save(fresh() / "offsets.npy", np.array([0, 1, 2, 3]))
    with pytest.raises(FormatError, match="first and last offset are 0 and 3, not 0 and 2"):
        Graph.open(tmp_path / "graph.ww")
    for size, problem in ((4100, "not copied whole"), (60, r"not a \.npy file"), (0, r"not a \.npy file")):
        os.truncate(fresh() / "edges.npy", size)
        with pytest.raises(FormatError, match=problem):
            Graph.open(tmp_path / "graph.ww")


@pytest.mark.quick("True")
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("undirected", [False, True])
def test_the_crawl_equals_scipy(tmp_path: Path, undirected: bool) -> None:
    graph = convert(DATA / "cnr-2000.txt.gz", tmp_path / "cnr.ww", undirected=undirected, memory_bytes=1 << 24)
    offsets, edges = graph.load()
    pairs = np.loadtxt(DATA / "cnr-2000.txt.gz", dtype=np.int64)
    values = np.ones(len(pairs), np.int8)
    matrix = scipy.sparse.coo_array((values, tuple(pairs.T)), (325_557, 325_557)).tocsr()
    if undirected:
        matrix = (matrix + matrix.T).tocsr()
    matrix.sort_indices()
    assert np.array_equal(offsets, matrix.indptr)
    assert np.array_equal(edges, matrix.indices)


@pytest.mark.parametrize("options", [{}, {"undirected": True}, {"order": "given"}, {"in_edges": True}])
def test_vertices_have_names(tmp_path: Path, options: dict[str, Any]) -> None:
    edges = [("alice", "bob"), ("bob", "carol"), ("carol", "alice"), ("dave", "alice"), ("erin", "alice")]
    (tmp_path / "a.csv").write_text("from,to\n" + "".join(f"{source},{target}\n" for source, target in edges))
    graph = convert(tmp_path / "a.csv", tmp_path / "a.ww", names=True, **options)
    names = graph.names.to_pylist()
    assert names == ["alice", "bob", "carol", "dave", "erin"]
    assert [graph.vertex(name) for name in names] == list(range(5))
    expected = {*edges, *((target, source) for source, target in edges)} if "undirected" in options else set(edges)
    assert {(names[source], names[target]) for source, target in rows_of(graph)} == expected
    assert graph.top(graph.in_degrees(), 2) == [
        ("alice", 4 if "undirected" in options else 3),
        ("bob", 2 if "undirected" in options else 1),
    ]
    with pytest.raises(ArgumentError, match=r"a\.ww has no vertex 'zoe'; expected one of its names"):
        graph.vertex("zoe")
    with pytest.raises(ArgumentError, match="has no vertex 1"):
        graph.vertex(1)


def test_integers_are_renumbered(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{2**63 - 1} -5\n-5 7\n7 7\n")
    graph = convert(tmp_path / "a.txt", tmp_path / "a.ww", renumber=True)
    assert (graph.vertices, rows_of(graph), graph.names.to_pylist()) == (
        3,
        [(0, 1), (1, 2), (2, 2)],
        [2**63 - 1, -5, 7],
    )
    assert graph.vertex(-5) == graph.vertex("-5") == 1
    plain = build(chunks([(0, 1)]), tmp_path / "b.ww")
    assert plain.names is None and plain.vertex("1") == 1 and plain.top(np.array([1.0, 2.0])) == [(1, 2.0), (0, 1.0)]
    for each, name in (
        (graph, "x"),
        (graph, 8),
        (plain, "2"),
        (plain, "-1"),
        (plain, "x"),
        (plain, 1.0),
        (graph, 2**70),
        (graph, None),
    ):
        with pytest.raises(ArgumentError, match="has no vertex"):
            each.vertex(name)
    for values, count, problem in (
        (np.ones(3), 1, r"values must have an item for each of 2 vertices, got shape \(3,\)"),
        (np.ones(2), -1, "count must be at least 0, got -1"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            plain.top(values, count)
    with pytest.raises(ArgumentError, match=r"source 'x' is not an integer: .*graph\.vertex\(name\)"):
        bfs(plain, "x")  # type: ignore[arg-type]
    for options in ({"names": True, "renumber": True}, {"names": True, "vertices": 3}):
        with pytest.raises(ArgumentError, match="only one of"):
            convert(tmp_path / "a.txt", tmp_path / "c.ww", **options)


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    for names in (["a"], ["a", "b", "c"], ["a", "a"], ["a", 1], [1, "a"], [1, 2**63], ["a", None]):
        with pytest.raises(ArgumentError, match="names"):
            build(chunks([(0, 1)]), tmp_path / "a.ww", names=names)
    assert not list(tmp_path.iterdir())
    graph = build(chunks([(0, 1)]), tmp_path / "a.ww", names=["a", "b"])
    data = (graph.path / "names.arrow").read_bytes()
    for damaged in (b"", data[:200], data.replace(b"name", b"NAME")):
        (graph.path / "names.arrow").write_bytes(damaged)
        with pytest.raises(FormatError, match=r"names\.arrow is damaged"):
            print(Graph.open(graph.path).names)
    larger = build(chunks([(0, 2)]), tmp_path / "b.ww")
    (larger.path / "names.arrow").write_bytes(data)
    with pytest.raises(FormatError, match="has 2 names of type string for 3 vertices"):
        print(larger.names)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    for name, text in (("a.csv", "src,dst\n0,1\n1,x\n"), ("a.wel", "0 1 2\n0 1 nan\n"), ("a.mtx", "%%MatrixMarket")):
        (tmp_path / name).write_text(text)
        with pytest.raises(FormatError):
            convert(tmp_path / name, tmp_path / "a.ww")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.mtx", "a.wel"]
