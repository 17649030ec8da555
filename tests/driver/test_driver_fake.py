"""The fake driver is asynchronous: missing order shows as wrong bytes. It blocks in the same calls as a real one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.harness.until import HANG_SECONDS
from tools.driver_wheel import wheel

from lab.driver.build import build_fake
from warpwell.driver import build
from warpwell.errors import DriverBuildError

ROOT = Path(__file__).parents[2]
BEFORE = """
import ctypes, functools, os, sys, threading
from tests.harness.driver.calls import *
from tests.harness.until import until
cuda = Cuda(os.environ["FAKE"])
cuda.start()
cuda.use(0)
@functools.cache
def word():
    return ctypes.c_uint32.from_address(cuda.pinned(4)[0])
def hold(stream):  # until release
    word().value = 0
    cuda.launch(0, stream, "flag", ctypes.addressof(word()), 1)
def release():
    word().value = 1
def blocked():  # calls that blocked, since the last time
    with open(os.environ["FAKE_BLOCKED"], "a+") as file:
        file.seek(0)
        found = file.read().split("\\n")[:-1]
        file.truncate(0)
    return found
def release_blocked():  # when a call blocks
    until(lambda: os.path.exists(os.environ["FAKE_BLOCKED"]) and os.path.getsize(os.environ["FAKE_BLOCKED"]))
    release()
"""
COUNT = 1024
FRESH = 0xA5


@pytest.fixture(scope="module")
def fake() -> Path:
    return build_fake()


def run(fake: Path, text: str, **environment: str) -> str:
    """Return what a program prints that uses the fake, in a process of its own: the fake reads its environment once."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FAKE_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(text)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=inherited | {"FAKE": str(fake), "CUDA_MODULE_LOADING": "EAGER"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_wait_shows_as_wrong_bytes(fake: Path) -> None:
    """A copy in another stream, and in the legacy stream with blocking and non-blocking streams."""
    out = run(
        fake,
        """
        def late(flags):
            address, stream = cuda.alloc(4096), cuda.stream(flags)
            hold(stream)
            cuda.launch(0, stream, "fill", address, 1024, 7)
            return address, stream
        address, one = late(NON_BLOCKING)
        two, event = cuda.stream(NON_BLOCKING), cuda.event()
        pinned, data = cuda.pinned(4096)
        for wait in (0, 1):
            cuda.cuEventRecord(event, one)
            if wait:
                cuda.cuStreamWaitEvent(two, event, ctypes.c_uint(0))
            cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(pinned), address, 4096, two)
            if wait:
                release()
            cuda.cuStreamSynchronize(two)
            print(data[0], data[4092])
        for flags in (NON_BLOCKING, 0):  # the legacy stream waits for blocking ones only
            address, stream = late(flags)
            if flags == 0:
                threading.Timer(0.03, release).start()
            print(cuda.read(address, 1)[0])
            release()
            cuda.cuStreamSynchronize(stream)
        address, stream = late(0)  # and blocking ones for it
        threading.Timer(0.03, release).start()
        cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(9), 4096)
        other = cuda.stream()
        cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(pinned), address, 4096, other)
        cuda.cuStreamSynchronize(other)
        print(data[0], data[4095])
        """,
    )
    assert out.split() == [str(FRESH)] * 2 + ["7", "7"] + [str(FRESH), "7"] + ["9", "9"]


