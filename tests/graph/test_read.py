"""Files of edges of other programs: each is read right, as SciPy or Python reads it, or refused with a reason."""

import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import scipy.io
import scipy.sparse
from hypothesis import example, given
from hypothesis import strategies as st

from warpwell.errors import ArgumentError, FormatError, MissingFileError
from warpwell.graph import convert, read
from warpwell.graph.names import VertexNumbers
from warpwell.graph.read import EdgeReader

DATA = Path(__file__).parents[2].parent / "shared" / "data"
Pairs = list[tuple[int, int]]
HEAD = "%%MatrixMarket matrix coordinate "


def edges_of(path: Path, **options: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for batch in EdgeReader(path, **options).batches:
        assert batch[0].dtype == batch[1].dtype and batch[0].dtype.kind == "i"
        rows += zip(*(column.tolist() for column in batch), strict=True)
    return rows


def write(folder: Path, text: str | bytes, name: str = "graph.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def pack(codec: str) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(data)
        return bytes(sink.getvalue())

    return compress


PACKERS = [gzip.compress, bz2.compress, pack("zstd"), pack("lz4")]

# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n2 3\n",
        "0\t1\n2\t3",
        "# a comment\n# Nodes: 4 Edges: 2\n0 1\n% another\n2 3\n",
        "0 1\r\n2 3\r\n",
        "\n\n 0   1 \n\t\n  # indented comment\n2\t 3\n\n",
        "\ufeff0 1\n2 3\n",
        "\ufeff# a comment\n0 1\n2 3\n",
        "000000000000000000000000000 1\n2 3\n",
        "0 1\n2 3\n   ",
        "0 1\n2 3  ",
        "source target\n0 1\n2 3\n",
        "Source\tTarget\n0\t1\n2\t3\n",
        "# " + "x" * 500_000 + "\n0 1\n" + "# comment\n" * 300_000 + "2 3\n",
    ],
)
def test_forms_of_an_edge_list(tmp_path: Path, text: str) -> None:
    assert edges_of(write(tmp_path, text)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("compress", PACKERS)
def test_compression_is_recognized_by_content(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    text = b"".join(b"%d %d\n" % (i, i * i) for i in range(1000))
    data = compress(text)
    assert edges_of(write(tmp_path, data)) == [(i, i * i) for i in range(1000)]
    assert edges_of(write(tmp_path, data + data)) == [(i, i * i) for i in range(1000)] * 2
    for size in (len(data) - 1, len(data) - 20, len(data) // 2):
        with pytest.raises(FormatError, match=r"cannot be read \(.*; copy it again|expected"):
            edges_of(write(tmp_path, data[:size]))


def test_compressed_data_that_cannot_be_read(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"1 2\n" * 1000))
    data[20] ^= 0xFF
    with pytest.raises(FormatError, match=r"graph\.txt cannot be read \(zlib"):
        edges_of(write(tmp_path, bytes(data)))
    damaged = bytearray(gzip.compress(b"".join(b"%d %d\n" % (i, i * 7919 % 10_007) for i in range(400_000))))
    damaged[-6] ^= 0xFF
    with pytest.raises(FormatError, match="cannot be read"):
        edges_of(write(tmp_path, bytes(damaged)))
    with pytest.raises(FormatError, match="unpack it first: xz -dk"):
        edges_of(write(tmp_path, lzma.compress(b"0 1\n")))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("7", "expected 2 columns, got 1: 7;"),
        ("7 8 9", "expected 2 columns, got 3: 7 8 9;"),
        ("7,8", "expected 2 columns, got 1: 7,8;"),
        ("-7 8", "the source '-7' is not an integer from 0 to 4294967295; number other ids"),
        ("7 -8", "the target '-8' is not an integer from 0 to"),
        ("1.5 2", "the source '1.5' is not an integer"),
        ("1e3 2", "the source '1e3' is not an integer"),
        ("+1 2", r"the source '\+1' is not an integer"),
        ("a b", r"the source 'a' is not .* number other ids with names=True or renumber=True \(--names"),
        ("7 8 # nine", "got 4: 7 8 # nine"),
        (f"{2**32} 1", "the source '4294967296' is not an integer from 0 to 4294967295"),
        (f"1 {2**63}", "the target '9223372036854775808' is not an integer"),
        ("1 99999999999999999999999", "the target '9+' is not an integer"),
        ("NA 1", "the source 'NA' is not an integer"),
        ("1 2\x00", "the target .* is not an integer"),
        ("\xff\xfe 2", "invalid UTF8"),
        ('"1" 2', "the source '\"1\"' is not an integer"),
        ("0x10 2", "the source '0x10' is not an integer"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, f"# head\n0 1\n\n{line}\n2 3\n".encode("latin-1"))
    with pytest.raises(FormatError, match=problem) as caught:
        edges_of(path)
    assert (caught.value.row, caught.value.path) == (2, path)
    assert str(caught.value).startswith(f"{path}, row 2: ")


def test_the_first_row_determines_the_fields(tmp_path: Path) -> None:
    for text, problem in (
        ("0 1 2 3\n", "row 1: expected 'source target', got '0 1 2 3'"),
        ("0\n1\n", "row 1: expected 'source target', got '0'"),
        ("0,1\n", r"got '0,1'; a \.csv file needs a header"),
        (
            "0 1 5\n1 2 6\n",
            r"got '0 1 5'; use weights='float32' or 'int32' to read the third field, .* \(--weights none\)",
        ),
    ):
        with pytest.raises(FormatError, match=problem):
            edges_of(write(tmp_path, text))
    path = write(tmp_path, "0 1 5\n1 2 6\n")
    assert edges_of(path, weights="int32") == [(0, 1, 5), (1, 2, 6)]
    assert edges_of(path, weights=False) == [(0, 1), (1, 2)]


def test_the_row_is_right_far_into_a_file(tmp_path: Path) -> None:
    rows = [f"{i} {i + 1}" for i in range(400_000)]
    rows[345_678] = "12 x"
    with pytest.raises(FormatError, match="row 345679: the target 'x' is not"):
        edges_of(write(tmp_path, gzip.compress("\n".join(rows).encode(), 1)))
    rows[345_678] = "12 -1"
    with pytest.raises(FormatError, match="row 345679: the target '-1'"):
        edges_of(write(tmp_path, "\n".join(rows)))


def test_a_vertex_beyond_the_given_number(tmp_path: Path) -> None:
    assert edges_of(write(tmp_path, f"{2**32 - 1} 0\n")) == [(2**32 - 1, 0)]
    path = write(tmp_path, "0 1\n1 5\n")
    assert edges_of(path, vertices=6) == [(0, 1), (1, 5)]
    with pytest.raises(FormatError, match="row 2: the target '5' is not an integer from 0 to 4"):
        edges_of(path, vertices=5)


def test_weights_of_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, "0 1 5\n2 3 -1.5e-3\n4 5 inf\n", "graph.wel")
    assert edges_of(path) == [(0, 1, 5), (2, 3, -0.0015), (4, 5, float("inf"))]
    assert edges_of(path, weights=False) == [(0, 1), (2, 3), (4, 5)]
    for text, problem in (
        ("0 1 5\n0 1 heavy\n1 2 3\n", "row 2: the weight 'heavy' is not a number"),
        ("0 1 1_000\n", "row 1: the weight '1_000' is not a number"),
        ("0 1 1d5\n", "row 1: the weight '1d5' is not a number"),
        ("0 1 5\n2 3\n", "row 2: expected 3 columns, got 2"),
        ("0 1\n", "row 1: expected 'source target weight', got '0 1'"),
    ):
        with pytest.raises(FormatError, match=problem):
            edges_of(write(tmp_path, text, "graph.wel"))


def test_files_without_edges(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "\n\n"):
        assert edges_of(write(tmp_path, text)) == []
    with pytest.raises(MissingFileError, match="no such file"):
        EdgeReader(tmp_path / "missing.txt")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FormatError, match="is a folder or a pipe"):
            EdgeReader(path)
    with pytest.raises(FormatError, match=r"row 1: expected 'source target'"):
        edges_of(write(tmp_path, bytes(range(11, 256)) * 40_000))
    for name, data in (("graph.tar.gz", b""), ("graph.txt", bytes(257) + b"ustar")):
        with pytest.raises(FormatError, match="archive"):
            EdgeReader(write(tmp_path, data, name))
    write(tmp_path, "{}", "graph.json")
    with pytest.raises(FormatError, match="already a graph"):
        EdgeReader(tmp_path)


