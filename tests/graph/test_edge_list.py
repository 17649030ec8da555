"""Readers of edges: what they take, and that every malformed line is named."""

import bz2
import gzip
import io
import itertools
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from warpwell.errors import ArgumentError, EdgeListError, FormatError, MissingFileError
from warpwell.graph.convert import open_source
from warpwell.graph.edge_list import EdgeList
from warpwell.graph.matrix_market import MatrixMarket

DATA = Path(__file__).parents[2].parent / "shared" / "data"
Pairs = list[tuple[int, int]]


def pairs_of(path: Path, vertices: int | None = None) -> Pairs:
    pairs: Pairs = []
    for sources, destinations, *_ in open_source(path, vertices):
        assert sources.dtype == destinations.dtype == np.int64
        pairs += zip(sources.tolist(), destinations.tolist(), strict=True)
    return pairs


def write(folder: Path, text: str | bytes, name: str = "graph.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n2 3\n",
        "0\t1\n2\t3",
        "# a comment\n# Nodes: 4 Edges: 2\n0 1\n% another\n2 3\n",
        "0 1\r\n2 3\r\n",
        "\n\n 0   1 \n\t\n  # indented comment\n2\t 3\n\n",
        "\ufeff0 1\n2 3\n",
        "000000000000000000000000000 1\n2 3\n",
        "0 1\n2 3\n   ",
    ],
)
def test_an_edge_list_may_look_many_ways(tmp_path: Path, text: str) -> None:
    assert pairs_of(write(tmp_path, text)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_compression_is_told_by_content(tmp_path: Path, pack: object) -> None:
    text = b"".join(b"%d %d\n" % (i, i * i) for i in range(1000))
    assert pairs_of(write(tmp_path, pack(text))) == [(i, i * i) for i in range(1000)]  # type: ignore[operator]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_truncated_archive_is_not_taken_for_a_whole_one(tmp_path: Path, pack: object) -> None:
    data = pack(np.random.default_rng(1).bytes(5000).hex(" ").encode())  # type: ignore[operator]
    with pytest.raises(FormatError, match=r"not copied whole|expected"):
        pairs_of(write(tmp_path, data[:-20]))


def test_damaged_compressed_data(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"1 2\n" * 1000))
    data[20] ^= 0xFF
    with pytest.raises(FormatError, match="damaged"):
        pairs_of(write(tmp_path, bytes(data)))


def test_zstd_is_read_or_the_way_out_is_named(tmp_path: Path) -> None:
    # A frame with one raw block that holds "0 1\n".
    frame = b"\x28\xb5\x2f\xfd\x20\x04\x21\x00\x000 1\n"
    path = write(tmp_path, frame, "graph.txt.zst")
    try:
        assert pairs_of(path) == [(0, 1)]
    except FormatError as error:
        assert "zstd -d" in str(error)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("7", "expected 'source destination'.*found '7'"),
        ("7 8 9", r"expected 'source destination', found '7 8 9'\. .*ends in \.wel"),
        ("7,8", r"found '7,8'\. Separate fields by spaces \(\.csv files have commas, and a header"),
        ("-7 8", "the source -7 is negative"),
        ("7 -8", "the destination -8 is negative"),
        ("1.5 2", "the source '1.5' is not an integer"),
        ("1e3 2", "the source '1e3' is not an integer"),
        ("+1 2", "is not an integer"),
        ("a b", "the source 'a' is not an integer"),
        ("0x10 2", "is not an integer"),
        ("7 8 # nine", "found '7 8 # nine'"),
        (f"{2**48} 1", "the source 281474976710656 is not in 0 to 281474976710655"),
        ("1 99999999999999999999999", "the destination 9+ is not in"),
        ("1 2\x00", "is not an integer"),
        ("\xff\xfe 2", "is not an integer"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, f"# head\n0 1\n\n{line}\n2 3\n".encode("latin-1"))
    with pytest.raises(EdgeListError, match=problem) as caught:
        pairs_of(path)
    assert caught.value.line == 4
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}, line 4: ")


