"""The pass-through driver in front of machine drivers that record their calls, and of the fake driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS

from lab.driver.build import build_fake
from warpwell.driver import generate, passthrough, table
from warpwell.driver.build import compiler
from warpwell.errors import DeviceNotFoundError

ROOT = Path(__file__).parents[2]
UNKNOWN = "cuFromANewerDriver"
RECORDER = """
#include <stdint.h>
#include <string.h>
typedef int CUresult, CUdevice;
typedef void *CUcontext, *CUmodule, *CUlibrary, *CUfunction, *CUkernel, *CUstream, *CUevent;
uint64_t seen[16];
const char *called;
static CUresult thunk(void) { called = "a thunk"; return 0; }
CUresult cuFromANewerDriver(uint64_t a, uint64_t b) { called = __func__; seen[0] = a; seen[1] = b; return 4711; }
CUresult cuGetExportTable(void **table, void *id) { called = __func__; *table = id; return 0; }
static CUresult newer(void) { return 0; }
CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
    CUresult cuLaunchKernel(), cuGraphLaunch(), cuGraphLaunch_ptsz();
    seen[3] = flags;
    *status = 0;
    *address = 0;
    if (!strcmp(name, "cuLaunchKernel"))
        *address = version >= 14000 ? (void *)newer : (void *)thunk;
    else if (!strcmp(name, "cuGraphLaunch"))
        *address = flags & 2 ? (void *)cuGraphLaunch_ptsz : (void *)cuGraphLaunch;
    else if (!strcmp(name, "cuFromANewerDriver"))
        *address = (void *)cuFromANewerDriver;
    else
        *status = 1;
    return 0;
}
CUresult cuGetProcAddress(const char *name, void **address, int version, uint64_t flags)
{
    int status;
    return cuGetProcAddress_v2(name, address, version, flags, &status);
}
"""
CLIENT = """
int cuFromANewerDriver(unsigned long, unsigned long);
int cuMemsetD8_v2(unsigned long, unsigned char, unsigned long);
int main(void) { return cuFromANewerDriver(1, 2) == 4711 && cuMemsetD8_v2(1, 2, 3) ? 0 : 1; }
"""
OLD = {"cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"}
"""Functions that the recorder lacks, as an old driver may."""


def symbols() -> dict[str, table.Call]:
    """Return the functions with arguments that the pass-through defines, by symbol."""
    return {entry.symbol: call for entry, call in generate.passed() if "GetProcAddress" not in entry.symbol}


def compile_library(folder: Path, name: str, source: str, *options: str) -> Path:
    (folder / f"{name}.c").write_text(source)
    line = [*compiler(), "-std=gnu11", "-w", str(folder / f"{name}.c"), *options, "-o", str(folder / name)]
    subprocess.run(line, check=True, timeout=HANG_SECONDS)
    return folder / name


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a driver that records the symbol and the arguments of the last call, and returns its number."""
    text = [RECORDER]
    for number, (symbol, call) in enumerate(symbols().items()):
        if symbol not in OLD:
            named = ", ".join(f"{c} a{i}" for i, c in enumerate(call.c_types))
            stores = " ".join(f"seen[{i}] = (uint64_t)a{i};" for i in range(len(call.roles)))
            text.append(f'CUresult {symbol}({named}) {{ called = "{symbol}"; {stores} return {1000 + number}; }}')
    options = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    return compile_library(tmp_path_factory.mktemp("recorder"), "librecorder.so", "\n".join(text), *options)


def run(driver: Path, text: str, **variables: str) -> str:
    """Return the output of a Python program that has the pass-through driver in front of a driver."""
    environ = passthrough.passthrough_environ({**os.environ, **variables, "MACHINE": str(driver)}, driver)
    line = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_function_arrives_at_the_machines_driver_with_its_arguments(recorder: Path) -> None:
    out = run(
        recorder,
        """
        import ctypes, os
        from tests.driver.test_passthrough import OLD, symbols
        library, machine = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(os.environ["MACHINE"])
        seen, called = (ctypes.c_uint64 * 16).in_dll(machine, "seen"), ctypes.c_char_p.in_dll(machine, "called")
        types = {"uint8_t": ctypes.c_uint8, "uint16_t": ctypes.c_uint16, "uint32_t": ctypes.c_uint32,
                 "int32_t": ctypes.c_int32}
        for number, (symbol, call) in enumerate(symbols().items()):
            function = getattr(library, symbol)
            given = [types.get(c, ctypes.c_uint64)(0x1122334455660000 + 0x0101 * (i + 1))
                     for i, c in enumerate(call.c_types)]
            code = function(*given)
            if symbol in OLD:
                print(code == 801, symbol)
                continue
            arrived = [seen[i] for i in range(len(given))]
            expected = [one.value % (1 << 64) for one in given]
            print(code == 1000 + number and called.value == symbol.encode() and arrived == expected, symbol)
        """,
    )
    printed = out.splitlines()
    assert len(printed) == len(symbols()) > 50
    assert [line for line in printed if not line.startswith("True")] == []