def test_it_blocks_where_a_real_driver_does_and_says_so(fake: Path, tmp_path: Path) -> None:
    """Pageable copies on a busy stream, the 1,001st call, a free; not launches, pinned copies, events, queries."""
    text = """
        address, (pinned, data) = cuda.alloc(4096), cuda.pinned(4096)
        stream, event, bytes_ = cuda.stream(NON_BLOCKING), cuda.event(), ctypes.create_string_buffer(4096)
        hold(stream)
        for _ in range(990):
            cuda.launch(0, stream, "nap", 0)
        cuda.cuMemcpyHtoDAsync_v2(address, ctypes.c_void_p(pinned), 4096, stream)
        cuda.cuEventRecord(event, stream)
        print(cuda.code("cuStreamQuery", stream), cuda.code("cuEventQuery", event), blocked())
        thread = threading.Thread(target=release_blocked)
        thread.start()
        for _ in range(20):
            cuda.launch(0, stream, "nap", 0)
        thread.join()
        print(set(blocked()))
        cuda.cuStreamSynchronize(stream)
        blocked()
        for call in ("cuMemcpyHtoDAsync_v2", "cuMemFree_v2"):
            hold(stream)
            thread = threading.Thread(target=release_blocked)
            thread.start()
            if call == "cuMemFree_v2":
                cuda.cuMemFree_v2(address)
            else:
                cuda.cuMemcpyHtoDAsync_v2(address, bytes_, 4096, stream)
            thread.join()
            print(blocked())
        """
    out = run(fake, text, FAKE_BLOCKED=str(tmp_path / "blocked"))
    assert out.splitlines() == [
        "600 600 []",
        "{'cuLaunchKernel main'}",
        "['cuMemcpyHtoDAsync_v2 main']",
        "['cuMemFree_v2 main']",
    ]
    lazy = run(
        fake,
        """
        stream = cuda.stream(NON_BLOCKING)
        address = cuda.alloc(4)
        hold(stream)
        threading.Thread(target=release_blocked).start()
        cuda.launch(0, stream, "fill", address, 1, 1)  # its code is loaded now: this waits
        print(open(os.environ["FAKE_BLOCKED"]).read().split())
        """,
        FAKE_BLOCKED=str(tmp_path / "lazy"),
        CUDA_MODULE_LOADING="LAZY",
    )
    assert lazy.split() == ["['cuLaunchKernel',", "'main']"]