def test_two_edges_on_a_line_are_not_two_lines(tmp_path: Path) -> None:
    with pytest.raises(EdgeListError, match="found '0 1 2 3'"):
        pairs_of(write(tmp_path, "0 1 2 3\n"))
    with pytest.raises(EdgeListError, match=r"line 1: .*found '0'"):
        pairs_of(write(tmp_path, "0\n1\n"))
    with pytest.raises(EdgeListError, match=r"line 1: .*found '0'"):
        pairs_of(write(tmp_path, "0\n1 2 3\n"))


def test_the_line_is_right_far_into_a_file(tmp_path: Path) -> None:
    lines = [f"{i} {i + 1}" for i in range(400_000)]
    lines[345_678] = "12 x"
    with pytest.raises(EdgeListError, match=r"line 345679: the destination 'x'"):
        pairs_of(write(tmp_path, gzip.compress("\n".join(lines).encode(), 1)))


def test_the_largest_vertex_is_allowed(tmp_path: Path) -> None:
    assert pairs_of(write(tmp_path, f"{2**48 - 1} 0\n")) == [(2**48 - 1, 0)]


def test_a_vertex_beyond_the_given_number(tmp_path: Path) -> None:
    path = write(tmp_path, "0 1\n1 5\n")
    assert pairs_of(path, 6) == [(0, 1), (1, 5)]
    with pytest.raises(EdgeListError, match=r"line 2: the destination 5 is not in 0 to 4\. .*5 vertices"):
        pairs_of(path, 5)
    with pytest.raises(ArgumentError, match="vertices is 0"):
        open_source(path, 0)


def test_weights_that_are_dropped_must_be_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "0 1 5\n2 3 -1.5e-3\n4 5 inf\n", "graph.wel")
    chunks = list(open_source(path, weights=False))
    assert [chunk[1].tolist() for chunk in chunks] == [[1, 3, 5]] and len(chunks[0]) == 2
    with pytest.raises(EdgeListError, match="line 1: the value 'heavy' is not a number"):
        list(open_source(write(tmp_path, "0 1 heavy\n", "graph.wel"), weights=False))
    with pytest.raises(EdgeListError, match="line 1: the weight 'heavy' is not a number"):
        pairs_of(write(tmp_path, "0 1 heavy\n", "graph.wel"))
    with pytest.raises(EdgeListError, match="line 2: expected 'source destination weight'"):
        pairs_of(write(tmp_path, "0 1 5\n2 3\n", "graph.wel"))


