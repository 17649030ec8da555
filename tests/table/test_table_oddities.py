"""Unusual files are read correctly or raise a clear error, and nothing stays open. Files that are cut while open."""

import datetime
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from tests.harness.descriptors import open_descriptors, until_closed
from tests.harness.threads import run_threads
from tests.harness.until import HANG_SECONDS
from tests.table.test_table_arrow import mixed, write

import warpwell as ww
from warpwell.errors import ArgumentError, ClosedError, DTypeError, FormatError, MediumError, MissingFileError

ROWS = pa.table({"a": pa.array([1, None, 3]), "s": ["x", "", "zzz"]})


def delta_dictionaries(path: Path) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    parts = [
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), ["x", "y"]),
        pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), ["x", "y", "z"]),
    ]
    schema = pa.schema([("a", kind)])
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(str(path), schema, options=options) as out:
        for part in parts:
            out.write_batch(pa.record_batch([part], schema))


def replaced_dictionaries(path: Path) -> None:
    schema = pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))])
    with pa.ipc.new_stream(str(path), schema) as out:
        for values in (["x", "y"], ["p", "q"]):
            part = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), values)
            out.write_batch(pa.record_batch([part], schema))


def sliced(path: Path) -> None:
    write(path, mixed(100).slice(3, 50))


def many_batches(path: Path) -> None:
    write(path, mixed(100), rows=1)


RIGHT: dict[str, Callable[[Path], object]] = {
    "zero batches": lambda p: write(p, ROWS.slice(0, 0)),
    "zero batches in a stream": lambda p: write(p, ROWS.slice(0, 0), stream=True),
    "a batch without rows": lambda p: write_batches(p, [ROWS.slice(0, 0), ROWS, ROWS.slice(0, 0)]),
    "no columns": lambda p: write(p, pa.table({})),
    "a column of nulls": lambda p: write(p, pa.table({"a": pa.array([None, None], pa.int32())})),
    "empty strings": lambda p: write(p, pa.table({"a": ["", "", ""]})),
    "one row": lambda p: write(p, ROWS.slice(1, 1)),
    "a batch a row": many_batches,
    "sliced within a byte": sliced,
    "delta dictionaries": delta_dictionaries,
    "replaced dictionaries": replaced_dictionaries,
    "aligned to 64 bytes": lambda p: write(p, mixed(77), allow_64bit=True),
    "old metadata": lambda p: write(p, ROWS, metadata_version=pa.ipc.MetadataVersion.V4),
    "an old stream": lambda p: write(p, ROWS, stream=True, use_legacy_format=True),
    "feather, not compressed": lambda p: pyarrow.feather.write_feather(ROWS, str(p), compression="uncompressed"),
    "an ordered dictionary": lambda p: write(
        p,
        pa.table({"a": pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.uint16()), ["b", "a"], ordered=True)}),
    ),
    "a dictionary of numbers": lambda p: write(p, pa.table({"a": pa.array([1.5, 2.5, 1.5]).dictionary_encode()})),
    "an extension type": lambda p: write(p, pa.table({"a": pa.array([b"0123456789abcdef"] * 3, pa.uuid())})),
    "unusual names": lambda p: write(p, pa.table({"": [1], "../x": [2], "ä\n": [3]})),
    "lists with nulls": lambda p: write(p, pa.table({"a": pa.array([[1, 2], None], pa.list_(pa.int8(), 2))})),
}


def same(found: Any, expected: Any) -> bool:
    if pa.types.is_dictionary(found.type):
        return bool(found.to_pylist() == expected.to_pylist())
    return bool(found.equals(expected.combine_chunks()))


def write_batches(path: Path, tables: list[Any]) -> None:
    with pa.ipc.new_file(str(path), tables[0].schema) as out:
        for table in tables:
            for batch in table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]:
                out.write_batch(batch)