def test_wrong_addresses_and_handles_are_errors_and_no_crash(fake: Path) -> None:
    out = run(
        fake,
        """
        address, data = cuda.alloc(4096), ctypes.create_string_buffer(4096)
        codes = [
            cuda.code("cuMemcpyHtoD_v2", address, data, 4097),
            cuda.code("cuMemcpyHtoD_v2", address, 4096, 16),
            cuda.code("cuMemcpyDtoH_v2", data, 4096, 16),
            cuda.code("cuMemsetD32_v2", address + 2, ctypes.c_uint(1), 1),
            cuda.code("cuMemFree_v2", address + 1),
            cuda.code("cuStreamSynchronize", address), cuda.code("cuEventQuery", 4096),
            cuda.code("cuModuleUnload", address), cuda.code("cuMemHostUnregister", data),
        ]
        event = cuda.event()
        cuda.cuEventDestroy_v2(event)
        junk = cuda.code("cuModuleLoadData", ctypes.byref(ctypes.c_uint64()), b"\\x01" * 64)
        codes += [cuda.code("cuEventQuery", event), junk]
        print(*codes)
        cuda.launch(0, 0, "fill", address, 1025, 1)
        print(cuda.code("cuCtxSynchronize"), cuda.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 8))
        print(cuda.code("cuDevicePrimaryCtxReset_v2", ctypes.c_int(0)), cuda.code("cuMemFree_v2", address))
        print(len(cuda.read(cuda.alloc(8), 8)))
        if not os.fork():
            os._exit(cuda.code("cuInit", 0) * 10 + cuda.code("cuCtxSynchronize"))
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    assert [line.split() for line in out.splitlines()] == [
        ["1", "1", "1", "1", "1", "400", "400", "400", "713", "400", "200"],
        ["700", "700"],
        ["0", "1"],
        ["8"],
        ["33"],
    ]


def test_contexts_are_pushed_without_a_limit(fake: Path) -> None:
    out = run(
        fake,
        """
        codes = {cuda.code("cuCtxPushCurrent_v2", cuda.contexts[i % 2]) for i in range(10_000)}
        popped = [cuda.out("cuCtxPopCurrent_v2") for _ in range(10_000)]
        print(codes, popped == [cuda.contexts[i % 2] for i in reversed(range(10_000))])
        """,
    )
    assert out == "{0} True\n"


def test_copies_of_another_devices_stream_ordered_memory_name_both_contexts(fake: Path) -> None:
    out = run(
        fake,
        """
        cuda.use(1)
        there = cuda.out("cuMemAllocAsync", 64, 0)
        cuda.use(0)
        here = cuda.alloc(64)
        print(cuda.code("cuMemcpyDtoD_v2", here, there, 64), cuda.code("cuMemcpyDtoDAsync_v2", there, here, 64, 0))
        print(cuda.code("cuMemcpyPeer", here, cuda.contexts[0], there, cuda.contexts[1], 64))
        """,
    )
    assert out == "1 1\n0\n"


def test_memory_is_made_by_parts_and_bounded(fake: Path) -> None:
    """Reserve, create, map, give access, use, unmap; and a device has so much memory and no more."""
    out = run(
        fake,
        """
        piece, made, base = 2 << 20, [], ctypes.c_uint64()
        prop = (ctypes.c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)
        access = (ctypes.c_int * 3)(1, 0, 3)
        hint = 0x300000000000
        cuda.cuMemAddressReserve(ctypes.byref(base), 1 << 40, 0, hint, 0)
        print(base.value == hint)
        for k in range(3):
            made.append(cuda.out("cuMemCreate", piece, prop, 0))
            cuda.cuMemMap(hint + k * piece, piece, 0, made[k], 0)
        print(cuda.code("cuMemsetD8_v2", hint, ctypes.c_ubyte(1), 8))
        cuda.cuMemSetAccess(hint, 3 * piece, access, 1)
        cuda.cuMemsetD8_v2(hint, ctypes.c_ubyte(5), 3 * piece)
        print(cuda.read(hint + 2 * piece - 4, 8).hex())
        print(cuda.code("cuMemsetD8_v2", hint + 1, ctypes.c_ubyte(1), 3 * piece))
        cuda.cuMemUnmap(hint, piece)
        cuda.cuMemRelease(made[0])
        print(cuda.code("cuMemcpyDtoH_v2", ctypes.create_string_buffer(4), hint, 4), cuda.read(hint + piece, 1)[0])
        print(cuda.code("cuMemCreate", ctypes.byref(base), 3 * piece, prop, 0))
        cuda.cuMemUnmap(hint + piece, 2 * piece)
        print(cuda.code("cuMemAddressFree", hint, 1 << 40))
        """,
        FAKE_MEMORY=str(8 << 20),
    )
    assert out.split() == ["True", "1", "05" * 8, "1", "1", "5", "2", "0"]


def test_output_of_kernels_comes_at_a_synchronization(fake: Path) -> None:
    """Prints as the driver's printf; an assertion loses the context and writes to stderr."""
    out = run(
        fake,
        """
        cuda.launch(0, 0, "print", 42)
        while cuda.code("cuStreamQuery", 0):
            pass
        os.write(1, b"before\\n")
        cuda.cuStreamSynchronize(0)
        module = cuda.out("cuModuleLoadData", b"//FAKE\\nkernel fail\\n")
        function = cuda.out("cuModuleGetFunction", module, b"fail")
        one = ctypes.c_uint(1)
        cuda.cuLaunchKernel(function, one, one, one, one, one, one, ctypes.c_uint(0), 0, None, None)
        os.write(1, b"%d\\n" % cuda.code("cuCtxSynchronize"))
        """,
    )
    assert out.splitlines() == ["before", "fake print 42", "710"]


PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .b8 table[48];
.visible .entry _Z3addPfiS_d(
  .param .u64 .ptr .align 4 _Z3addPfiS_d_param_0,
  .param .u32 _Z3addPfiS_d_param_1,
  .param .align 16 .b8 _Z3addPfiS_d_param_2[24],
  .param .f64 _Z3addPfiS_d_param_3
)
{
  ld.global.u32 %r1, [%rd1];
  ret;
}
"""


def test_parameters_and_globals_of_ptx(fake: Path) -> None:
    out = run(
        fake,
        f"""
        module = cuda.out("cuModuleLoadData", {PTX!r})
        function = cuda.out("cuModuleGetFunction", module, b"_Z3addPfiS_d")
        size = ctypes.c_size_t()
        for index in range(4):
            at = ctypes.c_size_t()
            cuda.cuFuncGetParamInfo(function, index, ctypes.byref(at), ctypes.byref(size))
            print(at.value, size.value)
        print(cuda.code("cuFuncGetParamInfo", function, 4, ctypes.byref(at), None))
        address = ctypes.c_uint64()
        cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"table")
        cuda.write(address.value, bytes(range(48)))
        print(size.value, cuda.read(address.value, 48)[47])
        """,
    )
    assert out.splitlines() == ["0 8", "8 4", "16 24", "40 8", "1", "48 47"]


def test_the_companion_wheel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`parts` finds the installed companion package, while the sources are the same."""
    # With ziglang, the wheel would be compiled again for an older glibc.
    monkeypatch.setattr(build, "has_ziglang", lambda: False)
    made = wheel(tmp_path / "wheels")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(made)], check=True, timeout=HANG_SECONDS)
    found = f"import sys; sys.path.insert(0, {str(site)!r}); from warpwell.driver import build\n"
    show = found + "built = build.parts(); print(built.layer, built.worker)"
    environment = os.environ | {"PATH": "/nowhere", "WARPWELL_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CC", None)

    def run_text(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=HANG_SECONDS
        )

    folder = site / "warpwell_driver"
    assert run_text(show).stdout.split() == [str(folder / "_driver.so"), str(folder / "ww_worker")]
    assert {"libcudart.so.12", "libcudart.so.13"} <= {path.name for path in folder.iterdir()}
    assert os.access(folder / "ww_worker", os.X_OK) and not (tmp_path / "cache").exists()
    (folder / "sources").write_text("others")
    without = run_text(found + "build.has_ziglang = lambda: False\nbuild.parts()")
    assert "install gcc or clang" in without.stderr and "from other sources" in without.stderr
    assert not (tmp_path / "cache").exists()


