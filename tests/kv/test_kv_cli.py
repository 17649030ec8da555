"""``warpwell kv`` on stores on disk."""

import base64
import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from tests.harness.until import HANG_SECONDS

import warpwell.kv as kv
from lab.commands import main as lab
from warpwell.cli import main
from warpwell.cli._common import Output
from warpwell.kv.convert.importers import load, open_source

SHARED = Path(__file__).parents[3] / "shared" / "data" / "ycsb_workloads.tar.gz"
LONG_NAME = "/".join(["name" * 50] * 3)


def called(command: object, *arguments: object) -> int:
    """Run a command of ``warpwell kv``, or ``python -m lab bench kv``; return the exit code."""
    text_arguments = list(map(str, arguments))
    return lab(["bench", "kv", *text_arguments]) if command == "bench" else main(["kv", str(command), *text_arguments])


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with --json; return the one object that it prints."""
    assert called(*arguments, "--json") == code
    captured = capsys.readouterr()
    assert captured.err == ""
    values: dict[str, Any] = json.loads(captured.out)
    assert (values["schema"], values["command"]) == (1, "bench kv" if arguments[0] == "bench" else f"kv {arguments[0]}")
    return values


def failing(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail for its input; return what it says."""
    assert called(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warpwell: error: ")
    assert "Traceback" not in captured.err
    return captured.err


def filled(source: Path, target: Path) -> Path:
    """Load a source without the command line; the output would mix with the output of the command under test."""
    opened = open_source(source)
    with kv.create(target, schema=opened.schema) as store:
        load(opened, store)
    opened.close()
    return target


@pytest.fixture
def text_store(tmp_path: Path) -> Path:
    """A store of three files."""
    source = tmp_path / "words"
    (source / "b").mkdir(parents=True)
    for name, value in (("a", b"first"), ("b/c", bytes(range(256))), ("empty", b"")):
        (source / name).write_bytes(value)
    return filled(source, tmp_path / "words.kv")


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A store with a schema, of 5,000 rows."""
    x = np.arange(5000 * 6, dtype=np.uint16).reshape(5000, 2, 3)
    np.savez(tmp_path / "rows.npz", x=x, y=np.arange(5000) / 4, ok=np.arange(5000) % 2 == 0)
    return filled(tmp_path / "rows.npz", tmp_path / "rows.kv")


# --- load


def test_load_arrays(arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "load", tmp_path / "rows.npz", tmp_path / "again.kv")
    assert result["fields"] == {"x": ["uint16", [2, 3]], "y": ["float64", []], "ok": ["bool", []]}
    assert (result["format"], result["records"], result["records_read"]) == ("npz", 5000, 5000)
    result = answer(
        capsys, "load", tmp_path / "rows.npz", tmp_path / "x.kv", "--fields", "x,ok", "--durability", "none"
    )
    assert result["fields"] == {"x": ["uint16", [2, 3]], "ok": ["bool", []]}
    with kv.open(tmp_path / "again.kv") as store, kv.open(tmp_path / "x.kv") as part:
        batch, found = store.get_many(np.arange(5001))
        assert found.tolist() == [True] * 5000 + [False]
        assert np.array_equal(batch["x"][:5000], np.arange(5000 * 6).reshape(5000, 2, 3))
        assert np.array_equal(part.get_many(np.arange(5000))[0]["ok"], np.arange(5000) % 2 == 0)


def test_load_and_append(text_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "load", tmp_path / "words", tmp_path / "new.kv")
    assert (result["format"], result["records"], result["records_read"], result["value_bytes"]) == ("folder", 3, 3, 261)
    with kv.open(text_store) as store:
        assert dict(store.items()) == {b"a": b"first", b"b/c": bytes(range(256)), b"empty": b""}
    assert "--append" in failing(capsys, "load", tmp_path / "words", text_store)
    assert called("load", tmp_path / "words", text_store, "--append") == 0
    assert f"nothing to add: {text_store} already has all 3 records" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "words" / "f").write_bytes(b"added")
    result = answer(capsys, "load", tmp_path / "words", text_store, "--append")
    assert (result["records"], result["records_read"]) == (4, 1)
    (tmp_path / "words" / "f").write_bytes(b"second")
    assert "another record 3" in failing(capsys, "load", tmp_path / "words", text_store, "--append")
    (tmp_path / "words" / "f").unlink()
    assert "fewer records" in failing(capsys, "load", tmp_path / "words", text_store, "--append")
    with kv.open(text_store) as store:
        assert (len(store), store[b"f"]) == (4, b"added")
    assert answer(capsys, "load", tmp_path / "words", text_store, "--overwrite")["records"] == 3
    assert answer(capsys, "load", tmp_path / "words", tmp_path / "first.kv", "--append")["records"] == 3
    assert main(["kv", "load", str(tmp_path / "words"), str(tmp_path / "other.kv"), "--keys", "hash"]) == 0
    assert "records per second" in capsys.readouterr().out


def test_a_store_is_replaced_once_the_new_one_is_whole(
    text_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad"
    (bad / LONG_NAME).parent.mkdir(parents=True)
    (bad / LONG_NAME).write_bytes(b"v")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert "--keys hash" in failing(capsys, "load", bad, text_store, "--overwrite")
    with kv.open(text_store, mode="r+"):
        assert "writ" in failing(capsys, "load", bad, text_store, "--overwrite", "--keys", "hash")
    assert "MANIFEST" in failing(capsys, "load", bad, tmp_path / "words", "--overwrite", "--keys", "hash")
    (tmp_path / "file").write_bytes(b"")
    assert "file" in failing(capsys, "load", bad, tmp_path / "file", "--overwrite", "--keys", "hash")
    (tmp_path / "file").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert answer(capsys, "stats", text_store)["records"] == 3
    assert answer(capsys, "load", bad, text_store, "--overwrite", "--keys", "number")["records"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    with kv.open(text_store) as store:
        assert dict(store.items()) == {0: b"v"}


@pytest.mark.parametrize(("module", "name"), [(shutil, "rmtree"), (os, "rename")])
@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_while_something_is_replaced_leaves_the_old_or_the_new(
    text_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, nth: int
) -> None:
    (tmp_path / "words" / "a").write_bytes(b"second")
    really, calls = getattr(module, name), 0

    def interrupted(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise KeyboardInterrupt
        really(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        main(["kv", "load", str(tmp_path / "words"), str(text_store), "--overwrite"])
    assert calls
    with kv.open(text_store) as store:
        assert len(store) == 3 and store[b"a"] in (b"first", b"second")


def test_a_full_disk_leaves_what_was_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "t.npz", x=np.random.default_rng(1).integers(0, 255, (40, 1 << 20), np.uint8))
    load = ["load", tmp_path / "t.npz", tmp_path / "s.kv"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25 << 20, limits[1]))
    try:
        assert called(*load) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = " ".join(capsys.readouterr().err.split())
    assert "no space left" in text and "s.kv opens, with 24 records; continue with --append" in text
    result = answer(capsys, *load, "--append")
    assert (result["records_read"], result["records"]) == (16, 40)
    with kv.open(tmp_path / "s.kv") as store:
        assert np.array_equal(store[39]["x"], np.load(tmp_path / "t.npz")["x"][39])


def test_load_lmdb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for k in range(6000):
            transaction.put(b"key%d" % k, b"v" * (k % 500))
        transaction.put(b"\xff" * 511, b"longest")
    assert answer(capsys, "load", tmp_path / "db", tmp_path / "s.kv")["records"] == 6001
    with kv.open(tmp_path / "s.kv") as store:
        assert (store[b"key499"], store[b"\xff" * 511]) == (b"v" * 499, b"longest")
    assert answer(capsys, "load", tmp_path / "db", tmp_path / "s.kv", "--append")["records_read"] == 0


def test_schemas_that_differ(
    text_store: Path, arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no schema" in failing(capsys, "load", tmp_path / "rows.npz", text_store, "--append")
    assert "the schema" in failing(capsys, "load", tmp_path / "words", arrays, "--append")
    with kv.open(text_store) as store:
        assert len(store) == 3


def test_bad_input_leaves_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = tmp_path / "source", tmp_path / "s.kv"
    source.mkdir()
    (source / "a").write_bytes(b"1")
    (source / LONG_NAME).parent.mkdir(parents=True)
    (source / LONG_NAME).write_bytes(b"2")
    assert "--keys hash" in failing(capsys, "load", source, store)
    assert not store.exists()
    store.mkdir()
    assert "--keys hash" in failing(capsys, "load", source, store)
    assert list(store.iterdir()) == []
    assert "does not exist" in failing(capsys, "load", tmp_path / "none", store)
    np.savez(tmp_path / "text.npz", t=np.array([b"a"]))
    np.savez(tmp_path / "t.npz", t=np.array([1]))
    assert "field 't'" in failing(capsys, "load", tmp_path / "text.npz", store)
    failing(capsys, "load", source, tmp_path / "no" / "s.kv", "--keys", "hash")
    failing(capsys, "load", source, store, "--keys", "hash", "--segment-bytes", "much")
    assert "already a store" in failing(capsys, "load", filled(tmp_path / "t.npz", tmp_path / "f.kv"), store)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of two classes."""
    for name in ("dog", "cat"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(3):
            (tmp_path / "images" / name / f"{k}.jpg").write_bytes(f"{name} {k}".encode() * 400)
    return tmp_path / "images"


def test_a_store_in_its_source(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout in ("classes", "files"):
        assert called("load", images, images / "cat" / "s.kv", "--layout", layout) == 2
        assert "is in the source folder" in capsys.readouterr().err
    assert not (images / "cat" / "s.kv").exists()


def test_a_note_on_the_layout(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "dog" / "notes.txt").write_bytes(b"")
    assert called("load", images, tmp_path / "s.kv") == 0
    assert "because dog/notes.txt is not an image" in " ".join(capsys.readouterr().err.split())


def test_load_classes(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "load", images, tmp_path / "s.kv")
    assert (result["format"], result["records"]) == ("classes", 6)
    assert result["fields"] == {"image": ["uint8", [None]], "label": ["int64", []], "name": ["str", [None]]}
    assert result["disk_bytes"] > result["value_bytes"] == 6 * 5 * 400
    with kv.open(tmp_path / "s.kv") as store:
        assert store.metadata == {"classes": {"label": ["cat", "dog"]}}
        batch, found = store.get_many(np.arange(6))
        assert found.all() and batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
        assert batch["name"].to_list() == [f"{name}/{k}.jpg" for name in ("cat", "dog") for k in range(3)]
        assert bytes(batch["image"][4]) == b"dog 1" * 400
    (images / "README.md").write_bytes(b"")
    assert called("load", images, tmp_path / "s.kv", "--append") == 0
    err = capsys.readouterr().err
    assert "skipped 1 files that are not images of classes, such as README.md" in " ".join(err.split())
    assert "nothing to add" in err
    (images / "ant").mkdir()
    (images / "ant" / "0.jpg").write_bytes(b"ant")
    assert "other classes" in failing(capsys, "load", images, tmp_path / "s.kv", "--append")
    named = answer(capsys, "load", images, tmp_path / "n.kv", "--keys", "name")
    assert named["records"] == 7
    with kv.open(tmp_path / "n.kv") as store:
        assert bytes(store["ant/0.jpg"]["image"]) == b"ant"


def test_a_bad_source_leaves_what_was_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for k in range(40):
            for extension, data in (("jpg", bytes(1 << 20)), ("cls", b"%d" % k)):
                member = tarfile.TarInfo(f"{k:03}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    archive_bytes = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(archive_bytes[: len(archive_bytes) // 2])
    assert "truncated" in failing(capsys, "load", tmp_path / "a.tar", tmp_path / "s.kv")
    assert not (tmp_path / "s.kv").exists()
    opened = open_source(tmp_path / "a.tar")
    with kv.create(tmp_path / "s.kv", schema=opened.schema) as store:
        batch = next(opened.batches())
        store.put_many(batch.keys, batch.values)
    assert "truncated" in failing(capsys, "load", tmp_path / "a.tar", tmp_path / "s.kv", "--append")
    with kv.open(tmp_path / "s.kv") as store:
        assert len(batch.keys) <= len(store) < 20
    (tmp_path / "a.tar").write_bytes(archive_bytes)
    assert answer(capsys, "load", tmp_path / "a.tar", tmp_path / "s.kv", "--append")["records"] == 40
    with kv.open(tmp_path / "s.kv") as store:
        assert store.get_many(np.arange(40))[0]["label"].tolist() == list(range(40))


def test_a_file_that_cannot_be_read(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_source(images)
    read = "warpwell.kv.convert.import_files.read_value"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, lambda path: (images / "none.jpg").read_bytes())
        assert "none.jpg: No such file" in failing(capsys, "load", images, tmp_path / "s.kv")
    opened.close()
    assert not (tmp_path / "s.kv").exists()


def test_the_progress_of_a_load(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def progress(self: Output) -> Iterator[Any]:
        yield lambda *report: shown.append(report)

    monkeypatch.setattr(Output, "progress", progress)
    assert called("load", images, tmp_path / "s.kv") == 0
    (stage, done, total, text), *_ = shown
    assert (stage, done, total) == ("load", 1000, 1000)
    assert re.fullmatch(r"6 records, 11\.7 KiB, [0-9.]+ .?i?B/s, 0:00:00 left", text)


ROWS = 3600


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    np.savez(path, x=np.ones((ROWS, 1 << 16), np.uint8))
    yield str(path)
    path.unlink()


LOAD = f"""
import runpy, time
from warpwell.cli import _common
from warpwell.kv import Store
_common.CLEANUP_SECONDS = {HANG_SECONDS}  # on a busy disk, closing the store takes longer than users wait
put_many = Store.put_many
def put_some(store, *args, **options):
    put_many(store, *args, **options)
    if len(store) > {ROWS - 1000}:  # so the load does not end before the signal comes
        time.sleep(1000)
Store.put_many = put_some
runpy.run_module("warpwell", run_name="__main__", alter_sys=True)
"""


@pytest.mark.quick("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_load_that_is_broken_off_leaves_a_store_that_opens(
    many_rows: str, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", LOAD, "kv", "load", many_rows, str(tmp_path / "s.kv")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + HANG_SECONDS
    # some commits have been made
    while sum(f.stat().st_blocks * 512 for f in (tmp_path / "s.kv").glob("*.val")) < 130 << 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert "Traceback" not in err
    assert out == ""
    with kv.open(tmp_path / "s.kv") as store:
        assert 1000 <= len(store) < ROWS
        assert number == signal.SIGKILL or f"{len(store):,} records" in err
        assert store.keys_array().tolist() == list(range(len(store)))
        assert all(value["x"].all() for value in store.values())
    assert main(["kv", "load", many_rows, str(tmp_path / "s.kv"), "--append"]) == 0
    with kv.open(tmp_path / "s.kv") as store:
        assert len(store) == ROWS


HELD_LOAD = """
import runpy, time
from warpwell.kv import Store
def put_many(store, *args, **options):
    print("loading", flush=True)
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            pass
Store.put_many = put_many
runpy.run_module("warpwell", run_name="__main__", alter_sys=True)
"""


def test_an_interrupted_load_that_does_not_stop_leaves_the_old_store_alone(text_store: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=np.ones((10, 1), np.uint8))
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-c", HELD_LOAD, "kv", "load", str(tmp_path / "new.npz"), str(text_store), "--overwrite"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        assert sorted(tmp_path.iterdir()) != before
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130 and err == "warpwell: interrupted\n"
    assert sorted(tmp_path.iterdir()) == before
    with kv.open(text_store) as store:
        assert store["a"] == b"first"


# --- get


def test_get_writes_raw_bytes(text_store: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for key, value in (("a", b"first"), ("b/c", bytes(range(256))), ("empty", b"")):
        assert main(["kv", "get", str(text_store), key]) == 0
        assert capsysbinary.readouterr().out == value
    assert main(["kv", "get", str(text_store), "61", "--type", "hex", "--out", str(tmp_path / "v")]) == 0
    assert (tmp_path / "v").read_bytes() == b"first"
    assert capsysbinary.readouterr().out == b""


def test_get_as_json(text_store: Path, arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "get", text_store, "a")
    assert (result["key"], result["key_hex"], result["bytes"], result["text"]) == ("a", "61", 5, "first")
    result = answer(capsys, "get", text_store, "b/c")
    assert (base64.b64decode(result["base64"]), result["text"]) == (bytes(range(256)), None)
    result = answer(capsys, "get", arrays, "7")
    assert result["fields"] == {"x": [[42, 43, 44], [45, 46, 47]], "y": 1.75, "ok": False}
    assert (result["key"], result["key_hex"]) == ("7", "0700000000000000")


def test_get_a_field(arrays: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["kv", "get", str(arrays), "7", "--field", "x"]) == 0
    raw = capsysbinary.readouterr().out
    assert np.array_equal(np.frombuffer(raw, np.uint16), np.arange(42, 48))
    assert main(["kv", "get", str(arrays), "7"]) == 0
    shown = capsysbinary.readouterr().out.decode()
    assert "float64  1.75" in shown
    assert "[42 43 44]" in shown


def test_keys_of_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kv.create(tmp_path / "s.kv") as store:
        store.put_many([5, b"5", b"17", "-3", -3, b"9" * 16], [b"int", b"5", b"17", b"t", b"n", b"l"])
    path = tmp_path / "s.kv"
    for options, value in (
        (("5",), "int"),
        (("5", "--type", "text"), "5"),
        (("17",), "17"),
        (("--", "-3"), "n"),
        (("9999999999999999",), "l"),
        (("3137", "--type", "hex"), "17"),
        (("+5", "--type", "int"), "int"),
    ):
        arguments = [*options[1:], path, options[0]] if options[0] != "--" else [path, *options]
        assert main(["kv", "get", *map(str, arguments)]) == 0
        assert capsys.readouterr().out == value
    assert "no key" in failing(capsys, "get", path, "6")
    assert "no key" in failing(capsys, "get", path, "abc")
    assert "no key" in failing(capsys, "get", path, "seventeen letters")
    assert "511" in failing(capsys, "get", path, "k" * 512)
    assert "0 bytes" in failing(capsys, "get", path, "")
    assert "integer" in failing(capsys, "get", path, "abc", "--type", "int")
    assert "64-bit" in failing(capsys, "get", path, str(1 << 64), "--type", "int")
    assert "hexadecimal" in failing(capsys, "get", path, "xy", "--type", "hex")
    assert "no schema" in failing(capsys, "get", path, "5", "--field", "x")
    assert "folder" in failing(capsys, "get", path, "5", "--out", tmp_path)
    assert "does not exist" in failing(capsys, "get", path, "5", "--out", tmp_path / "no" / "file")


# --- dump


def test_dump_and_load(text_store: Path, arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kv.open(text_store, mode="r+") as store:
        store[b"large"] = os.urandom(9 << 20)
        store[b"z\0"] = b"z0"
        store[b"z"] = b"z"
    out = tmp_path / "out.parquet"
    for original in (text_store, arrays):
        result = answer(capsys, "dump", original, out, "--overwrite")
        answer(capsys, "load", out, tmp_path / f"again-{original.name}")
        with kv.open(original) as original_store, kv.open(tmp_path / f"again-{original.name}") as reloaded:
            assert (
                result["records"] == len(original_store) == len(reloaded)
                and result["value_bytes"] == original_store.stats.live_bytes
            )
            assert original_store.schema == reloaded.schema and original_store.list() == reloaded.list()
            original_values, reloaded_values = (
                original_store.get_many(original_store.list())[0],
                reloaded.get_many(original_store.list())[0],
            )
            assert (
                original_values == reloaded_values
                if original_store.schema is None
                else all(np.array_equal(original_values[n], reloaded_values[n]) for n in original_values)
            )
    table = parquet.read_table(out)
    assert table["__key__"].to_pylist() == list(range(5000))
    assert np.array_equal(table["y"].to_numpy(), np.arange(5000) / 4)


def test_where_a_dump_cannot_be_written(text_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    assert "--overwrite" in failing(capsys, "dump", text_store, tmp_path / "file")
    assert "is a folder" in failing(capsys, "dump", text_store, text_store, "--overwrite")
    assert "does not exist" in failing(capsys, "dump", text_store, tmp_path / "none" / "file")
    assert "already a store" not in failing(capsys, "dump", tmp_path / "none", tmp_path / "file", "--overwrite")
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("schema", [None, {"x": "int64"}])
def test_a_dump_keeps_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: Any) -> None:
    metadata = {"classes": {"x": ["cat", "dog"]}, "source": "unit"}
    with kv.create(tmp_path / "s.kv", schema, metadata=metadata) as store:
        store.put_many([b"a", b"b"], [b"1", b"2"] if schema is None else {"x": [0, 1]})
    answer(capsys, "dump", tmp_path / "s.kv", tmp_path / "d")
    assert answer(capsys, "load", tmp_path / "d", tmp_path / "again.kv")["records"] == 2
    with kv.open(tmp_path / "again.kv") as store:
        assert store.metadata == metadata and len(store) == 2
        assert (store.schema is None) == (schema is None)


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for schema in (None, {"x": ("int32", (2,))}):
        path = tmp_path / f"{schema is None}.kv"
        kv.create(path, schema=schema).close()
        assert answer(capsys, "stats", path)["records"] == 0
        assert answer(capsys, "verify", path)["sound"]
        assert answer(capsys, "compact", path)["records_moved"] == 0
        assert answer(capsys, "dump", path, f"{path}.parquet")["records"] == 0
        assert parquet.read_table(f"{path}.parquet").num_rows == 0


# --- stats, verify, compact


def test_stats(text_store: Path, arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "stats", text_store)
    assert (result["records"], result["live_bytes"], result["fields"], result["durability"]) == (3, 261, None, "commit")
    assert result["disk_bytes"] > 261
    assert answer(capsys, "stats", arrays)["fields"]["x"] == ["uint16", [2, 3]]
    assert main(["kv", "stats", str(arrays)]) == 0
    assert "x: uint16 (2, 3)" in capsys.readouterr().out


def test_verify(text_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "verify", text_store)["sound"]
    assert main(["kv", "verify", str(text_store)]) == 0
    capsys.readouterr()
    (segment,) = text_store.glob("*.val")
    content = bytearray(segment.read_bytes())
    at = content.index(bytes(range(256)))
    content[at + 100] ^= 4
    segment.write_bytes(content)
    result = answer(capsys, "verify", text_store, code=1)
    assert not result["sound"]
    assert [(Path(p["path"]), p["offset"], p["key_hex"]) for p in result["problems"]] == [(segment, at, b"b/c".hex())]
    assert main(["kv", "verify", str(text_store)]) == 1
    assert "key b/c" in capsys.readouterr().out
    assert "b/c" in failing(capsys, "get", text_store, "b/c")
    assert main(["kv", "get", str(text_store), "a"]) == 0


def test_compact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.kv"
    with kv.create(path, segment_bytes="1MiB") as store:
        for k in range(3000):
            store.put(k, bytes([k % 256]) * 4096)
        store.commit()
        store.delete_many(np.arange(100, 3000))
    assert "--threshold" in failing(capsys, "compact", path, "--threshold", 2)
    result = answer(capsys, "compact", path)
    assert result["segments_retired"] > 5
    assert result["disk_bytes"] < result["disk_bytes_before"] / 5
    with kv.open(path) as store:
        assert len(store) == 100
        assert store[77] == bytes([77]) * 4096


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = [tmp_path / "one", tmp_path / "two"]
    with kv.create(tmp_path / "s.kv", shards=shards) as store:
        store.put_many(np.arange(1000), np.full((1000, 100), 7, np.uint8))
    result = answer(capsys, "verify", tmp_path / "s.kv")
    assert (result["sound"], result["records"], result["value_bytes"]) == (True, 1000, 100_000)
    assert answer(capsys, "stats", tmp_path / "s.kv")["shards"] == 2
    assert answer(capsys, "dump", tmp_path / "s.kv", tmp_path / "d.parquet")["records"] == 1000
    found = parquet.read_table(tmp_path / "d.parquet")
    assert set(found["value"].to_pylist()) == {b"\7" * 100} and found["__key__"].to_pylist() == list(range(1000))
    (segment,) = shards[1].glob("*.val")
    content = bytearray(segment.read_bytes())
    content[content.index(bytes([7] * 100))] = 8
    segment.write_bytes(content)
    (problem,) = answer(capsys, "verify", tmp_path / "s.kv", code=1)["problems"]
    assert problem["path"] == str(segment)
    (shards[0] / "MANIFEST").unlink()
    paths = [p["path"] for p in answer(capsys, "verify", tmp_path / "s.kv", code=1)["problems"]]
    assert paths == [str(shards[0]), str(segment)]


def test_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"text")
    for verb, more in (("get", ["k"]), ("dump", [tmp_path / "out"]), ("stats", []), ("verify", []), ("compact", [])):
        for target in (tmp_path / "none", tmp_path, tmp_path / "file"):
            message = failing(capsys, verb, target, *more)
            assert target.name in message
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    for target in (tmp_path, tmp_path / "file"):
        assert str(target) in failing(capsys, "load", tmp_path / "a.npz", target, "--append")
    (tmp_path / "a.npz").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_two_writers(text_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kv.open(text_store, mode="r+"):
        assert "writ" in failing(capsys, "compact", text_store)
        assert "writ" in failing(capsys, "load", tmp_path / "words", text_store, "--append")
        assert answer(capsys, "stats", text_store)["records"] == 3  # a store that is open for writing can still be read


# --- bench


@pytest.mark.parametrize("name", ["ycsb-a", "ycsb-b", "ycsb-c", "ycsb-d", "ycsb-f"])
@pytest.mark.parametrize("batch", [1, 64])
def test_bench(capsys: pytest.CaptureFixture[str], name: str, batch: int) -> None:
    result = answer(capsys, "bench", "--workload", name, "--records", 500, "--operations", 2000, "--batch", batch)
    assert (result["workload"], result["records"], result["operations"], result["store"]) == (
        name,
        500,
        2000,
        "temporary",
    )
    assert result["operations_per_second"] == pytest.approx(2000 / result["seconds"])
    for latency in result["latencies"].values():
        assert 0 < latency["p50_us"] <= latency["p99_us"]
    kinds = set(result["latencies"])
    assert "read" in kinds
    assert ("insert" in kinds) == (name == "ycsb-d")
    if batch == 1:
        assert sum(latency["count"] for kind, latency in result["latencies"].items() if kind != "commit") == 2000
        assert ("read-modify-write" in kinds) == (name == "ycsb-f")


def test_bench_on_a_store(text_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--records", 300, "--operations", 1000, "--value-bytes", 64)
    path = tmp_path / "bench.kv"
    for name in ("ycsb-d", "ycsb-c"):
        assert answer(capsys, "bench", "--workload", name, "--store", path, *options)["store"] == str(path)
    assert answer(capsys, "stats", path)["records"] > 300
    assert "other records" in failing(capsys, "bench", "--store", text_store, *options)
    assert called("bench", *options) == 0
    text = capsys.readouterr().out
    assert "p99" in text
    assert "operations per second" in text


def test_bench_that_cannot_be(arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not supported" in failing(capsys, "bench", "--workload", "ycsb-e")
    assert "schema" in failing(capsys, "bench", "--store", arrays)
    assert "none" in failing(capsys, "bench", "--properties", tmp_path / "none")
    for option in ("--records", "--operations", "--value-bytes", "--batch"):
        failing(capsys, "bench", option, 0)
    with pytest.raises(SystemExit) as end:
        called("bench", "--workload", "ycsb-z")
    assert end.value.code == 2
    capsys.readouterr()
    (tmp_path / "workloadc").write_text("recordcount=9\noperationcount=20\nreadproportion=1\nfieldlength=3\n")
    result = answer(capsys, "bench", "--properties", tmp_path)
    assert (result["records"], result["operations"], result["value_bytes"]) == (9, 20, 30)


@pytest.mark.skipif(not SHARED.exists(), reason="the files of YCSB are not here")
def test_bench_with_the_files_of_ycsb(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "bench", "--workload", "ycsb-f", "--properties", SHARED)
    assert (result["records"], result["operations"], result["value_bytes"]) == (1000, 1000, 1000)


def test_a_closed_pipe(text_store: Path) -> None:
    with kv.open(text_store, mode="r+") as store:
        store[b"large"] = bytes(1 << 20)  # more than a pipe holds
    process = subprocess.Popen(
        [sys.executable, "-m", "warpwell", "kv", "get", str(text_store), "large"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    assert process.stdout is not None
    assert process.stdout.read(10) == bytes(10)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, b"")