def test_functions_that_nobody_knew_at_build_time_are_the_machines_own(recorder: Path, tmp_path: Path) -> None:
    out = run(
        recorder,
        f"""
        import ctypes, os
        library, machine = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(os.environ["MACHINE"])
        for name in ("{UNKNOWN}", "cuGetExportTable"):
            a, b = (ctypes.cast(getattr(one, name), ctypes.c_void_p).value for one in (library, machine))
            print(a == b)
        print(library.{UNKNOWN}(ctypes.c_uint64(1 << 40), ctypes.c_uint64(2)))
        print(list((ctypes.c_uint64 * 2).in_dll(machine, "seen")), hasattr(library, "cuOfNoDriver"))
        """,
    )
    assert out.splitlines() == ["True", "True", "4711", f"[{1 << 40}, 2] False"]
    program = compile_library(tmp_path, "client", CLIENT, str(recorder))
    environ = passthrough.passthrough_environ(os.environ, recorder)
    assert subprocess.run([str(program)], env=environ, timeout=HANG_SECONDS).returncode == 0


def test_pointers_by_name_are_those_of_the_pass_through(recorder: Path) -> None:
    """A thunk that the driver returns counts as the function; a newer version, which may take others, does not."""
    out = run(
        recorder,
        f"""
        import ctypes
        library = ctypes.CDLL("libcuda.so.1")
        def found(name, version, flags, ask="cuGetProcAddress_v2"):
            address, status = ctypes.c_void_p(), ctypes.c_int(-1)
            more = (ctypes.byref(status),) if ask.endswith("_v2") else ()
            code = getattr(library, ask)(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flags), *more)
            return code, address.value, status.value
        def own(name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for ask in ("cuGetProcAddress_v2", "cuGetProcAddress"):
            print(found("cuLaunchKernel", 12000, 0, ask)[1] in (own("cuLaunchKernel"), own("cuLaunchKernel_ptsz")))
            print(found("cuLaunchKernel", 14000, 0, ask)[1] not in (None, own("cuLaunchKernel")))
            print([found("cuGraphLaunch", 12000, f, ask)[1] == own("cuGraphLaunch" + "_ptsz" * (f // 2))
                   for f in (0, 1, 2)])
            print(found("{UNKNOWN}", 12000, 0, ask)[1] == own("{UNKNOWN}"))
        print(found("cuOfNoDriver", 12000, 2))
        """,
    )
    assert out.splitlines() == ["True", "True", "[True, True, True]", "True"] * 2 + ["(0, None, 1)"]


def test_a_program_runs_on_the_fake_driver(tmp_path: Path) -> None:
    fake, log = build_fake(), tmp_path / "absent"
    text = """
        from tests.harness.driver.calls import Cuda
        import os
        cuda = Cuda()
        print(cuda.start())
        for device in (1, 0):
            cuda.use(device)
            address = cuda.alloc(4096)
            cuda.launch(device, cuda.stream(), "fill", address, 1024, 7)
            cuda.cuCtxSynchronize()
            print(cuda.read(address, 2))
        if not os.fork():
            os._exit(cuda.code("cuCtxSynchronize"))
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    assert run(fake, text, FAKE_LOG=str(log)).splitlines() == ["2", *["b'\\x07\\x00'"] * 2, "3"]
    assert not log.exists()


def test_the_environment_is_that_of_the_program_with_one_folder_in_front(tmp_path: Path) -> None:
    fake = build_fake()
    before = {"LD_LIBRARY_PATH": "/a:/b", "NUMBA_CUDA_DRIVER": "/c", "HOME": "/d"}
    found = passthrough.passthrough_environ(before, fake)
    folder = passthrough.passthrough_folder(fake)
    assert found["LD_LIBRARY_PATH"] == f"{folder}:/a:/b" and found["HOME"] == "/d" and "NUMBA_CUDA_DRIVER" not in found
    assert passthrough.passthrough_environ(found, fake) == found
    assert passthrough.without_passthrough(found) == {"LD_LIBRARY_PATH": "/a:/b", "HOME": "/d"}
    assert {path.name for path in folder.iterdir()} == {"libcuda.so", "libcuda.so.1", "libcuda-machine.so.1"}


def test_the_machines_driver_is_found_and_never_a_library_of_warpwell(recorder: Path) -> None:
    text = "from warpwell.driver import passthrough\nprint(passthrough.machine_driver({0!r}))"
    fake = build_fake()
    line = [sys.executable, "-c", text.format(str(fake))]
    assert subprocess.check_output(line, text=True, timeout=HANG_SECONDS).strip() == str(fake.resolve())
    with pytest.raises(DeviceNotFoundError, match=re.escape("libnowhere.so")):
        passthrough.machine_driver("libnowhere.so")
    own = subprocess.run(
        [sys.executable, "-c", text.format("libcuda.so.1")],
        env=passthrough.passthrough_environ(os.environ, fake),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert "library of Warpwell" in own.stderr and own.returncode == 1