def test_a_failed_build_tells_what_the_compiler_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such option\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DriverBuildError, match="no such option"):
        build.build()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(compiler))
    with pytest.raises(DriverBuildError, match=f"cannot be built in {compiler}.*Not a directory.*WARPWELL_CACHE_DIR"):
        build.build()


def test_a_weak_driver_reads_little_pinned_memory_at_once_unless_an_event_or_the_own_stream_orders_it(
    fake: Path,
) -> None:
    """As one on an H200 does behind a host function: the legacy stream's order alone does not let it wait."""
    text = """
        import threading
        host, is_posted = ctypes.CFUNCTYPE(None, ctypes.c_void_p), threading.Event()
        (pinned, data), address, event = cuda.pinned(100_000), cuda.alloc(100_000), cuda.event()
        def writes(_):
            is_posted.wait(100)
            ctypes.memset(pinned, 9, 100_000)
        late, blocking = host(writes), cuda.stream()
        for stream, nbytes, how in ((blocking, 1000, 0), (blocking, 1000, 1), (blocking, 100_000, 0), (0, 1000, 0)):
            ctypes.memset(pinned, 1, 100_000)
            is_posted.clear()
            cuda.cuLaunchHostFunc(0, late, None)
            if how:
                cuda.cuEventRecord(event, 0)
                cuda.cuStreamWaitEvent(stream, event, ctypes.c_uint(0))
            cuda.cuMemcpyHtoDAsync_v2(address, ctypes.c_void_p(pinned), nbytes, stream)
            is_posted.set()
            cuda.cuCtxSynchronize()
            print(cuda.read(address, 1)[0])
        """
    assert run(fake, text).split() == ["9", "9", "9", "9"]
    assert run(fake, text, FAKE_WEAK="1").split() == ["1", "9", "9", "9"]


def test_who_waits_for_the_legacy_stream_waits_for_blocking_ones(fake: Path) -> None:
    out = run(
        fake,
        """
        for flags in (0, NON_BLOCKING):
            hold(cuda.stream(flags))
            print(cuda.code("cuStreamQuery", 0))
            if flags == 0:
                threading.Timer(0.05, release).start()
            cuda.cuStreamSynchronize(0)
            release()
            print(cuda.code("cuCtxSynchronize"), cuda.code("cuStreamQuery", 0))
        hold(0)
        print(cuda.code("cuStreamQuery", cuda.stream()))
        release()
        """,
    )
    assert out.split() == ["600", "0", "0", "0", "0", "0", "0"]
