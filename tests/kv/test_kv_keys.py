"""Keys and schemas: every form that a caller may pass, and every one that is refused."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwell import errors
from warpwell.kv.keys import Keys, as_key, as_keys, from_bytes, in_order
from warpwell.kv.log.format import MAX_VALUE
from warpwell.kv.schema import Schema

KEY = st.one_of(st.binary(min_size=1, max_size=16), st.binary(min_size=1, max_size=511))


def test_one_key() -> None:
    assert as_key(5) == b"\5" + bytes(7)
    assert as_key(-1) == b"\xff" * 8 == as_key(np.int32(-1))
    assert as_key("é") == b"\xc3\xa9"
    assert as_key(bytearray(b"ab")) == b"ab"


@pytest.mark.parametrize("key", [b"", "", b"x" * 512, "é" * 256, 1 << 63, -(1 << 63) - 1])
def test_lengths_that_cannot_be(key: object) -> None:
    with pytest.raises(errors.ArgumentError, match="511"):
        as_key(key)
    with pytest.raises(errors.ArgumentError):
        as_keys([b"ok", key])


@pytest.mark.parametrize("key", [1.5, None, True, np.True_, (1,), [b"a"]])
def test_types_that_are_no_keys(key: object) -> None:
    with pytest.raises(errors.ArgumentError, match="pass an int"):
        as_key(key)


def test_text_without_utf8_is_named() -> None:
    with pytest.raises(errors.ArgumentError, match=r"udc80.*os\.fsencode"):
        as_key("a\udc80")


@given(st.lists(KEY))
def test_bytes_come_back(keys: list[bytes]) -> None:
    assert as_keys(keys).to_list() == keys
    again = as_keys(as_keys(keys).arrays()) if keys else as_keys([])
    assert again.to_list() == keys
    assert [again.row(k) for k in range(len(keys))] == keys


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers_are_their_eight_bytes(keys: list[int]) -> None:
    expected = [k.to_bytes(8, "little", signed=True) for k in keys]
    for given_keys in (keys, np.array(keys, np.int64), iter(keys)):
        checked = as_keys(given_keys)
        assert checked.to_list() == keys == [checked.row(k) for k in range(len(keys))]
        assert [checked.raw(k) for k in range(len(keys))] == expected
    named = from_bytes(expected)
    assert named.to_list() == expected and (named.lengths is None or not keys)


def test_integers_and_names_stay_what_they_are() -> None:
    mixed = [7, b"8 bytes.", np.int32(-1), "a", "ssssssss"]
    keys = as_keys(mixed)
    assert keys.to_list() == [7, b"8 bytes.", -1, b"a", b"ssssssss"]
    assert keys.take(slice(2)).to_list() == [7, b"8 bytes."] == as_keys(np.array([7, b"8 bytes."], object)).to_list()
    assert keys.marked()[1].tolist() == [40, 8, 40, 1, 8] and keys.padded()[1].tolist() == [8, 8, 8, 1, 8]
    assert as_keys(["8 bytes.", "names..."]).lengths is None and not as_keys(["8 bytes."]).all_integers
    assert as_keys(np.full((2, 8), 65, np.uint8)).to_list() == [b"A" * 8] * 2
    assert in_order(as_keys([b"b", 3, "a", -4, bytes(8)])).to_list() == [-4, 3, bytes(8), b"a", b"b"]
    names = as_keys([f"img{k:05}" for k in (11, 2, 300)])
    assert in_order(names).to_list() == [b"img00002", b"img00011", b"img00300"]


def test_length_tells_keys_apart() -> None:
    keys = as_keys([b"a", b"a\0", 97])
    assert len({(w.tobytes(), n) for w, n in zip(keys.words, keys.lengths, strict=True)}) == 3


def test_arrays() -> None:
    assert as_keys(np.arange(3, dtype=np.uint8)).words.tolist() == [0, 1, 2]
    assert as_keys(np.arange(6)[::2]).words.tolist() == [0, 2, 4]
    assert as_keys(np.full((2, 16), 65, np.uint8)).to_list() == [b"A" * 16] * 2
    assert as_keys(np.array([b"ab", b"cd"])).to_list() == [b"ab", b"cd"]
    assert as_keys(np.array(["ab", "c"])).to_list() == [b"ab", b"c"]
    assert as_keys(np.array(["ab", "c"], np.dtypes.StringDType())).to_list() == [b"ab", b"c"]
    assert as_keys(pa.chunked_array([["ab"], ["c"]])).to_list() == [b"ab", b"c"]
    assert as_keys(pa.array([3, -4])).to_list() == [3, -4]
    for empty in (np.zeros(0), np.zeros(0, "S3"), np.zeros(0, np.uint64), []):
        assert as_keys(empty).size == 0
    padded = np.full((2, 16), 65, np.uint8)
    assert as_keys((padded, np.array([1, 3]))).to_list() == [b"A", b"AAA"]
    short_keys = as_keys([b"a", b"bb", b"ccc"])
    assert isinstance(short_keys, Keys) and short_keys.take(np.array([2, 0])).to_list() == [b"ccc", b"a"]


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros((2, 512), np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros(3),
        np.zeros((2, 2)),
        np.array([1 << 63], np.uint64),
        np.array([b"a\0", b"a"]),
        np.array([bytes(2)]),
        np.array([True]),
        pa.array(["a", None]),
        "abc",
        5,
        None,
        (np.zeros((2, 16), np.uint8), np.array([1])),
        (np.zeros((2, 16), np.uint8), np.array([1, 17])),
    ],
)
def test_arrays_that_are_no_keys(keys: object) -> None:
    with pytest.raises(errors.ArgumentError):
        as_keys(keys)


# -- schemas ------------------------------------------------------------------------------------------------

DIGITS = {"x": ("uint8", (8, 8)), "y": ("int64", ())}


def test_records_are_aligned_and_come_back() -> None:
    schema = Schema({"a": ("bool", 3), "b": ("float32", (2, 1)), "c": "int16"})
    assert [f.offset for f in schema.fields] == [0, 8, 16]
    assert schema.nbytes == 24
    assert Schema.from_json(schema.to_json()) == schema
    values = {"a": np.array([[True, False, True]] * 2), "b": np.ones((2, 2, 1), np.float32), "c": [7, -8]}
    rows = schema.pack(values, 2)
    assert rows.shape == (2, 24) and rows.flags.c_contiguous
    for name, array in schema.unpack(rows).items():
        np.testing.assert_array_equal(array, values[name])
    record = schema.unpack_one(schema.pack_one({"a": [True] * 3, "b": [[1], [2]], "c": 3}).tobytes())
    assert record["c"] == 3 and record["b"].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        None,
        {"x": ("object", ())},
        {"x": ("S5", ())},
        {"x": (">i4", ())},
        {"x": ("float128", ())},
        {"x": ("complex128", ())},
        {"x": ("nonsense", ())},
        {"x": (None, ())},
        {"": "int8"},
        {"x": ("int8", (0,))},
        {"x": ("int8", (-1,))},
        {"x": ("int8", (1.5,))},
        {"x": ("int8", (MAX_VALUE + 1,))},
        {5: ("int8", ())},
        {"x": ("int8",)},
    ],
)
def test_schemas_that_cannot_be(fields: object) -> None:
    with pytest.raises(errors.SchemaError):
        Schema(fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"x": np.zeros((2, 8, 8), np.uint8)}, "y"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": [1, 2], "z": [1, 2]}, "z"),
        ({"x": np.zeros((2, 8, 8), np.int8), "y": [1, 2]}, "x"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.zeros(2, np.int32)}, "y"),
        ({"x": np.zeros((2, 64), np.uint8), "y": [1, 2]}, "x"),
        ({"x": np.zeros((3, 8, 8), np.uint8), "y": [1, 2]}, "x"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": [1.5, 2]}, "y"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": ["a", "b"]}, "y"),
        ({"x": np.full((2, 8, 8), 256).tolist(), "y": [1, 2]}, "x"),
        ([1, 2], None),
    ],
)
def test_values_of_another_schema(values: object, field: str | None) -> None:
    with pytest.raises(errors.SchemaError) as raised:
        Schema(DIGITS).pack(values, 2)
    assert raised.value.field == field