@pytest.mark.parametrize("case", RIGHT)
def test_files_that_are_read_right(tmp_path: Path, case: str) -> None:
    path = tmp_path / "t.arrow"
    RIGHT[case](path)
    before = open_descriptors()
    stream = not path.read_bytes().startswith(b"ARROW1")
    with pa.OSFile(str(path)) as file:
        expected = (pa.ipc.open_stream if stream else pa.ipc.open_file)(file).read_all()
    with ww.table.open(path) as t:
        assert t.rows == len(expected) and t.schema == expected.schema
        for number in range(len(t.names)):
            found, column = t[number].arrow(), expected.column(number)
            assert same(found, column) and found.type == column.type
            found.validate(full=True)
            for first in range(0, t.rows, 7):
                assert same(t[number].arrow(first, 1), column.slice(first, 1))
        assert ww.table.check(path).sound
    until_closed(before)


def stream_bytes(path: Path) -> bytes:
    write(path, ROWS)
    return path.read_bytes()


def cut(part: float) -> Callable[[Path], object]:
    return lambda p: p.write_bytes(stream_bytes(p)[: int(len(stream_bytes(p)) * part)])


WRONG: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "nothing there": (lambda p: None, MissingFileError, "does not exist"),
    "empty": (lambda p: p.write_bytes(b""), FormatError, "not an Arrow IPC file"),
    "magic alone": (lambda p: p.write_bytes(b"ARROW1"), FormatError, "not an Arrow IPC file"),
    "noise": (lambda p: p.write_bytes(np.random.default_rng(0).bytes(5000)), FormatError, "not an Arrow IPC file"),
    "zeros": (lambda p: p.write_bytes(bytes(5000)), FormatError, "not an Arrow IPC file"),
    "cut in the middle": (cut(0.5), FormatError, "truncated"),
    "cut in the footer": (cut(0.95), FormatError, "truncated"),
    "a stream that is cut": (
        lambda p: p.write_bytes(write(p, ROWS, stream=True).read_bytes()[:-60]),
        FormatError,
        "truncated",
    ),
    "compressed with zstd": (lambda p: write(p, mixed(), compression="zstd"), FormatError, "ww.table.convert"),
    "compressed with lz4": (lambda p: pyarrow.feather.write_feather(mixed(), str(p)), FormatError, "is compressed"),
    "Parquet": (lambda p: pyarrow.parquet.write_table(ROWS, str(p)), FormatError, "a Parquet file"),
    "Feather 1": (lambda p: p.write_bytes(b"FEA1" + bytes(100)), FormatError, "version 1"),
    "a .npy file": (lambda p: p.write_bytes(b"\x93NUMPY\x01\x00" + bytes(200)), FormatError, "a .npy file"),
    "CSV": (lambda p: p.write_text("a,b\n1,2\n" * 50), FormatError, "not an Arrow IPC file"),
    "a folder": (lambda p: p.mkdir(), FormatError, "a folder, but not a table"),
    "a pipe": (lambda p: os.mkfifo(p), FormatError, "not a file or folder"),
    "a length of 2 GiB": (
        lambda p: p.write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64)),
        FormatError,
        "damaged",
    ),
    "a negative length": (
        lambda p: p.write_bytes(b"\xff\xff\xff\xff\x01\x00\x00\x80" + bytes(64)),
        FormatError,
        "damaged",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_refused(tmp_path: Path, case: str) -> None:
    make, error, message = WRONG[case]
    path = tmp_path / "t.arrow"
    make(path)
    before = open_descriptors()
    for opener in (ww.table.open, ww.table.check):
        with pytest.raises(error, match=message):
            opener(path)
    until_closed(before)


def test_columns_that_kernels_do_not_take(tmp_path: Path) -> None:
    pair = pa.array([[1, None]], pa.list_(pa.int8(), 2))
    month = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    table = pa.table({"a": [1], "l": [[1, 2]], "m": pa.array([{"k": 1}]), "e": pair, "i": month})
    with ww.table.open(write(tmp_path / "t.arrow", table)) as t:
        assert t.arrow().equals(table)
        assert t.where([("a", ">", 0)]).take().arrow().equals(table)
        for name in ("l", "m", "e", "i"):
            with pytest.raises(ArgumentError, match="no nested type"):
                _ = t[name].values
            with pytest.raises(ArgumentError, match="gather copies rows of numbers"):
                t.where([("a", ">", 0)]).gather(name)
            with pytest.raises(DTypeError, match=f"'{name}'"):
                t.where([(name, "==", 1)])
        assert t["a"].arrow().to_pylist() == [1]
        for name in ("b", 7, -1, None):
            with pytest.raises(ArgumentError):
                t[name]
        for first, rows in ((-1, 1), (0, 2), (2, None), (0.5, 1)):
            with pytest.raises(ArgumentError):
                t["a"].arrow(first, rows)
    with pytest.raises(ClosedError):
        t["a"]
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with ww.table.open(write(tmp_path / "u.arrow", twice)) as t:
        with pytest.raises(ArgumentError, match="by its number"):
            t["a"]
        assert t[1].arrow().to_pylist() == [2]


@pytest.mark.quick("True")
@pytest.mark.parametrize("stream", [False, True])
def test_hostile_words(tmp_path: Path, stream: bool) -> None:
    """Runs in a separate process, because a fault could end this one."""
    path = write(tmp_path / "t.arrow", mixed(10), stream=stream, rows=6)
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.tables.hostile", str(path), "0", "300"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = eval(done.stdout)
    assert set(counts) == {"read", "refused", "refused in part"} and counts["refused"] > 30


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path / "t.arrow", pa.table({"x": pa.array(np.ones(100_000)), "s": ["word"] * 100_000}))
    t = ww.table.open(path, device="cpu")
    values, text = t["x"].runs[0].values.numpy(), t["s"].arrow(99_000, 1000)
    os.truncate(path, 8192)
    assert values.sum() < 100_000  # reads zeros, and raises no SIGBUS
    assert len(text.to_pylist()) == 1000
    for name in ("x", "s"):
        with pytest.raises(MediumError, match="truncated"):
            t[name].arrow()
    with pytest.raises(MediumError, match="truncated"):
        t.close()
    assert t.closed
    t.close()


