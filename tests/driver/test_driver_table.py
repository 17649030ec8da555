"""The table of the driver's interface, compared with NVIDIA's headers if there are any, and the code made of it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab.driver.build import SOURCES
from warpwell.driver import generate, table

CLASSES = {
    "unsigned char": "1",
    "unsigned short": "2",
    "unsigned int": "4",
    "cuuint32_t": "4",
    "int": "4",
    "CUdevice_v1": "4",
    "float": "f",
    "size_t": "8",
    "unsigned long long": "8",
    "cuuint64_t": "8",
    "CUdeviceptr_v2": "8",
    "CUdeviceptr": "8",
    "CUmemGenericAllocationHandle_v1": "8",
    "CUmemLocation": "8",
    "CUmemLocation_v1": "8",
    "CUoccupancyB2DSize": "pointer",
    "CUhostFn": "pointer",
    "CUstreamCallback": "pointer",
}
"""How the header's types travel in a call: bytes of an integer, a float, or a pointer."""
USED_WITHOUT_LAYER = {
    "cuLibraryGetManaged",
    "cuMemcpy2DAsync_v2",
    "cuMemcpy2DUnaligned_v2",
    "cuMemcpy3DAsync_v2",
    "cuMemcpy3D_v2",
    "cuMemsetD2D8Async",
    "cuMemsetD2D8_v2",
    "cuThreadExchangeStreamCaptureMode",
}
"""Calls that the layer serves without a driver; programs or the pass-through make them of the stub driver itself."""
HANDLES = {
    "CUcontext",
    "CUstream",
    "CUevent",
    "CUfunction",
    "CUkernel",
    "CUlibrary",
    "CUmodule",
    "CUgreenCtx",
    "CUmemoryPool",
    "CUgraph",
    "CUgraphNode",
    "CUgraphExec",
    "CUuserObject",
}
ROLES = {
    "uint8_t": "1",
    "uint16_t": "2",
    "uint32_t": "4",
    "int32_t": "4",
    "float": "f",
    "size_t": "8",
    "uint64_t": "8",
}


