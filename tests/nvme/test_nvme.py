"""Device code encodes the bytes of the wire structs, and decodes them again."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpwell import nvme
from warpwell.nvme import key_value, status, wire


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def either_sign(bits: int) -> st.SearchStrategy[int]:
    """The same bits as Python's unsigned and as device code's signed integer."""
    return st.integers(-(2 ** (bits - 1)), 2**bits - 1)


def as_bytes(fields: list[int]) -> bytes:
    """np.array raises where a word is no signed 64-bit integer."""
    return np.array(fields, "<i8").tobytes()


def filled(dtype: np.dtype[Any], **fields: int) -> np.ndarray[Any, Any]:
    entry = np.zeros((), dtype)
    for name, value in fields.items():
        entry[name] = value
    return entry


@given(unsigned(8), unsigned(16), unsigned(32))
@example(0xFF, 0xFFFF, 0xFFFFFFFF)
@example(nvme.READ, 0, 0x80000000)
def test_command_word0(opc: int, cid: int, nsid: int) -> None:
    word = wire.command_word0(opc, cid, nsid)
    expected = filled(nvme.COMMAND, opc=opc, cid=cid, nsid=nsid).tobytes()
    assert as_bytes([word]) == expected[:8]
    assert wire.word0_opc(word) == opc
    assert wire.word0_cid(word) == cid
    assert wire.word0_nsid(word) == nsid


@given(unsigned(8), unsigned(16))
def test_command_word0_drops_what_does_not_fit(opc: int, cid: int) -> None:
    assert wire.command_word0(opc + 256, cid - 65536, -1) == wire.command_word0(opc, cid, 0xFFFFFFFF)


@given(unsigned(16), unsigned(16))
def test_command_word6(nlb: int, control: int) -> None:
    word = wire.command_word6(nlb, control)
    expected = filled(nvme.COMMAND, cdw12=nlb | control << 16).tobytes()
    assert as_bytes([word]) == expected[48:][:8]
    assert wire.word6_nlb(word) == nlb


@given(st.lists(either_sign(63), min_size=8, max_size=8))
def test_a_whole_command(fields: list[int]) -> None:
    entry = np.frombuffer(as_bytes(fields), nvme.COMMAND)[0]
    assert int(entry["opc"]) == wire.word0_opc(fields[0])
    assert int(entry["cid"]) == wire.word0_cid(fields[0])
    assert int(entry["nsid"]) == wire.word0_nsid(fields[0])
    for name, index in (("mptr", 2), ("prp1", 3), ("prp2", 4)):
        assert int(entry[name]) == fields[index] % 2**64
    for first, index in {2: 1, 10: 5, 12: 6, 14: 7}.items():
        assert int(entry[f"cdw{first}"]) == fields[index] & 0xFFFFFFFF
        assert int(entry[f"cdw{first + 1}"]) == fields[index] >> 32 & 0xFFFFFFFF
    assert int(entry["cdw10"]) | int(entry["cdw11"]) << 32 == wire.word5_slba(fields[5]) % 2**64
    assert int(entry["cdw12"]) & 0xFFFF == wire.word6_nlb(fields[6])


@given(either_sign(64), unsigned(16), unsigned(16), unsigned(16), unsigned(1), unsigned(15))
@example(-1, 0xFFFF, 0xFFFF, 0xFFFF, 1, 0x7FFF)
@example(0, 0, 0, 0, 0, 0x4000)
def test_completion(result: int, sqhd: int, sqid: int, cid: int, phase: int, code: int) -> None:
    fields = [wire.completion_word0(result), wire.completion_word1(sqhd, sqid, cid, phase, code)]
    bits = result % 2**64
    expected = filled(
        nvme.COMPLETION,
        dw0=bits & 0xFFFFFFFF,
        dw1=bits >> 32,
        sqhd=sqhd,
        sqid=sqid,
        cid=cid,
        status=code << 1 | phase,
    )
    assert as_bytes(fields) == expected.tobytes()
    word = fields[1]
    assert wire.word1_sqhd(word) == sqhd
    assert wire.word1_sqid(word) == sqid
    assert wire.word1_cid(word) == cid
    assert wire.word1_phase(word) == phase
    assert wire.word1_status(word) == code


@given(unsigned(32), st.integers(0, key_value.MAX_KEY_BYTES), unsigned(8))
def test_key_value_word5(value_size: int, key_size: int, options: int) -> None:
    word = key_value.key_value_word5(value_size, key_size, options)
    expected = filled(nvme.COMMAND, cdw10=value_size, cdw11=key_size | options << 8).tobytes()
    assert as_bytes([word]) == expected[40:][:8]
    assert key_value.word5_value_size(word) == value_size
    assert key_value.word5_key_size(word) == key_size
    assert key_value.word5_options(word) == options


@given(st.binary(max_size=16), unsigned(32), unsigned(8), unsigned(16), unsigned(32))
@example(b"\xff" * 16, 0xFFFFFFFF, 0xFF, 0xFFFF, 0xFFFFFFFF)
@example(b"", 0, 0, 0, 1)
def test_a_whole_key_value_command(key: bytes, size: int, options: int, cid: int, nsid: int) -> None:
    low, high = key_value.key_words(key)
    fields = [0] * 8
    fields[0] = wire.command_word0(nvme.KV_RETRIEVE, cid, nsid)
    fields[1], fields[7] = low, high
    fields[5] = key_value.key_value_word5(size, len(key), options)
    entry = np.frombuffer(as_bytes(fields), nvme.COMMAND)[0]
    assert (entry["opc"], entry["flags"], entry["cid"], entry["nsid"]) == (nvme.KV_RETRIEVE, 0, cid, nsid)
    assert b"".join(entry[name].tobytes() for name in ("cdw2", "cdw3", "cdw14", "cdw15")) == key.ljust(16, b"\0")
    assert (entry["cdw10"], entry["cdw11"]) == (size, len(key) | options << 8)


def test_a_key_that_no_command_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        key_value.key_words(bytes(17))


@given(unsigned(15))
def test_every_status_has_a_text(value: int) -> None:
    assert status.status_dnr(value) == value >> 14
    assert f"sct {value >> 8 & 7} sc 0x{value & 0xFF:02x}" in status.describe(value)


@given(unsigned(11), unsigned(1))
def test_status_of(code: int, dnr: int) -> None:
    value = status.status_of(code, dnr)
    assert (value & 0x7FF, value >> 11) == (code, dnr << 3) and status.status_dnr(value) == dnr


def test_describe() -> None:
    assert status.describe(status.SUCCESS) == "success (generic, sct 0 sc 0x00)"
    assert (
        status.describe(status.status_of(nvme.UNRECOVERED_READ_ERROR, 1))
        == "unrecovered read error (media and data integrity, sct 2 sc 0x81, do not retry)"
    )
    assert status.describe(0x7C0) == "unknown status (vendor specific, sct 7 sc 0xc0)"
    assert status.describe(0x4C0) == "unknown status (reserved type, sct 4 sc 0xc0)"


def test_every_status_constant_has_a_name() -> None:
    codes = {n: v for n, v in vars(status).items() if n.isupper() and not n.startswith("_")}
    assert len(set(codes.values())) == len(codes)
    for name, value in codes.items():
        assert "unknown" not in status.describe(value), name


def public(module: ModuleType) -> list[str]:
    """Return the constants and functions that a module defines for others."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (name.isupper() or getattr(value, "__module__", "") == module.__name__)
    ]


def test_no_function_calls_another() -> None:
    """So that each can be registered as device code alone."""
    for module in (wire, key_value, status):
        for name in public(module):
            value = getattr(module, name)
            if callable(value) and name not in ("describe", "key_words", "layout"):
                called = [n for n in value.__code__.co_names if callable(getattr(module, n, None))]
                assert not called, f"{name} calls {called}"
