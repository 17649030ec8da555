"""Words that device code builds are the bytes of the wire structs, and come apart again."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpwell import nvme
from warpwell.nvme import command, completion, key_value, opcodes, status
from warpwell.nvme._check import require_layout


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def either_sign(bits: int) -> st.SearchStrategy[int]:
    """The same bits as Python's unsigned and as device code's signed integer."""
    return st.integers(-(2 ** (bits - 1)), 2**bits - 1)


def as_bytes(words: list[int]) -> bytes:
    """np.array raises where a word is no signed 64-bit integer."""
    return np.array(words, "<i8").tobytes()


def filled(dtype: np.dtype[Any], **fields: int) -> np.ndarray[Any, Any]:
    entry = np.zeros((), dtype)
    for name, value in fields.items():
        entry[name] = value
    return entry


@given(unsigned(8), unsigned(16), unsigned(32))
@example(0xFF, 0xFFFF, 0xFFFFFFFF)
@example(nvme.READ, 0, 0x80000000)
def test_command_word0(opc: int, cid: int, nsid: int) -> None:
    word = command.command_word0(opc, cid, nsid)
    expected = filled(nvme.COMMAND, opc=opc, cid=cid, nsid=nsid).tobytes()
    assert as_bytes([word]) == expected[nvme.WORD_ID * 8 :][:8]
    assert command.word0_opc(word) == opc
    assert command.word0_flags(word) == 0
    assert command.word0_cid(word) == cid
    assert command.word0_nsid(word) == nsid


@given(unsigned(8), unsigned(16))
def test_command_word0_drops_what_does_not_fit(opc: int, cid: int) -> None:
    assert command.command_word0(opc + 256, cid - 65536, -1) == command.command_word0(opc, cid, 0xFFFFFFFF)


def test_flags_of_word0() -> None:
    entry = filled(nvme.COMMAND, opc=0x7F, flags=nvme.PSDT_SGL | nvme.FUSE_SECOND, cid=3, nsid=0xFFFFFFFF)
    assert command.word0_flags(int(entry.reshape(1).view("<i8")[0])) == nvme.PSDT_SGL | nvme.FUSE_SECOND


@given(either_sign(64))
@example(-1)
@example(2**63)
@example(-(2**63))
@example(0xFFFFFFFF)
def test_command_word5(slba: int) -> None:
    word = command.command_word5(slba)
    bits = slba % 2**64
    expected = filled(nvme.COMMAND, cdw10=bits & 0xFFFFFFFF, cdw11=bits >> 32).tobytes()
    assert as_bytes([word]) == expected[nvme.WORD_CDW10 * 8 :][:8]
    assert command.word5_slba(word) % 2**64 == bits


@given(unsigned(16), unsigned(16))
def test_command_word6(nlb: int, control: int) -> None:
    word = command.command_word6(nlb, control)
    expected = filled(nvme.COMMAND, cdw12=nlb | control << 16).tobytes()
    assert as_bytes([word]) == expected[nvme.WORD_CDW12 * 8 :][:8]
    assert command.word6_nlb(word) == nlb
    assert command.word6_control(word) == control


@given(unsigned(32), unsigned(32))
@example(0, 0x80000000)
def test_any_word(low: int, high: int) -> None:
    word = command.word_of(low, high)
    assert as_bytes([word]) == filled(nvme.COMMAND, cdw2=low, cdw3=high).tobytes()[nvme.WORD_CDW2 * 8 :][:8]
    assert command.word_low(word) == low
    assert command.word_high(word) == high


@given(st.lists(either_sign(63), min_size=8, max_size=8))
def test_a_whole_command(words: list[int]) -> None:
    entry = np.frombuffer(as_bytes(words), nvme.COMMAND)[0]
    assert int(entry["opc"]) == command.word0_opc(words[nvme.WORD_ID])
    assert int(entry["flags"]) == command.word0_flags(words[nvme.WORD_ID])
    assert int(entry["cid"]) == command.word0_cid(words[nvme.WORD_ID])
    assert int(entry["nsid"]) == command.word0_nsid(words[nvme.WORD_ID])
    for name, index in (("mptr", nvme.WORD_MPTR), ("prp1", nvme.WORD_PRP1), ("prp2", nvme.WORD_PRP2)):
        assert int(entry[name]) == words[index] % 2**64
    pairs = {2: nvme.WORD_CDW2, 10: nvme.WORD_CDW10, 12: nvme.WORD_CDW12, 14: nvme.WORD_CDW14}
    for first, index in pairs.items():
        assert int(entry[f"cdw{first}"]) == command.word_low(words[index])
        assert int(entry[f"cdw{first + 1}"]) == command.word_high(words[index])
    assert int(entry["cdw12"]) & 0xFFFF == command.word6_nlb(words[nvme.WORD_CDW12])
    assert int(entry["cdw12"]) >> 16 == command.word6_control(words[nvme.WORD_CDW12])


@given(either_sign(64), unsigned(16), unsigned(16), unsigned(16), unsigned(1), unsigned(15))
@example(-1, 0xFFFF, 0xFFFF, 0xFFFF, 1, 0x7FFF)
@example(0, 0, 0, 0, 0, 0x4000)
def test_completion(result: int, sqhd: int, sqid: int, cid: int, phase: int, code: int) -> None:
    words = [completion.completion_word0(result), completion.completion_word1(sqhd, sqid, cid, phase, code)]
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
    assert as_bytes(words) == expected.tobytes()
    word = words[nvme.WORD_STATUS]
    assert completion.word1_sqhd(word) == sqhd
    assert completion.word1_sqid(word) == sqid
    assert completion.word1_cid(word) == cid
    assert completion.word1_phase(word) == phase
    assert completion.word1_status(word) == code


@given(unsigned(32), st.integers(0, nvme.MAX_KEY_BYTES), unsigned(8))
def test_key_value_word5(value_size: int, key_size: int, options: int) -> None:
    word = key_value.key_value_word5(value_size, key_size, options)
    expected = filled(nvme.COMMAND, cdw10=value_size, cdw11=key_size | options << 8).tobytes()
    assert as_bytes([word]) == expected[nvme.WORD_CDW10 * 8 :][:8]
    assert key_value.word5_value_size(word) == value_size
    assert key_value.word5_key_size(word) == key_size
    assert key_value.word5_options(word) == options


def test_a_key_stands_in_cdw2_3_14_15() -> None:
    key = bytes(range(16))
    low, high = np.frombuffer(key, "<i8").tolist()
    words = [0] * nvme.COMMAND_WORDS
    words[nvme.WORD_KEY_LOW], words[nvme.WORD_KEY_HIGH] = low, high
    entry = np.frombuffer(as_bytes(words), nvme.COMMAND)[0]
    assert b"".join(entry[name].tobytes() for name in ("cdw2", "cdw3", "cdw14", "cdw15")) == key


@given(st.binary(max_size=16), unsigned(32), unsigned(8), unsigned(16), unsigned(32))
@example(b"\xff" * 16, 0xFFFFFFFF, 0xFF, 0xFFFF, 0xFFFFFFFF)
@example(b"", 0, 0, 0, 1)
def test_a_whole_key_value_command(key: bytes, size: int, options: int, cid: int, nsid: int) -> None:
    low, high = key_value.key_words(key)
    words = [0] * nvme.COMMAND_WORDS
    words[nvme.WORD_ID] = command.command_word0(nvme.KV_RETRIEVE, cid, nsid)
    words[nvme.WORD_KEY_LOW], words[nvme.WORD_KEY_HIGH] = low, high
    words[nvme.WORD_SIZES] = key_value.key_value_word5(size, len(key), options)
    entry = np.frombuffer(as_bytes(words), nvme.KEY_VALUE_COMMAND)[0]
    assert (entry["opc"], entry["flags"], entry["cid"], entry["nsid"]) == (nvme.KV_RETRIEVE, 0, cid, nsid)
    assert (entry["key_low"].tobytes() + entry["key_high"].tobytes())[: len(key)] == key
    assert (entry["value_size"], entry["key_size"], entry["options"]) == (size, len(key), options)
    assert entry["reserved"] == 0
    assert key_value.key_of_words(low, high, len(key)) == key
    assert key_value.key_of_words(low % 2**64, high % 2**64, 16) == key.ljust(16, b"\0")


def test_a_key_that_no_command_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        key_value.key_words(bytes(17))


@given(unsigned(15))
def test_status_comes_apart(value: int) -> None:
    parts = status.status_sct(value) << 8 | status.status_sc(value)
    assert status.status_code(value) == parts
    crd = (value >> 11) & 3
    assert parts | crd << 11 | status.status_more(value) << 13 | status.status_dnr(value) << 14 == value
    assert status.describe(value)


@given(unsigned(11), unsigned(1))
def test_status_of(code: int, dnr: int) -> None:
    value = status.status_of(code, dnr)
    assert (status.status_code(value), status.status_dnr(value), status.status_more(value)) == (code, dnr, 0)


def test_describe() -> None:
    assert status.describe(nvme.SUCCESS) == "success (generic, sct 0 sc 0x00)"
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


def test_opcode_names() -> None:
    assert (nvme.FLUSH, nvme.WRITE, nvme.READ) == (0, 1, 2)
    keys = (nvme.KV_STORE, nvme.KV_RETRIEVE, nvme.KV_LIST, nvme.KV_DELETE, nvme.KV_EXIST)
    assert keys == (1, 2, 6, 16, 20)
    assert opcodes.opcode_name(nvme.READ) == "read"
    assert opcodes.opcode_name(0x7F) == "opcode 0x7f"
    assert opcodes.key_value_opcode_name(nvme.KV_EXIST) == "exist"
    assert opcodes.key_value_opcode_name(0x05) == "opcode 0x05"


def test_a_wrong_layout_is_refused_at_import() -> None:
    require_layout(nvme.COMPLETION, 16, {n: f[1] for n, f in (nvme.COMPLETION.fields or {}).items()})
    with pytest.raises(ImportError, match="specification"):
        require_layout(nvme.COMPLETION, 16, {"dw0": 0})
    with pytest.raises(ImportError, match="specification"):
        require_layout(np.dtype([("a", "<u4")]), 8, {"a": 0})


def public(module: ModuleType) -> list[str]:
    """Return the constants and functions that a module defines for others."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (name.isupper() or getattr(value, "__module__", "") == module.__name__)
    ]


def test_no_function_calls_another() -> None:
    """So that each can be registered as device code alone."""
    for module in (command, completion, key_value, status):
        for name in public(module):
            value = getattr(module, name)
            if callable(value) and name != "describe":
                called = [n for n in value.__code__.co_names if callable(getattr(module, n, None))]
                assert not called, f"{name} calls {called}"


def test_public_names_are_those_of_the_modules() -> None:
    for module in (command, completion, key_value, opcodes, status):
        for name in public(module):
            assert getattr(nvme, name) is getattr(sys.modules[module.__name__], name)