@pytest.mark.parametrize("head", [b"", b"0 1\n", b"src,dst\n0,1\n"])
def test_an_endless_row_does_not_fill_the_memory(tmp_path: Path, head: bytes) -> None:
    with pytest.raises(FormatError, match=r"a row is longer than|expected 'source target', got '1111"):
        edges_of(write(tmp_path, gzip.compress(head + b"1" * (64 << 20))))


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 300)), max_size=50),
    st.sampled_from([" ", "\t", " \t "]),
    st.sampled_from(["\n", "\r\n", "\n\n", "\n# 1 2 3\n"]),
    st.booleans(),
    st.sampled_from([16, 64, 1 << 20]),
)
def test_any_edges_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: Pairs, gap: str, end: str, last: bool, block: int
) -> None:
    text = end.join(f"{source}{gap}{destination}" for source, destination in pairs) + end * last
    path = write(tmp_path_factory.mktemp("any"), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "_BLOCK", block + max(map(len, text.split("\n"))) * 2)
        assert edges_of(path) == pairs


@example(b"PK\x03\x04", 0)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, offset: int) -> None:
    text = b"1 2\n34 56\n789 12345\n0 1\n" * 3
    path = write(tmp_path_factory.mktemp("noise"), text[:offset] + noise + text[offset:])
    head = path.read_bytes()
    is_matrix = head.startswith(b"PK\x03\x04") or read._BANNER.match(head)
    with contextlib.suppress(FormatError, *([ArgumentError] if is_matrix else [])):  # a matrix has no names
        named(path)
    try:
        rows = edges_of(path)
    except FormatError:
        return
    # Accepted bytes are what Python's own reading of the lines gives.
    fields = (line.split() for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    assert rows == [(int(row[0]), int(row[1])) for row in fields if row and row[0][:1] not in (b"#", b"%")]


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("src,dst\n0,1\n3,2\n", [(0, 1), (3, 2)]),
        ('Weight,name,Target,source\n1.5,"x, y",1,0\n2,b,2,"1"\n', [(0, 1, 1.5), (1, 2, 2.0)]),
        ('w,to,"from"\n1,"1",0\n2,"2","1"\n\n3,0,0', [(0, 1, 1), (1, 2, 2), (0, 0, 3)]),
        ("\ufeffsrc, dst\r\n0, 1\r\n1 ,2\r\n", [(0, 1), (1, 2)]),
        ("# c\n\nfrom\tto\tw\n0\t1\t9\n1\t0\t-8\n", [(0, 1, 9), (1, 0, -8)]),
        ("src;dst\n0;1\n", [(0, 1)]),
        ("tag,src,dst\n#art,0,1\n#music,1,2\nnews,2,3\n", [(0, 1), (1, 2), (2, 3)]),
        ("src,dst\n", []),
        ("", []),
        ('src,dst,note\r0,1,"a, ""b"""\r1,2,5" "\r', [(0, 1), (1, 2)]),
        ("hash,src,dst\n0x1f,0,1\n", [(0, 1)]),
    ],
)
def test_tables(tmp_path: Path, text: str, rows: list[Any]) -> None:
    assert edges_of(write(tmp_path, text, "a.csv")) == rows
    assert edges_of(write(tmp_path, text, "a.csv"), weights=False) == [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "0,1\n1,2\n",
            r"row 1: expected one column for the source \(src, .*got 0 in the header .*; choose columns of the header",
        ),
        ("src,dst,to\n0,1,2\n", "row 1: expected one column for the target .*got 2"),
        ("src,dst,dst\n0,1,2\n", "row 1: expected one column for the target .*got 2"),
        ("src,dst,w,cost\n0,1,2,3\n", "row 1: expected one column for the weight .*got 2"),
        ('src,"dst\n0,1\n1,2\n', r"the field '\"dst' does not end in its line"),
        ('src,dst,note\n0,1,"a\n2,3,b\n4,5,c\n', r"the field '\"a' does not end in its line"),
        ('src,dst,note\n0,1,"a\n2,3,b\n4,5,"c\n', r"the field '\"a' does not end in its line"),
        ('src,dst,note\n0,1,"a\nb"\n', r"the field '\"a' does not end in its line"),
        ('src,dst,note\n0,1,"a,""b"","\n2,3,"c', r"the field '\"c' does not end in its line"),
        ('src;dst\n0;1\n1;"2', r"the field '\"2' does not end in its line"),
        ("src,dst\n0,0x10\n", "row 2: the target '0x10' is not"),
        ("src,dst,w\n0,1,0X10\n", "row 2: the weight '0X10' is not a number"),
        ("src,dst\n0,1\n1,-2\n-1,0\n", "row 4: the source '-1' is not an integer from 0"),
        ("src,dst\n0,1\n1,\n", "row 3: the target '' is not an integer"),
        ("src,dst\n0,1\n1,NA\n", "row 3: the target 'NA' is not an integer"),
        ("src,dst\n0,1\n1,2,3\n", "row 3: expected 2 columns, got 3: 1,2,3"),
        ('src,dst\n0,1\n"1,2\n', r"the field '\"1,2' does not end in its line"),
        ("src,dst,w\n0,1,4\n1 2,3\n", "row 3: expected 3 columns, got 2"),
        ("src,dst\n0,1\n# a comment\n1,2\n", "row 3: expected 2 columns, got 1: # a comment"),
        ("# c\n\nsrc,dst,w\n0,1,4\n1,-2,3\n", "row 3: the target '-2' is not"),
        ("src,dst\nalice,bob\n", r"row 2: the source 'alice' is not .*\(--names"),
    ],
)
def test_malformed_tables(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        edges_of(write(tmp_path, text, "a.csv"))


def test_columns_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c\n0,1,9\n", "a.csv")
    assert edges_of(path, columns=("c", "a")) == [(9, 0)]
    assert edges_of(path, columns=("a", "b", "c")) == [(0, 1, 9)]
    with pytest.raises(FormatError, match=r"one column for the target \(d\), got 0 in the header 'a, b, c'"):
        edges_of(path, columns=("a", "d"))
    with pytest.raises(ArgumentError, match="expected the names of source, target"):
        edges_of(path, columns=("a",))


# -- names -------------------------------------------------------------------------------------------------------------


def named(path: Path, kind: str = "string") -> list[tuple[Any, ...]]:
    numbers = VertexNumbers(kind)
    rows = edges_of(path, numbers=numbers)
    names = list(numbers.names)
    assert list(dict.fromkeys(end for row in rows for end in row[:2])) == list(range(len(names)))
    return [(names[row[0]], names[row[1]], *row[2:]) for row in rows]


def test_vertices_may_have_names(tmp_path: Path) -> None:
    text = 'source,target,w\nalice, bob,1\nNA,"x, ""y""",2\nbob ,alice,3\n#art,12,4\n'
    rows = [("alice", "bob", 1), ("NA", 'x, "y"', 2), ("bob", "alice", 3), ("#art", "12", 4)]
    assert named(write(tmp_path, text, "a.csv")) == rows
    assert named(write(tmp_path, '# a comment\n#\n%\tsym\n a"b  c\nÄ a"b\n')) == [('a"b', "c"), ("Ä", 'a"b')]
    assert named(write(tmp_path, f"{2**63 - 1} -5\n-5 7\n"), "int64") == [(2**63 - 1, -5), (-5, 7)]
    for text, problem in (
        ("a b\n#art #music\n", "'#art #music' is a comment or an edge; put a space after the #"),
        ("#art #music\na b\n", "is a comment or an edge"),
        ("a b\rc d\r", "row 1: expected 'source target', got 'a b c d'"),
        ("a b\nc\n", "row 2: expected 2 columns, got 1: c"),
        ("source\ttarget\na\tb\nc\t\n", "row 3: the target '' is not a name"),
        (b"\xe4 b\n", "invalid UTF8"),
        (
            "Ann, Bob\nBob, Cid\n",
            r"'Ann, Bob' has commas or semicolons in its fields; write a \.csv file with a header",
        ),
        ("a b\n# c, d\nb; c\n", "'b; c' has commas or semicolons"),
        ("# c\nNew York\tBoston\nBoston\tLos Angeles\n", r"row 1: 'New York Boston' has tabs .*name the file \.tsv"),
        ("source\ttarget\na\tb\n\tc\nc\t\n", "row 3: the source '' is not a name"),
    ):
        with pytest.raises(FormatError, match=problem):
            named(write(tmp_path, text))
    for text, problem in (('src,dst\na,b\nc,"d', "the field"), ("src,dst,w\na,0x1,0x1\n", "the weight '0x1' is not")):
        with pytest.raises(FormatError, match=problem):
            named(write(tmp_path, text, "a.csv"))
    assert named(write(tmp_path, "src\tdst\nNew York\t0x1\n", "a.tsv")) == [("New York", "0x1")]
    for id_ in (2**63, "01", "-01", "-0", "+1", "0x10", "1.0"):
        with pytest.raises(
            FormatError, match=rf"'{re.escape(str(id_))}' is not an integer of 64 bits without leading zeros; .*--names"
        ):
            named(write(tmp_path, f"1 {id_}\n"), "int64")
    with pytest.raises(ArgumentError, match="is a matrix"):
        named(write(tmp_path, HEAD + "pattern general\n1 1 0\n"))


def test_edges_in_memory_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"got ndarray; store edges in memory with warpwell.graph.build"):
        convert(np.zeros((2, 2)), tmp_path / "g.ww")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_row_that_may_be_a_header_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell")
    assert named(write(tmp_path, "src\tdst\na\tb\n")) == [("a", "b")]
    assert edges_of(write(tmp_path, "a,b\n0,1\n", "a.csv"), columns=("a", "b")) == [(0, 1)]
    assert not caplog.messages
    assert named(write(tmp_path, "src\tfriend\na\tb\n")) == [("src", "friend"), ("a", "b")]
    assert edges_of(write(tmp_path, "1,2\n2,3\n", "a.csv"), columns=("1", "2")) == [(2, 3)]
    assert ["is read as an edge" in text for text in caplog.messages] == [True, False]
    assert "row 1: ['1', '2'] is read as a header; if it is an edge" in caplog.messages[1]


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1)] * 2), max_size=20
    )
)
def test_any_names_are_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    quoted = ['"{}","{}"'.format(*(name.replace('"', '""') for name in row)) for row in rows]
    path = write(tmp_path_factory.mktemp("names"), "\n".join(["src,dst", *quoted]) + "\n", "a.csv")
    stripped = [tuple(pyarrow.compute.utf8_trim_whitespace(pyarrow.array(row)).to_pylist()) for row in rows]
    if any("" in row for row in stripped):
        with pytest.raises(FormatError, match="'' is not a name"):
            named(path)
    else:
        assert named(path) == stripped


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(ArgumentError, match=re.escape("package pyarrow: install Warpwell's extra [graph]")):
        edges_of(write(tmp_path, "0 1\n"))


