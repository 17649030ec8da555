"""Zone maps of Arrow files equal the minimum and maximum of each block, and are not used for another file."""

import decimal
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.table.test_table_arrow import mixed, write

import warpwell as ww
from warpwell.errors import FormatError, MissingFileError
from warpwell.kv import crc32c
from warpwell.table.zones import BLOCK_ROWS, read_zones

ROWS = 2 * BLOCK_ROWS + 77


def plain(column: Any) -> list[Any]:
    """Return the values of a column in Python; of NaN, None."""
    if pa.types.is_timestamp(column.type):  # Python has no years above 9999
        column = column.cast(pa.int64())
    values = column.to_pylist()
    return [None if isinstance(value, float) and value != value else value for value in values]


def odd() -> Any:
    """Return columns of types that need care: NaN, nulls in dictionaries, types that pyarrow does not order."""
    random = np.random.default_rng(3)
    x = random.standard_normal(ROWS)
    x[:BLOCK_ROWS] = np.nan
    x[BLOCK_ROWS + 5] = np.nan
    cents = [decimal.Decimal(int(k)).scaleb(-2) for k in random.integers(-999, 999, ROWS)]
    text = pa.array([["b", None, "c", "ä"][k] for k in random.integers(0, 4, ROWS)], pa.string_view())
    return pa.table(
        {
            "nan": pa.array(x, mask=random.random(ROWS) < 0.1),
            "half": pa.array(x.astype(np.float16)),
            "cents": pa.array(cents, pa.decimal64(9, 2)),
            "span": pa.array(random.integers(-99, 99, ROWS), pa.duration("ms")),
            "nulls": pa.array([None] * ROWS, pa.int8()),
            "code": pa.DictionaryArray.from_arrays(
                pa.array(random.integers(0, 3, ROWS), pa.int8()), pa.array(["q", None, "p"])
            ),
            "categorical": pa.DictionaryArray.from_arrays(
                pa.array(random.integers(0, 2, ROWS), pa.uint32()), pa.array(["x", "y"], pa.string_view())
            ),
            "words": text,
            "list": pa.array([[1]] * ROWS),
            "nothing": pa.nulls(ROWS),
            "bool": pa.array(random.random(ROWS) < 0.5),
        }
    )


@pytest.mark.parametrize("rows", [None, 1000, 20_000])
@pytest.mark.parametrize("make", [lambda: mixed(ROWS), odd])
def test_zones_are_those_of_the_rows(tmp_path: Path, make: Any, rows: int | None) -> None:
    table = make()
    path = write(tmp_path / "t.arrow", table, rows=rows)
    ww.table.index(path)
    with ww.table.open(path) as t:
        for number, name in enumerate(table.column_names):
            (part,) = t[number].zones
            assert (part.first, part.rows) == (0, ROWS)
            if name in ("list", "embedding", "null", "nothing", "words", "categorical", "view"):
                assert part.zones is None
                continue
            assert part.zones is not None and len(part.zones.minimum) == 3, name
            values = plain(table.column(name))
            is_float = pa.types.is_floating(table.column(name).type)
            nan = [value is not None and value != value for value in table.column(name).to_pylist()] if is_float else []
            lows, highs = plain(part.zones.minimum), plain(part.zones.maximum)
            for block in range(3):
                block_values = values[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
                real = [value for value in block_values if value is not None]
                expected = (min(real), max(real)) if real else (None, None)
                assert (lows[block], highs[block]) == expected, (name, block)
                with_nan = sum(nan[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS])
                assert part.zones.null_counts[block] == block_values.count(None) - with_nan, name
                assert part.zones.has_nan[block] == (with_nan > 0), name


def test_zones_of_another_file_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="warpwell")
    path = write(tmp_path / "t.arrow", pa.table({"a": [1, 2, 3]}))
    ww.table.index(path)

    def zones() -> Any:
        with ww.table.open(path) as t:
            return t["a"].zones[0].zones

    assert zones().maximum.to_pylist() == [3]
    write(tmp_path / "t.arrow", pa.table({"a": [1, 2, 9]}))  # the new file has the same size
    assert zones() is None and "table.index again" in caplog.text
    ww.table.index(path)
    assert zones().maximum.to_pylist() == [9]
    side = Path(f"{path}.zones")
    raw = side.read_bytes()
    for damaged in (b"", raw[:-9], b"ARROW1" + bytes(200)):
        caplog.clear()
        side.write_bytes(damaged)
        assert zones() is None
        assert ("is damaged" in caplog.text) == (not damaged.startswith(b"ARROW1"))
    assert "has the format of an earlier Warpwell: run ww.table.index again" in caplog.text
    (problem,) = ww.table.check(path).problems
    assert "an earlier Warpwell" in problem.what
    for at in range(0, len(raw), 3):  # a flipped bit is found, or changes nothing
        side.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        found = zones()
        assert found is None or (found.minimum.to_pylist(), found.maximum.to_pylist()) == ([1], [9]), at
    side.unlink()
    assert zones() is None
    assert read_zones(os.fspath(path), None) is None


def test_zones_that_are_incomplete_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"a": range(ROWS)})
    ww.table.convert(table, path).close()
    zones = Path(f"{path}.zones")
    reader = pa.ipc.open_stream(zones.read_bytes()[:-4])
    batch, description = reader.read_next_batch(), json.loads(reader.schema.metadata[b"warpwell.zones"])
    changes = [{key: None} for key in ("bytes", "rows", "crc32c")] + [
        {"crc32c": []},
        {"bytes": "1"},
        {"rows": ROWS * 9},
    ]
    cases = [(batch, json.dumps({**description, **change})) for change in changes]
    cases += [
        (batch, json.dumps({key: description[key] for key in description.keys() - {name}})) for name in description
    ]
    cases += [(batch, "[" * 100_000), (batch, "[]"), (batch.slice(1), json.dumps(description))]
    cases.append((pa.RecordBatch.from_arrays([pa.array([1, 2, 3])], ["0"]), json.dumps(description)))
    for content, text in cases:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, content.schema.with_metadata({b"warpwell.zones": text})) as writer:
            writer.write_batch(content)
        raw = sink.getvalue().to_pybytes()
        zones.write_bytes(raw + crc32c(raw).to_bytes(4, "little"))
        assert read_zones(str(path), description["id"]) is None, text[:200]
        with ww.table.open(path) as opened:
            assert len(opened.where([("a", "<", 3)])) == 3
        assert not ww.table.check(path).sound


def test_what_cannot_be_indexed(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        ww.table.index(tmp_path / "none.arrow")
    path = write(tmp_path / "t.arrow", pa.table({"a": ["x", "y"]}))
    with ww.table.open(path) as t:
        at = t["a"].runs[0].offsets.offset
    raw = bytearray(path.read_bytes())
    raw[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(FormatError, match="damaged"):
        ww.table.index(path)
    with pytest.raises(FormatError, match="folder"):
        ww.table.index(tmp_path)
    assert os.listdir(tmp_path) == ["t.arrow"]
    shutil.copy(path, tmp_path / "u.arrow")