def test_a_folder_whose_file_is_cut_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "t.ww"
    t = ww.table.convert(mixed(10_000), path)
    assert t["f8"].arrow().equals(mixed(10_000)["f8"].combine_chunks())
    os.truncate(path / "0.arrow", 4096)
    with pytest.raises(MediumError, match="truncated"):
        _ = t["f8"].values
    with pytest.raises(MediumError, match="truncated"):
        t["i4"].arrow()
    with pytest.raises(MediumError):
        t.close()


def test_threads_use_one_table_side_by_side(tmp_path: Path) -> None:
    names = [f"c{k}" for k in range(5)]
    rows = pa.table({name: pa.array(range(100)) for name in names})
    ww.table.convert(rows, tmp_path / "t.ww").close()
    ww.table.append(tmp_path / "t.ww", rows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    before = open_descriptors()
    try:
        for _ in range(3):
            with ww.table.open(tmp_path / "t.ww") as t:
                ready = threading.Barrier(3)

                def use(t: ww.table.Table, ready: threading.Barrier) -> None:
                    ready.wait(HANG_SECONDS)
                    for name in names:
                        assert len(t.where([(name, "<", 5)])) == 10

                run_threads(use, [(t, ready)] * 3)
    finally:
        sys.setswitchinterval(interval)
    until_closed(before)


def test_a_table_that_is_closed_while_threads_use_it(tmp_path: Path) -> None:
    rows = pa.table({f"c{k}": pa.array(range(100)) for k in range(12)})
    ww.table.convert(rows, tmp_path / "t.ww").close()
    before, wrong = open_descriptors(), []
    for round_ in range(10):
        t = ww.table.open(tmp_path / "t.ww")
        ready = threading.Barrier(3)

        def use(t: ww.table.Table = t, ready: threading.Barrier = ready) -> None:
            ready.wait(HANG_SECONDS)
            try:
                for k in range(12):
                    assert t[k].runs
            except ClosedError:
                pass
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        ready.wait(HANG_SECONDS)
        time.sleep(0.0005 * round_)
        t.close()
        for thread in threads:
            thread.join()
    del t, use, threads
    assert not wrong
    until_closed(before)


@pytest.mark.slow
def test_more_files_than_the_limit_of_a_shell(tmp_path: Path) -> None:
    program = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
        import pyarrow as pa, warpwell as ww
        rows = pa.table({f"c{k}": [k] for k in range(100)})
        ww.table.convert(rows, sys.argv[1]).close()
        ww.table.append(sys.argv[1], rows)
        with ww.table.open(sys.argv[1]) as t:
            assert t.arrow().num_rows == 2
        assert ww.table.check(sys.argv[1]).sound
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "t.ww")], check=True, timeout=120)