def test_what_is_no_file_of_edges(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        open_source(tmp_path / "missing.txt")
    with pytest.raises(FormatError, match="folder"):
        open_source(tmp_path)
    with pytest.raises(FormatError, match=r"line 1|bytes"):
        pairs_of(write(tmp_path, bytes(range(11, 256)) * 40_000))
    with pytest.raises(FormatError, match="archive"):
        open_source(write(tmp_path, "", "graph.tar.gz"))
    with pytest.raises(FormatError, match="already a graph"):
        write(tmp_path, "{}", "graph.json")
        open_source(tmp_path)


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    with pytest.raises(EdgeListError, match="a line of more than"):
        pairs_of(write(tmp_path, gzip.compress(b"1" * (64 << 20))))


@given(
    st.lists(st.tuples(st.integers(0, 2**48 - 1), st.integers(0, 300)), max_size=50),
    st.sampled_from([" ", "\t", " \t "]),
    st.sampled_from(["\n", "\r\n", "\n\n", "\n# 1 2 3\n"]),
    st.booleans(),
)
def test_any_edges_come_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: Pairs, gap: str, end: str, last: bool
) -> None:
    text = end.join(f"{source}{gap}{destination}" for source, destination in pairs) + end * last
    assert pairs_of(write(tmp_path_factory.mktemp("any"), text)) == pairs


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_are_parsed_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int) -> None:
    text = b"1 2\n34 56\n789 12345\n0 1\n" * 3
    path = write(tmp_path_factory.mktemp("noise"), text[:place] + noise + text[place:])
    try:
        got = pairs_of(path)
    except FormatError:
        return
    # What was accepted is what Python's own reading of the lines gives.
    lines = (line.split() for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    assert got == [(int(line[0]), int(line[1])) for line in lines if line and line[0][:1] not in (b"#", b"%")]


HEADS = list(
    itertools.product(
        ["pattern", "real", "integer", "complex"], ["general", "symmetric", "skew-symmetric", "hermitian"]
    )
)


@pytest.mark.parametrize(("values", "symmetry"), HEADS)
def test_matrix_market_in_all_kinds(tmp_path: Path, values: str, symmetry: str) -> None:
    value = {"pattern": "", "real": " -1.5e+00", "integer": " 3", "complex": " 1.0 2"}[values]
    entries = "".join(f"{entry}{value}\n" for entry in ("2 1", "4 4", "4 3"))
    text = f"%%MatrixMarket matrix coordinate {values} {symmetry}\n% comment\n\n4 4 3\n{entries}"
    path = write(tmp_path, text, "graph.mtx")
    reader = MatrixMarket(path)
    assert (reader.vertices, reader.symmetric) == (4, symmetry != "general")
    mirrored = [] if symmetry == "general" else [(0, 1), (2, 3)]
    assert pairs_of(path) == [(1, 0), (3, 3), (3, 2), *mirrored]
    reader.close()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "head"),
        ("%%MatrixMarket matrix coordinate\n", 1, "head"),
        ("hello\n", 1, "head"),
        ("%%MatrixMarket matrix coordinate quaternion general\n1 1 0\n", 1, "quaternion"),
        ("%%MatrixMarket matrix coordinate real general\n%\n", 3, "ends before"),
        ("%%MatrixMarket matrix coordinate real general\n\n3 3\n", 3, "rows columns entries"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 -1\n", 2, "rows columns entries"),
        ("%%MatrixMarket matrix coordinate real symmetric\n3 4 0\n", 2, "square"),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 1\n0 1\n",
            4,
            "source 0 is not in 1 to 3",
        ),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 1\n1 4\n",
            4,
            "destination 4 is not in 1 to 3",
        ),
        ("%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 1 5\n", 3, "expected 'row column'"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 1\n", 3, "expected 'row column value'"),
        ("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 1 one\n", 3, "not a number"),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 1\n",
            4,
            "2 entries were announced, 1 found",
        ),
        (
            "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n1 1\n2 2\n",
            5,
            "1 entries were announced, more found",
        ),
    ],
)
def test_malformed_matrix_market(tmp_path: Path, text: str, line: int, problem: str) -> None:
    with pytest.raises(EdgeListError, match=problem) as caught:
        pairs_of(write(tmp_path, text, "graph.mtx"))
    assert caught.value.line == line


def test_a_dense_matrix_has_no_edges_to_read(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'array' format"):
        open_source(write(tmp_path, "%%MatrixMarket matrix array real general\n1 1\n5\n"))


def test_a_matrix_that_is_not_square_needs_the_number_of_vertices(tmp_path: Path) -> None:
    text = "%%MatrixMarket matrix coordinate pattern general\n2 3 1\n2 3\n"
    path = write(tmp_path, text, "graph.mtx")
    with pytest.raises(FormatError, match="vertices=3"):
        open_source(path)
    with pytest.raises(FormatError, match="does not fit 2 vertices"):
        open_source(path, 2)
    assert pairs_of(path, 3) == [(1, 2)]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["csr", "csc", "coo"]), st.booleans(), st.booleans())
def test_scipy_matrices(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str, old: bool, packed: bool
) -> None:
    random = np.random.default_rng(seed)
    matrix = scipy.sparse.random_array((20, 20), density=random.random(), format=kind, rng=random)
    if old:
        matrix = scipy.sparse.csr_matrix(matrix).asformat(kind)
    path = tmp_path_factory.mktemp("npz") / "graph.npz"
    scipy.sparse.save_npz(path, matrix, compressed=packed)
    entries = matrix.tocoo()
    assert sorted(pairs_of(path)) == sorted(zip(entries.row.tolist(), entries.col.tolist(), strict=True))