def folders() -> list[Path]:
    """Return the folders of the wheel nvidia-cuda-runtime, which may hold NVIDIA's headers."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]


@pytest.fixture(scope="module")
def headers() -> tuple[str, str]:
    """Return the typedefs of all versions, and cuda.h."""
    for folder in folders():
        for found in folder.glob("*/include/cudaTypedefs.h"):
            more = found.with_name("cudaProfilerTypedefs.h")
            return found.read_text() + more.read_text(), found.with_name("cuda.h").read_text()
    pytest.skip("the headers are not installed: pip install nvidia-cuda-runtime")


def prototypes(typedefs: str) -> dict[tuple[str, int, bool], list[str]]:
    """Return (name, version, of a thread's stream) -> C types of the arguments."""
    found = {}
    pattern = r"typedef CUresult\s*\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?\)\(([^;]*)\);"
    for name, version, suffix, inside in re.findall(pattern, typedefs):
        inside = re.sub(r"\s+", " ", inside).strip()
        found[name, int(version), bool(suffix)] = [] if inside in ("", "void") else inside.split(",")
    return found


def passed_as(argument: str) -> str:
    """Return how an argument of the header is passed."""
    declaration = argument.replace("const ", "").strip()
    if "*" in declaration:
        return "pointer"
    kind = re.sub(r"\s*\w+$", "", declaration) if re.search(r"\s", declaration) else declaration
    kind = kind.removesuffix("_st")
    return "pointer" if kind in HANDLES else CLASSES.get(kind, "4" if kind.startswith("CU") else kind)


def test_the_table_has_every_name_and_version_of_the_header(headers: tuple[str, str]) -> None:
    header = {(name, version, thread) for name, version, thread in prototypes(headers[0])}
    listed = {(entry.name, entry.version, entry.per_thread) for entry in table.entries()}
    assert len(header) > 500
    assert not sorted(header - listed), "missing in the table"
    assert not sorted(listed - header), "unknown to the header: a mistake, or the installed header is older"


def test_served_calls_pass_their_arguments_as_the_header_says(headers: tuple[str, str]) -> None:
    declared = prototypes(headers[0])
    wrong = []
    compared = set()
    for entry in table.entries():
        call = table.calls().get(table.plain_symbol(entry.symbol))
        arguments = declared.get((entry.name, entry.version, entry.per_thread))
        if call is None or arguments is None:
            continue
        compared.add(call.symbol)
        passed = ["pointer" if "*" in c_type or c_type.startswith("CU") else ROLES[c_type] for c_type in call.c_types]
        if passed != [passed_as(argument) for argument in arguments]:
            wrong.append(f"{entry.symbol}: {call.roles}, the header has {arguments}")
    assert not wrong, "\n".join(wrong)
    assert compared == set(table.calls()), "served, and in no header"


def test_error_codes_are_the_headers(headers: tuple[str, str]) -> None:
    inside = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", headers[1], re.S)
    assert inside
    codes = {int(code): name for name, code in re.findall(r"(CUDA_\w+)\s*=\s*(\d+)", inside[1])}
    assert codes == table.errors()


def test_a_symbol_stands_once_and_versions_rise() -> None:
    symbols = [entry.symbol for entry in table.entries()]
    assert len(symbols) == len(set(symbols))
    for name in {entry.name for entry in table.entries()}:
        plain = [entry for entry in table.entries() if entry.name == name and not entry.per_thread]
        assert [entry.version for entry in plain] == sorted(entry.version for entry in plain), name
        assert [entry.symbol for entry in plain] == [name] + [f"{name}_v{i}" for i in range(2, len(plain) + 1)]


def test_served_calls_are_symbols_and_have_known_roles() -> None:
    symbols = {entry.symbol for entry in table.entries()}
    for call in table.calls().values():
        assert call.symbol in symbols
        assert call.kind in ("hand", "near", "call", "send", "inner"), call
        assert all(role.removeprefix("out_") in table.ROLES for role in call.roles), call
        # An asynchronous call returns no data, and its host memory is freed before it would be read.
        if call.kind == "send":
            assert not any(role.startswith("out_") for role in call.roles), call
        if call.kind in ("call", "send"):
            assert not {"host", "source", "ptr", "str", "chars", "stream", "event"} & set(call.roles), call


def test_what_the_table_says_is_written_by_hand_is_there() -> None:
    """A missing function would be refused without a message: these functions are weak in the generated code."""

    def written(folder: Path, names: str) -> set[str]:
        text = "\n".join(path.read_text() for path in sorted(folder.glob(names)))
        return set(re.findall(r"^CUresult (?:ww_)?(cu\w+)\(", text, re.M))

    kinds = {call.symbol: call.kind for call in table.calls().values()}
    forwards = {call.symbol for call in table.calls().values() if call.forward}
    by_hand = {symbol for symbol, kind in kinds.items() if kind in ("hand", "near")}
    assert forwards < by_hand
    assert written(generate.NATIVE, "layer*.c") == by_hand - forwards
    asked_of_a_driver = {symbol for symbol, kind in kinds.items() if kind != "near"}
    assert written(SOURCES, "fake*.c") == asked_of_a_driver | USED_WITHOUT_LAYER


def test_layer_and_worker_of_different_tables_do_not_talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_hash = generate.protocol_hash()
    other_sources = tmp_path / "native"
    other_sources.mkdir()
    for name in ("wire.h", "calls.h"):
        (other_sources / name).write_bytes((generate.NATIVE / name).read_bytes())
    monkeypatch.setattr(generate, "NATIVE", other_sources)
    assert generate.protocol_hash() == own_hash
    (other_sources / "calls.h").write_text((other_sources / "calls.h").read_text() + "\n")
    assert generate.protocol_hash() != own_hash


def test_numbers_and_structs_follow_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    text = generate.sources()["gen_ops.h"]
    numbers = re.findall(r"^    WW_OP_(cu\w+),$", generate.sources()["gen_numbers.h"], re.M)
    assert numbers == [call.symbol for call in table.calls().values() if call.kind in ("call", "send")]
    call = table.calls()["cuCtxSetLimit"]
    assert "struct __attribute__((packed)) ww_args_cuCtxSetLimit { int32_t a0; uint64_t a1; };" in text
    monkeypatch.setattr(table, "calls", lambda: {call.symbol: replace(call, roles=("enum", "u8"))})
    assert "ww_args_cuCtxSetLimit { int32_t a0; uint8_t a1; };" in generate.sources()["gen_ops.h"]


def test_the_wire_fits_what_both_sides_assume() -> None:
    text = (generate.NATIVE / "wire.h").read_text()
    values = {
        name: int(value) << int(shift or 0)
        for name, value, shift in re.findall(r"#define (WW_\w+) \(?(\d+)u(?: << (\d+)\))?", text)
    }
    assert values["WW_RING_BYTES"] & (values["WW_RING_BYTES"] - 1) == 0
    assert values["WW_RING_BYTES"] % 32 == 0  # so a header fits at any offset where an entry may begin
    assert values["WW_ENTRY_MOST"] * 2 <= values["WW_RING_BYTES"]  # room for an entry and the padding before it


@pytest.mark.parametrize(
    ("check", "lock", "count"), [("graphs", "WW_LOCK_GRAPHS()", 30), ("loading", "WW_LOCK(&layer.loading)", 6)]
)
def test_a_call_locks_before_it_looks_at_what_the_lock_protects(check: str, lock: str, count: int) -> None:
    text = generate.sources()["gen_layer.c"]
    locking = [call for call in table.calls().values() if check in call.checks]
    assert len(locking) > count
    for call in locking:
        body = text.split(f"CUresult {call.symbol}(", 1)[1].split("\n}\n", 1)[0]
        before, behind = body.split(f"{lock};")  # the lock is released by each return
        assert "ww_ready()" in before
        assert not re.search(r"ww_(graph|node|exec|user|object_at|library)\(", before), call
        assert "unlock" not in behind, call