def test_coded_dates_that_python_does_not_have(tmp_path: Path) -> None:
    days = pa.array([-(2**31), 0, 2**31 - 1], pa.date32())
    extreme_dates = pa.array([-(2**53), 0, 2**53], pa.date64())
    with ww.table.convert(pa.table({"d": days, "m": extreme_dates}), tmp_path / "t.ww", codes=["d", "m"]) as t:
        for name in ("d", "m"):
            assert t.where([(name, ">", datetime.date(2000, 1, 1))]).numpy().tolist() == [2]
            rows = t.where([(name, "!=", datetime.date(1970, 1, 1))])
            assert rows.numpy().tolist() == [0, 2]
            column = days if name == "d" else extreme_dates
            assert t[name].arrow().dictionary_decode().equals(column)
            assert rows.take(name)[name].combine_chunks().dictionary_decode().equals(column.take([0, 2]))
    write(tmp_path / "t.arrow", pa.table({"m": extreme_dates.dictionary_encode()}))
    with ww.table.open(tmp_path / "t.arrow") as t:
        assert t["m"].arrow().equals(extreme_dates.dictionary_encode())
    ww.table.append(tmp_path / "t.ww", pa.table({"d": days, "m": extreme_dates.dictionary_encode()}))


def test_values_of_no_bytes_and_nulls_of_columns_that_are_not_compared(tmp_path: Path) -> None:
    codes = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array([None, "x"]))
    columns = {"b": pa.array([b"", None], pa.binary(0)), "l": pa.array([[1], None]), "c": codes, "v": ["x", None]}
    write(tmp_path / "t.arrow", pa.table({**columns, "v": pa.array(columns["v"], pa.string_view())}))
    with ww.table.open(tmp_path / "t.arrow", device="cpu") as t:
        with pytest.raises(DTypeError, match="'b'"):
            t.where([("b", "==", b"")])
        for name in columns:
            assert t.where([(name, "is null")]).numpy().tolist() == [1], name
            assert t.where([(name, "is not null")]).numpy().tolist() == [0], name


@pytest.mark.parametrize("description", [b"{", b'{"index_columns": []}', b"[" * 100_000])
def test_data_frames_that_are_described_wrongly(tmp_path: Path, description: bytes) -> None:
    pytest.importorskip("pandas")
    table = pa.table({"x": [1]}).replace_schema_metadata({b"pandas": description})
    write(tmp_path / "t.arrow", table)
    with ww.table.open(tmp_path / "t.arrow") as t:
        assert t.arrow().to_pydict() == {"x": [1]}
        with pytest.raises(FormatError, match="pandas"):
            t.to_pandas()


def test_two_columns_of_one_name_have_no_numpy_arrays_by_name(tmp_path: Path) -> None:
    rows = pa.table([[1, 2], [3, 4], [5, 6]], ["a", "a", "b"])
    with ww.table.convert(rows, tmp_path / "t.ww") as t:
        selected = t.where([("b", ">", 5)]).take()
        assert selected.arrow().equals(rows.slice(1))
        with pytest.raises(ArgumentError, match="one name"):
            selected.numpy()