def test_long_rows_of_scipy_matrices_cross_chunks(tmp_path: Path) -> None:
    matrix = scipy.sparse.random_array((1000, 1000), density=0.4, format="csr", rng=1)
    scipy.sparse.save_npz(tmp_path / "graph.npz", matrix, compressed=False)
    got = np.array(pairs_of(tmp_path / "graph.npz"))
    assert np.array_equal(got.T, np.array(matrix.tocoo().coords))


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_npz_files_that_hold_no_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    good = {"format": b"csr", "shape": (2, 2), "indptr": [0, 1, 2], "indices": [1, 0], "data": [1, 1]}
    assert pairs_of(npz(path, **good)) == [(0, 1), (1, 0)]
    for change, problem in (
        ({"format": b"dia"}, "format 'dia'"),
        ({"shape": (2, 2, 2)}, "shape"),
        ({"shape": (3, 3)}, "do not fit"),
        ({"indptr": [0, 1, 3]}, "do not fit"),
        ({"indptr": [0, 2, 1]}, "do not fit"),
        ({"indices": [1.0, 0.0]}, "do not fit"),
        ({"indices": [1, 2]}, "outside the matrix"),
        ({"indices": [1, -1]}, "outside the matrix"),
        ({"format": b"coo"}, "do not fit"),
        ({"format": b"coo", "row": [0], "col": [0, 1]}, "do not fit"),
        ({"format": np.array([None])}, "Python objects"),
    ):
        with pytest.raises(FormatError, match=problem):
            pairs_of(npz(path, **(good | change)))
    with pytest.raises(FormatError, match="not a sparse matrix"):
        open_source(npz(path, edges=[1, 2]))
    whole = npz(path, **good).read_bytes()
    with pytest.raises(FormatError, match="not copied whole"):
        open_source(write(tmp_path, whole[: len(whole) // 2], "graph.npz"))


@pytest.mark.parametrize(("name", "byte"), [("indices.npy", 500), ("shape.npy", 180), ("format.npy", 180)])
def test_damage_inside_an_npz_file(tmp_path: Path, name: str, byte: int) -> None:
    buffer = io.BytesIO()
    scipy.sparse.save_npz(buffer, scipy.sparse.eye_array(1000, format="csr"), compressed=False)
    data = bytearray(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        member = archive.getinfo(name)
    data[member.header_offset + byte] ^= 0xFF
    with pytest.raises(FormatError, match=r"damaged|outside|not a readable array"):
        pairs_of(write(tmp_path, bytes(data), "graph.npz"))


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    "name",
    [
        "karate.mtx",
        "jagmesh7.mtx",
        "bcsstk13.mtx.gz",
        "cryg2500.mtx.gz",
        "west0067.mtx",
        "delaunay_n16.mtx.gz",
    ],
)
def test_published_matrices_equal_scipy(name: str) -> None:
    raw = (DATA / name).read_bytes()
    raw = gzip.decompress(raw) if name.endswith(".gz") else raw
    # One of the files begins with one percent sign instead of two, which SciPy refuses.
    matrix = scipy.io.mmread(io.BytesIO(b"%%" + raw.lstrip(b"%"))).tocoo()
    assert sorted(pairs_of(DATA / name)) == sorted(zip(matrix.row.tolist(), matrix.col.tolist(), strict=True))


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    ("name", "edges", "vertices"),
    [
        ("facebook_combined.txt.gz", 88_234, 4_039),
        ("soc-slashdot0902.txt.gz", 948_464, 82_168),
        ("ego-twitter-undirected.txt.gz", 1_342_310, 81_306),
    ],
)
def test_published_edge_lists(name: str, edges: int, vertices: int) -> None:
    chunks = list(EdgeList(DATA / name))
    assert sum(sources.size for sources, _ in chunks) == edges
    assert max(max(sources.max(), destinations.max()) for sources, destinations in chunks) + 1 == vertices
    text = gzip.decompress((DATA / name).read_bytes())
    got = np.stack([np.concatenate(column) for column in zip(*chunks, strict=True)], axis=1)
    assert np.array_equal(got, np.loadtxt(io.BytesIO(text), dtype=np.int64))