# -- matrices ----------------------------------------------------------------------------------------------------------

VALUES = {"pattern": "", "real": " -1.5e+00", "double": " 2", "integer": " 3", "unsigned-integer": " 4000000000"}
KINDS = list(itertools.product(VALUES, ["general", "symmetric", "skew-symmetric"]))


@pytest.mark.parametrize(("values", "symmetry"), KINDS)
def test_matrix_market_equals_scipy(tmp_path: Path, values: str, symmetry: str) -> None:
    entries = "".join(f"{entry}{VALUES[values]}\n" for entry in ("2 1", "4 4", "4 3"))
    path = write(tmp_path, f"{HEAD}{values} {symmetry}\n% comment\n\n4 4 3\n{entries}", "graph.mtx")
    reader = EdgeReader(path)
    assert (reader.vertices, reader.symmetric) == (4, symmetry != "general")
    batches = list(reader.batches)
    rows = [row for batch in batches for row in zip(*(column.tolist() for column in batch), strict=True)]
    if symmetry == "skew-symmetric" and values == "unsigned-integer":  # SciPy raises OverflowError
        assert rows[3:] == [(0, 1, -4_000_000_000), (2, 3, -4_000_000_000)]
        return
    matrix = scipy.io.mmread(path)
    columns = (matrix.row, matrix.col) if values == "pattern" else (matrix.row, matrix.col, matrix.data)
    assert rows == list(zip(*(column.tolist() for column in columns), strict=True))
    if values != "pattern":
        assert batches[0][2].dtype.kind == ("f" if values in ("real", "double") else "i")
    assert edges_of(path, weights=False) == [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "banner"),
        ("%%MatrixMarket matrix coordinate\n", "header element"),
        ("hello\n", "banner"),
        (HEAD + "quaternion general\n1 1 0\n", "quaternion"),
        (HEAD + "real general\n%\n", "Premature EOF"),
        (HEAD + "real general\n\n3 3\n", "begins with"),
        (HEAD + "real general\n3 3 -1\n", "can't be negative"),
        (HEAD + "real symmetric\n3 4 0\n", "is symmetric, but has 3 rows and 4 columns"),
        (HEAD + "complex general\n3 3 1\n1 1 1 1\n", r"is a complex general matrix.*weights=False \(--weights none\)"),
        (HEAD + "complex hermitian\n3 3 1\n1 1 1 1\n", "is a complex hermitian matrix"),
        ("%%MatrixMarket matrix array real general\n1 1\n5\n", "'array'"),
        (HEAD + "pattern general\n3 3 2\n1 1\n0 1\n", "row 3: the source '0' is not an integer from 1 to 3"),
        (HEAD + "pattern general\n3 3 2\n1 1\n1 4\n", "row 3: the target '4' is not an integer from 1 to 3"),
        (HEAD + "pattern general\n3 3 1\n1 1 5\n", "row 2: expected 2 columns, got 3"),
        (HEAD + "real general\n3 3 1\n1 1\n", "row 2: expected 3 columns, got 2"),
        (HEAD + "real general\n3 3 1\n1 1 one\n", "row 2: the weight 'one' is not a number"),
        (HEAD + "real general\n3 3 1\n1 1 1,5\n", "the weight '1,5' is not a number"),
        (HEAD + "real general\n3 3 1\n1 1 1D5\n", "the weight '1D5' is not a number"),
        (HEAD + "real general\n3 3 1\n1.0 1 5\n", "row 2: the source '1.0' is not an integer from 1 to 3"),
        (HEAD + "pattern general\n3 3 2\n1 1\n", "states 2 entries, but 1 follow"),
        (HEAD + "pattern general\n3 3 1\n1 1\n2 2\n", "states 1 entries, but 2 follow"),
        (HEAD + "pattern general\n3 3 0\n1 1\n", "states 0 entries, but 1 follow"),
        (HEAD + f"pattern general\n{10**18} {10**18} 1\n1 1\n", r"vertices must be from .* to 2\*\*32"),
    ],
)
def test_malformed_matrix_market(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        edges_of(write(tmp_path, text, "graph.mtx"))


def test_matrix_market_that_scipy_misreads_or_refuses(tmp_path: Path) -> None:
    for text, rows in (
        ("%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 5\n", [(0, 1, 5.0)]),
        ("%%matrixmarket MATRIX Coordinate Real General\n2 2 1\n1 2 +5\n", [(0, 1, 5.0)]),
        (HEAD + "real general\n2 2 2\n1 1 5\n\n% comment\n2 2 6 \n\n", [(0, 0, 5.0), (1, 1, 6.0)]),
        (HEAD + "integer general\n2 2 1\n1 2 1.5\n", [(0, 1, 1.5)]),
        (HEAD + "integer general\r\n2 2 1\r\n1 2 5\r\n", [(0, 1, 5)]),
        (HEAD + "pattern general\n2 2 0\n", []),
    ):
        assert edges_of(write(tmp_path, text, "graph.mtx")) == rows
    path = write(tmp_path, HEAD + "complex hermitian\n3 3 2\n2 1 1 1\n3 3 1 0\n")
    assert edges_of(path, weights=False) == [(1, 0), (2, 2), (0, 1)]


def test_a_matrix_that_is_not_square_needs_the_number_of_vertices(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "pattern general\n2 3 1\n2 3\n", "graph.mtx")
    with pytest.raises(FormatError, match="vertices=3"):
        EdgeReader(path)
    with pytest.raises(FormatError, match=r"vertices must be from 3 to 2\*\*32, got 2"):
        EdgeReader(path, vertices=2)
    assert edges_of(path, vertices=3) == [(1, 2)]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "_BATCH", 7)
        rows = edges_of(path)
    entries = matrix.tocoo()
    assert sorted(rows) == sorted(zip(entries.row.tolist(), entries.col.tolist(), entries.data.tolist(), strict=True))


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_npz_files_that_hold_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.npz"
    good = {"format": b"csr", "shape": (2, 2), "indptr": [0, 1, 2], "indices": [1, 0], "data": [1, 1]}
    assert edges_of(npz(path, **good)) == [(0, 1), (1, 0)]
    for change, problem in (
        ({"format": b"dia", "offsets": [0], "data": [[1, 1]]}, "format 'dia'"),
        ({"shape": (2, 2, 2)}, "cannot be read"),
        ({"shape": (3, 3)}, "cannot be read"),
        ({"indptr": [0, 1, 3]}, "cannot be read"),
        ({"indptr": [0, 2, 1]}, "cannot be read"),
        ({"indices": [1.0, 0.0]}, "has indices that are not integers"),
        ({"indices": [1, 2]}, "cannot be read"),
        ({"indices": [1, -1]}, "cannot be read"),
        ({"data": [1]}, "cannot be read"),
        ({"data": [1j, 1]}, r"values of complex128.*weights=False"),
        ({"format": b"coo"}, "cannot be read"),
        ({"format": b"coo", "row": [0], "col": [0, 1]}, "cannot be read"),
        ({"format": b"coo", "row": [0, 1], "col": [0, 2]}, "cannot be read"),
        ({"format": b"coo", "row": [0, 1], "col": [0, -1]}, "cannot be read"),
        ({"format": np.array([None])}, "cannot be read"),
    ):
        with pytest.raises(FormatError, match=problem):
            edges_of(npz(path, **(good | change)))
    with pytest.raises(FormatError, match=r"cannot be read .*write it with scipy\.sparse\.save_npz"):
        EdgeReader(npz(path, edges=[1, 2]))
    content = npz(path, **good).read_bytes()
    with pytest.raises(FormatError, match="cannot be read"):
        EdgeReader(write(tmp_path, content[: len(content) // 2], "graph.npz"))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    npz(path, **{name: array for name, array in good.items() if name != "data"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data.npy", header.getvalue() + bytes(16))
    with pytest.raises(FormatError, match=r"data\.npy has \d+ bytes for shape \(1125899906842624,\)"):
        EdgeReader(path)
    monkeypatch.setattr(read, "default_memory_bytes", lambda: 1000)
    with pytest.raises(FormatError, match=r"needs \d+ MiB, more than half of the free memory"):
        EdgeReader(npz(path, **good))


@pytest.mark.parametrize(("name", "byte"), [("indices.npy", 500), ("shape.npy", 180), ("format.npy", 180)])
def test_damage_inside_an_npz_file(tmp_path: Path, name: str, byte: int) -> None:
    buffer = io.BytesIO()
    scipy.sparse.save_npz(buffer, scipy.sparse.eye_array(1000, format="csr"), compressed=False)
    data = bytearray(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        member = archive.getinfo(name)
    data[member.header_offset + byte] ^= 0xFF
    with pytest.raises(FormatError, match="cannot be read"):
        edges_of(write(tmp_path, bytes(data), "graph.npz"))


# -- published files ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    "name",
    ["karate.mtx", "jagmesh7.mtx", "bcsstk13.mtx.gz", "cryg2500.mtx.gz", "west0067.mtx", "delaunay_n16.mtx.gz"],
)
def test_published_matrices_equal_scipy(name: str) -> None:
    raw = (DATA / name).read_bytes()
    raw = gzip.decompress(raw) if name.endswith(".gz") else raw
    # One of the files begins with one percent sign instead of two, which SciPy refuses.
    matrix = scipy.io.mmread(io.BytesIO(b"%%" + raw.lstrip(b"%"))).tocoo()
    rows = [row[:2] for row in edges_of(DATA / name)]
    assert sorted(rows) == sorted(zip(matrix.row.tolist(), matrix.col.tolist(), strict=True))


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
    columns = [np.concatenate(column) for column in zip(*EdgeReader(DATA / name).batches, strict=True)]
    assert columns[0].size == edges
    assert max(column.max() for column in columns) + 1 == vertices
    text = gzip.decompress((DATA / name).read_bytes())
    assert np.array_equal(np.stack(columns, axis=1), np.loadtxt(io.BytesIO(text), dtype=np.int64))
