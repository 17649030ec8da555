"""Pieces of the driver layer that need no worker: lengths of images, ranges of addresses, handles, ids, refusals."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import serve
from warpwell.driver import generate
from warpwell.driver.build import compiler

_STUB = """
#include "layer.h"
struct ww_layer layer;
struct ww_device *ww_current(void) { return &layer.devices[0]; }
struct ww_device *device(int i) { return &layer.devices[i]; }
struct ww_ranges *ranges(int i) { return &layer.devices[i].ranges; }
struct ww_ids *streams(int i) { return &layer.devices[i].streams; }
int index_of(struct ww_device *d) { return d ? (int)(d - layer.devices) : -1; }
void new_life(int i) { layer.devices[i].life++; ww_ids_clear(&layer.devices[i]); }
__attribute__((constructor)) static void begin(void)
{
    layer.ndevices = 2;
    for (int i = 0; i < 2; i++) {
        pthread_mutex_init(&layer.devices[i].ranges.lock, NULL);
        ww_ids_clear(&layer.devices[i]);
    }
}
"""
_INVALID_IMAGE, _INVALID_HANDLE, _OUT_OF_MEMORY, _ALREADY_MAPPED, _DESTROYED = 200, 400, 2, 208, 709
_IMAGE_MOST = 1 << 30
_STREAM, _EVENT = 0x5757A1, 0x5757A2
_OBJECT_BYTES = 64


class Span(ctypes.Structure):
    """A range of addresses."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("serial", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("users", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile three files of the layer with all names visible."""
    folder = tmp_path_factory.mktemp("pieces")
    for name, text in generate.sources().items():
        (folder / name).write_text(text)
    (folder / "stub.c").write_text(_STUB)
    files = [str(generate.NATIVE / f"layer_{name}.c") for name in ("image", "object", "range")]
    line = [*compiler(), "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread"]
    line += [f"-I{generate.NATIVE}", f"-I{folder}", *files, str(folder / "stub.c"), "-o", str(folder / "pieces.so")]
    subprocess.run(line, check=True, timeout=HANG_SECONDS)
    library = ctypes.CDLL(str(folder / "pieces.so"))
    for name in ("device", "ranges", "streams", "ww_object_new", "ww_object", "ww_range_owner"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("ww_range_take", "ww_range_find"):
        getattr(library, name).restype = ctypes.c_bool
    return library


# -- images --------------------------------------------------------------------------------------------------------


class Hostile:
    """Readable zeros behind an image, which the reader may reach by following its checked lengths."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, _IMAGE_MOST + (8 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def length(self, pieces: ctypes.CDLL, image: bytes, max_bytes: int = _IMAGE_MOST) -> tuple[int, int, int]:
        """Return code, offset of the image's start, and length."""
        self.map[: len(image)] = image
        self.map[len(image) : len(image) + 8] = bytes(8)
        start, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        readable, out = ctypes.c_size_t(max_bytes), (ctypes.byref(start), ctypes.byref(nbytes))
        code = pieces.ww_image_length(ctypes.c_void_p(self.address), readable, *out)
        return code, (start.value or 0) - self.address, nbytes.value


@pytest.fixture(scope="module")
def hostile() -> Hostile:
    return Hostile()


def _elf(sections: list[tuple[int, int, int]], segments: list[tuple[int, int]]) -> bytes:
    """Make the headers of an ELF file: (type, offset, size) of sections, (offset, size) of segments."""
    at = 64 + 56 * len(segments)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 64, at, 0, 64, 56, len(segments), 64, len(sections), 0)
    )
    head += b"".join(struct.pack("<IIQQQQQQ", 1, 5, offset, 0, 0, size, size, 1) for offset, size in segments)
    return head + b"".join(struct.pack("<IIQQQQIIQQ", 0, k, 0, 0, o, n, 0, 0, 1, 0) for k, o, n in sections)


def test_lengths_of_images(pieces: ctypes.CDLL, hostile: Hostile) -> None:
    def of(image: bytes) -> tuple[int, int, int]:
        return hostile.length(pieces, image)

    python = Path(sys.executable).resolve().read_bytes()
    assert of(python)[:2] == (0, 0) and of(python)[2] <= len(python)
    two = _elf([(1, 0x300, 0x40), (8, 0x500, 1 << 40)], [(0x200, 0x80)])
    assert of(two) == (0, 0, 0x340), "a section without bytes in the file does not count"
    assert of(_elf([(1, 0x300, 0x40)], [(0x200, 0x800)])) == (0, 0, 0xA00)
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 100)
    assert of(fat) == (0, 0, 116)
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, hostile.address + 64, 0)
    assert of(wrapper.ljust(64, b"\0") + fat) == (0, 64, 116)
    assert of(b".version 8.0\n") == (0, 0, 14)
    assert of(b"a") == (0, 0, 2)
    assert of(b"\n\t//") == (0, 0, 5)


def test_a_file_that_was_cut_is_refused(pieces: ctypes.CDLL, hostile: Hostile) -> None:
    elf = _elf([(1, 0x300, 0x40), (1, 0x340, 0x10)], [(0x200, 0x80)]).ljust(0x350, b"\0")
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 100).ljust(116, b"\0")
    text = b".version 8.0\n\0"
    for image in (elf, fat, text):
        assert hostile.length(pieces, image, len(image))[::2] == (0, len(image))
        for cut in range(1, len(image)):
            assert hostile.length(pieces, image[:cut], cut)[0] == _INVALID_IMAGE, cut
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, hostile.address + 64, 0).ljust(64, b"\0") + fat
    assert hostile.length(pieces, wrapper, len(wrapper))[0] == _INVALID_IMAGE, "an address in a file"


def test_wrong_images_are_refused(pieces: ctypes.CDLL, hostile: Hostile) -> None:
    wrong = [
        b"",
        b"\x01\x02\x03\x04",
        b"\xed\x43\x4e\x7f junk of an intermediate form",
        struct.pack("<IHHQ", 0xBA55ED50, 1, 8, 100),  # a header size of 8 bytes, less than the 16 of the header itself
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 63),
        struct.pack("<IIQQ", 0x466243B1, 2, hostile.address + 64, 0),
        struct.pack("<IIQQ", 0x466243B1, 1, hostile.address + 64, 0).ljust(64, b"\0") + b".version 8.0",
        _elf([(1, 0x300, 1 << 62)], []),
        _elf([(1, (1 << 64) - 16, 32)], []),
        _elf([], [(1 << 63, 1 << 63)]),
        b"\x7fELF\x01\x01\x01" + bytes(64),  # 32 bits
        _elf([(1, 0x300, 8)], [])[:58] + b"\x20" + _elf([(1, 0x300, 8)], [])[59:],  # sections of another size
    ]
    for image in wrong:
        assert hostile.length(pieces, image)[0] == _INVALID_IMAGE, image


@settings(max_examples=examples(400), deadline=None)
@given(
    sections=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=6),
)
def test_no_length_of_an_elf_file_leads_out_of_bounds(
    pieces: ctypes.CDLL, hostile: Hostile, sections: list[tuple[int, int, int]], cuts: list[tuple[int, int]]
) -> None:
    image = bytearray(_elf(sections, [(0x200, 0x80)]))
    for at, value in cuts:
        image[at % len(image)] = value  # a read beyond the mapped image would raise SIGSEGV
    code, _, nbytes = hostile.length(pieces, bytes(image))
    assert code == _INVALID_IMAGE or (code == 0 and 0 < nbytes <= _IMAGE_MOST)


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_ranges_are_as_a_model(pieces: ctypes.CDLL, seed: int) -> None:
    rng, model = random.Random(seed), dict[int, int]()
    table, found = ctypes.c_void_p(pieces.ranges(0)), Span()
    for _ in range(3000):
        start, size = rng.randrange(1, 2000), rng.randrange(1, 40)
        address = ctypes.c_uint64(start)
        meets = [s for s, n in model.items() if s < start + size and start < s + n]
        if rng.random() < 0.5:
            code = pieces.ww_range_add(table, address, ctypes.c_uint64(size), 1, 7, None)
            assert code == (_ALREADY_MAPPED if meets else 0)
            if not meets:
                model[start] = size
        elif rng.random() < 0.6 and model:
            start = rng.choice([*model, start])
            is_found = pieces.ww_range_take(table, ctypes.c_uint64(start), 1, ctypes.byref(found))
            assert is_found == (start in model) and (not is_found or (found.size, found.flags) == (model.pop(start), 7))
        holder = [s for s, n in model.items() if s <= start < s + n]
        assert pieces.ww_range_find(table, ctypes.c_uint64(start), ctypes.byref(found)) == bool(holder)
        assert not holder or found.start == holder[0]
    for start in list(model):
        assert not pieces.ww_range_take(table, ctypes.c_uint64(start), 2, ctypes.byref(found)), "of another kind"
        assert pieces.ww_range_take(table, ctypes.c_uint64(start), 1, ctypes.byref(found))
    assert pieces.ww_range_add(table, ctypes.c_uint64(2**64 - 8), ctypes.c_uint64(16), 1, 0, None) != 0, "wraps around"


def test_an_address_of_two_devices_is_the_current_ones(pieces: ctypes.CDLL) -> None:
    found, address, size = Span(), ctypes.c_uint64(5000), ctypes.c_uint64(8)
    for i in (1, 0):
        assert pieces.ww_range_add(ctypes.c_void_p(pieces.ranges(i)), address, size, 2, i, None) == 0
        owner = ctypes.c_void_p(pieces.ww_range_owner(address, ctypes.byref(found)))
        assert pieces.index_of(owner) == i and found.flags == i
    assert not pieces.ww_range_owner(ctypes.c_uint64(5008), ctypes.byref(found))
    for i in (1, 0):
        assert pieces.ww_range_take(ctypes.c_void_p(pieces.ranges(i)), address, 2, ctypes.byref(found))


# -- handles, ids --------------------------------------------------------------------------------------------------


def test_made_up_and_stale_handles_are_found_out(pieces: ctypes.CDLL) -> None:
    was = ctypes.create_string_buffer(128)
    device = ctypes.c_void_p(pieces.device(0))

    def look(handle: int, kind: int = _STREAM) -> bool:
        return bool(pieces.ww_object(ctypes.c_void_p(handle), kind))

    def drop(handle: int, kind: int = _STREAM) -> int:
        return pieces.ww_object_drop(ctypes.c_void_p(handle), kind, was)

    made = [pieces.ww_object_new(_STREAM, device) for _ in range(50)]
    assert all(map(look, made)) and len(set(made)) == 50
    assert made[1] - made[0] == _OBJECT_BYTES
    low, high = min(made), max(made)
    around = [low - _OBJECT_BYTES, low + 1, low + 8, high + _OBJECT_BYTES, 0, 1, 2, 3, 2**64 - 1, id(device)]
    assert not any(map(look, around)) and not any(look(handle, _EVENT) for handle in made)
    assert drop(made[0], _EVENT) == _INVALID_HANDLE and drop(made[0]) == 0 and drop(made[0]) == _INVALID_HANDLE
    assert pieces.ww_object_new(_EVENT, device) not in made, "an address does not come back at once"
    pieces.new_life(0)
    assert not any(map(look, made)) and drop(made[1]) == _DESTROYED and drop(made[1]) == _INVALID_HANDLE


def test_ids_come_back_in_order_and_end(pieces: ctypes.CDLL) -> None:
    device, ids, out = ctypes.c_void_p(pieces.device(1)), ctypes.c_void_p(pieces.streams(1)), ctypes.c_uint32()
    life = ctypes.c_uint64(0)

    def take() -> int | None:
        return out.value if pieces.ww_id_take(ids, ctypes.byref(out)) == 0 else None

    allocated = []
    while (allocated_id := take()) is not None:
        allocated.append(allocated_id)
    assert allocated == list(range(16, 65536))
    free = deque(random.Random(1).sample(allocated, 3000))
    for allocated_id in free:
        pieces.ww_id_give(device, ids, life, allocated_id)
    for _ in range(7000):
        allocated_id = free.popleft()
        assert take() == allocated_id
        pieces.ww_id_give(device, ids, life, allocated_id)
        free.append(allocated_id)
    pieces.ww_id_give(device, ids, ctypes.c_uint64(5), 16)  # an id from another life of the device is not taken back
    assert [take() for _ in range(3001)] == [*free, None]


# -- without a server -------------------------------------------------------------------------------------------------

_ALONE = """
import ctypes, os, sys
L = ctypes.CDLL(sys.argv[1])
n = ctypes.c_int(7)
assert L.cuDeviceGetCount(ctypes.byref(n)) == 3 and L.cuCtxSynchronize() == 3
assert L.cuInit(1) == 1 and L.cuInit(0) == int(sys.argv[2]) and L.cuInit(0) == int(sys.argv[2])
f, status = ctypes.c_void_p(), ctypes.c_int()
def find(name, version, flags=0):
    code = L.cuGetProcAddress_v2(name, ctypes.byref(f), version, ctypes.c_uint64(flags), ctypes.byref(status))
    return code, status.value, f.value
def address(name):
    return ctypes.cast(getattr(L, name), ctypes.c_void_p).value
assert find(b"cuMemAlloc", 13000) == (0, 0, address("cuMemAlloc_v2"))
assert find(b"cuMemAlloc", 2000) == (0, 0, address("cuMemAlloc"))
assert find(b"cuMemAlloc", 1000) == (500, 2, None) and find(b"cuNothing", 13000) == (500, 1, None)
assert find(b"cuMemcpyHtoD", 13000, 1) == (0, 0, address("cuMemcpyHtoD_v2"))
assert find(b"cuMemcpyHtoD", 13000, 2) == (0, 0, address("cuMemcpyHtoD_v2_ptds"))
assert find(b"cuMemcpyHtoD", 6000, 2) == (0, 0, address("cuMemcpyHtoD_v2"))
name = ctypes.c_char_p()
assert L.cuGetErrorName(700, ctypes.byref(name)) == 0 and name.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
assert L.cuGetErrorName(12345, ctypes.byref(name)) == 1 and name.value is None
assert [L.cuTexObjectCreate(0, 0, 0, 0), L.cuIpcGetMemHandle(0, 0), L.cuIpcGetMemHandle(0, 0)] == [801] * 3
assert L.cuGetExportTable(ctypes.byref(f), b"0" * 16) == 500 and f.value is None
if os.fork() == 0:  # before cuInit has found a device: a child starts from the beginning
    os._exit(L.cuInit(0) != int(sys.argv[2]))
assert os.wait()[1] == 0
"""


def test_a_program_without_a_server(tmp_path: Path) -> None:
    layer = build.build().layer
    environ = {k: v for k, v in os.environ.items() if k not in ("WARPWELL_CUDA", "CUDA_VISIBLE_DEVICES")}
    environ["WARPWELL_CUDA_REFUSED"] = str(tmp_path / "refused")

    def run_program(code: int, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, str(layer), str(code)],
            env=environ | more,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    output = run_program(100)
    assert sum("WARPWELL_CUDA is not set" in line for line in output) == 2  # once in each process
    assert [line for line in output if "not served" in line] == [
        f"warpwell: {name} is not served on pooled GPUs: CUDA_ERROR_NOT_SUPPORTED"
        for name in ("cuTexObjectCreate", "cuIpcGetMemHandle")
    ]
    assert sum("has NVIDIA's CUDA runtime linked in" in line for line in output) == 1
    names = (tmp_path / "refused").read_text().split()
    assert names == ["cuTexObjectCreate", "cuIpcGetMemHandle", "cuGetExportTable"]
    assert not any("WARPWELL_CUDA" in line for line in run_program(100, WARPWELL_CUDA=str(tmp_path)))


_RUNTIME = """
int cuGetExportTable(const void **table, const void *id);
int ask(void)
{
    const void *table = &table;
    int code = cuGetExportTable(&table, "0123456789abcde");
    return table ? -1 : code;
}
"""
_ASKS = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
print([ctypes.CDLL(path).ask() for path in sys.argv[2:]], flush=True)
"""


def test_a_library_with_nvidias_runtime_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "runtime.c").write_text(_RUNTIME)
    for folder in ("cuda/bindings", "cupy", "torch"):
        (tmp_path / folder).mkdir(parents=True)
        library = tmp_path / folder / "libruntime.so"
        subprocess.run([*compiler(), "-shared", "-fPIC", str(tmp_path / "runtime.c"), "-o", str(library)], check=True)
    linker = tmp_path / "libnvJitLink.so.13"  # NVIDIA's library of this name works without the private tables
    linker.symlink_to(library)

    def run(*folders: str, **environ: str) -> tuple[int, str, str]:
        libraries = [str(tmp_path / folder / "libruntime.so") if folder else str(linker) for folder in folders]
        command = [sys.executable, "-c", _ASKS, str(build.build().layer), *libraries]
        done = subprocess.run(
            command, env=os.environ | environ, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        return done.returncode, done.stdout, done.stderr

    line = (
        "warpwell: libruntime.so has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver "
        "library. Use `--cuda local` for this machine's GPUs.\n"
    )
    assert run("cuda/bindings", WARPWELL_CUDA_EXIT="1") == (0, "[500]\n", "")
    assert run("", WARPWELL_CUDA_EXIT="1") == (0, "[500]\n", "")
    assert run("cuda/bindings", "cupy", "torch") == (0, "[500, 500, 500]\n", line)
    assert run("cupy", WARPWELL_CUDA_EXIT="1") == (1, "", line)


# -- host functions ---------------------------------------------------------------------------------------------------


def runs(program: str) -> None:
    """Run a program on a fake device; it asserts by itself."""
    with serve(1, driver=build.build().fake) as server:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=server.environ(),
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr


_HOST = """
import ctypes, os, threading, time
L = ctypes.CDLL("libcuda.so.1")
vp, u32, u64, by = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.byref
def ok(code): assert code == 0, code
ok(L.cuInit(0)); context = vp(); ok(L.cuDevicePrimaryCtxRetain(by(context), 0)); ok(L.cuCtxSetCurrent(context))
image = b"//FAKE\\nkernel fault\\nkernel fill 8 8 4\\nkernel flag 8 4\\n"
def made(call, *args):
    out = vp(); ok(call(by(out), *args)); return out
def functions(*names):
    module = made(L.cuModuleLoadData, image)
    return [made(L.cuModuleGetFunction, module, name) for name in names]
def launch(function, *args, stream=None):
    values = (vp * len(args))(*[ctypes.cast(by(a), vp) for a in args])
    return L.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, None)
Function, Callback = ctypes.CFUNCTYPE(None, vp), ctypes.CFUNCTYPE(None, vp, ctypes.c_int, vp)
fill, fault, flag = functions(b"fill", b"fault", b"flag")
host = made(L.cuMemHostAlloc, ctypes.c_size_t(4096), 0); word = u32.from_address(host.value)
hold = vp(host.value + 64); held_word = u32.from_address(hold.value)  # a stream waits until it is 7
free, blocking = made(L.cuStreamCreate, 1), made(L.cuStreamCreate, 0)
log = []

@Function
def one(x):
    log.append((1, x, word.value, L.cuCtxSynchronize(), L.cuStreamQuery(free))); time.sleep(0.05); word.value = 77
@Function
def two(x): log.append((2, x, word.value))
@Callback
def three(stream, code, x): log.append((3, stream == free.value, code, x))

for _ in range(3):  # behind what was posted before, in order, and before what is posted behind
    log.clear()
    held_word.value = 0
    ok(launch(flag, hold, u32(7), stream=free)); ok(launch(fill, host, u64(1), u32(5), stream=free))
    ok(L.cuLaunchHostFunc(free, one, vp(11))); ok(L.cuLaunchHostFunc(free, two, vp(12)))
    ok(L.cuStreamAddCallback(free, three, vp(13), 0))
    assert L.cuStreamQuery(free) == 600
    held_word.value = 7
    ok(launch(fill, host, u64(1), u32(9), stream=free)); ok(L.cuStreamSynchronize(free))
    assert log == [(1, 11, 5, 800, 800), (2, 12, 77), (3, True, 0, 13)] and word.value == 9, log

go, ran = threading.Event(), []
@Function
def waits(x): go.wait(100); ran.append(x)
def held(stream, x):
    go.clear(); ok(L.cuLaunchHostFunc(stream, waits, vp(x)))
def soon(): threading.Timer(0.2, go.set).start()
fills = lambda stream: launch(fill, host, u64(1), u32(1), stream=stream)
held(blocking, 1); ok(fills(free)); assert ran == []; soon(); ok(fills(None)); assert ran == [1]
held(free, 2); ok(fills(None)); ok(fills(blocking)); assert ran == [1]
soon(); ok(L.cuCtxSynchronize()); assert ran == [1, 2]
held(None, 3); ok(fills(free)); assert ran == [1, 2]; soon(); ok(fills(blocking)); assert ran == [1, 2, 3]

codes = []
@Callback
def code(stream, result, x): codes.append(result)
@Function
def never(x): codes.append("ran")
held_word.value = 0
ok(launch(flag, hold, u32(7), stream=free)); ok(launch(fault, stream=free))
ok(L.cuLaunchHostFunc(free, never, None)); ok(L.cuStreamAddCallback(free, code, None, 0))
held_word.value = 7
assert L.cuStreamSynchronize(free) == 700
ok(L.cuDevicePrimaryCtxReset_v2(0))
free, (flag,) = made(L.cuStreamCreate, 1), functions(b"flag")
host = made(L.cuMemHostAlloc, ctypes.c_size_t(4096), 0); ctypes.memset(host, 0, 4096)
ok(launch(flag, host, u32(7), stream=free))  # never ends
ok(L.cuLaunchHostFunc(free, never, None)); ok(L.cuStreamAddCallback(free, code, None, 0))
ok(L.cuDevicePrimaryCtxReset_v2(0))
until = time.monotonic() + 100
while len(codes) < 2 and time.monotonic() < until: time.sleep(0.01)
assert codes == [700, 709], codes
until = time.monotonic() + 100
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until: time.sleep(0.05)
assert len(os.listdir("/proc/self/task")) == 1  # the thread of host functions ends
"""


_BOUNDS = """
import ctypes
L = ctypes.CDLL("libcuda.so.1")
vp, by = ctypes.c_void_p, ctypes.byref
def ok(code): assert code == 0, code
ok(L.cuInit(0)); context = vp(); ok(L.cuDevicePrimaryCtxRetain(by(context), 0)); ok(L.cuCtxSetCurrent(context))
module, few, large = vp(), vp(), vp()
text = b".version 8.0\\n.target sm_90\\n"
text += b".entry few() .maxntid 128, 1, 1 { ret; }\\n.entry large() .maxnreg 255 { ret; }\\n"
ok(L.cuModuleLoadData(by(module), text))
ok(L.cuModuleGetFunction(by(few), module, b"few")); ok(L.cuModuleGetFunction(by(large), module, b"large"))
def launch(function, threads): return L.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, None, None, None)
assert [launch(few, 128), launch(few, 129), launch(large, 256), launch(large, 257)] == [0, 1, 0, 701]
ok(L.cuCtxSynchronize())
"""

_CLUSTERS = """
import ctypes
L = ctypes.CDLL("libcuda.so.1")
vp, by = ctypes.c_void_p, ctypes.byref
class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]
class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", vp),
                ("attributes", vp), ("n", ctypes.c_uint)]
def ok(code): assert code == 0, code
ok(L.cuInit(0)); context = vp(); ok(L.cuDevicePrimaryCtxRetain(by(context), 0)); ok(L.cuCtxSetCurrent(context))
library, kernel, function, n, size = vp(), vp(), vp(), ctypes.c_int(), ctypes.c_size_t()
text = b".version 8.0\\n.target sm_90\\n.entry k(.param .u32 a) { ret; }\\n"
ok(L.cuLibraryLoadData(by(library), text, 0, 0, 0, 0, 0, 0))
ok(L.cuLibraryGetKernel(by(kernel), library, b"k")); ok(L.cuKernelGetFunction(by(function), kernel))
def ask(call, which, threads, cluster):
    attributes = (Attribute * 1)(Attribute(4, 0, (cluster, 1, 1)))
    config = Config((64, 1, 1), (threads, 1, 1), 0, None, ctypes.cast(attributes, vp), bool(cluster))
    return call(by(n), which, by(config)) or -n.value
for which in (function, kernel):  # a kernel stands for its function on the current device
    found = [ask(L.cuOccupancyMaxActiveClusters, which, 32, c) for c in (0, 2, 4, 16)]
    assert found == [-64, -32, -16, 0], found
    assert [ask(L.cuOccupancyMaxPotentialClusterSize, which, t, 0) for t in (32, 1024)] == [-8, -4]
assert L.cuOccupancyMaxActiveClusters(None, function, by(Config())) == 1
assert L.cuOccupancyMaxActiveClusters(by(n), function, None) == 1
assert L.cuOccupancyMaxActiveClusters(by(n), vp(8), by(Config())) == 400
ok(L.cuKernelGetParamInfo(kernel, ctypes.c_size_t(0), by(size), by(size)))
ok(L.cuCtxSetCurrent(None))
assert L.cuKernelGetParamInfo(kernel, ctypes.c_size_t(0), by(size), by(size)) == 201
"""


def test_a_block_that_is_too_large_gets_the_drivers_own_codes() -> None:
    runs(_BOUNDS)


def test_the_driver_tells_of_clusters() -> None:
    runs(_CLUSTERS)


def test_host_functions_keep_their_place_in_their_stream() -> None:
    runs(_HOST)


# -- copies ------------------------------------------------------------------------------------------------------------

_COPIES = """
import ctypes, os
L = ctypes.CDLL("libcuda.so.1")
vp, u64, size, by = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
def ok(code): assert code == 0, code
ok(L.cuInit(0)); context = vp(); ok(L.cuDevicePrimaryCtxRetain(by(context), 0)); ok(L.cuCtxSetCurrent(context))
n = (9 << 20) + 77
device = u64(); ok(L.cuMemAlloc_v2(by(device), size(n)))
given = os.urandom(n); ok(L.cuMemcpyHtoD_v2(device, given, size(n)))
room = ctypes.create_string_buffer(n + 256); at = ctypes.addressof(room)
for skip, first, count in ((0, 0, n), (1, 3, n - 5), (63, 64, n - 64), (17, 1, 8 << 20), (5, 5, (8 << 20) + 1)):
    ctypes.memset(room, 0xEE, n + 256)
    ok(L.cuMemcpyDtoH_v2(vp(at + skip), u64(device.value + first), size(count)))
    want = b"\\xee" * skip + given[first : first + count]
    assert room.raw == want.ljust(n + 256, b"\\xee") + room.raw[n + 256 :]

# A synchronous copy on a busy legacy stream is seen by streams that do not order themselves behind that one.
module, nap, free = vp(), vp(), [vp(), vp()]
ok(L.cuModuleLoadData(by(module), b"//FAKE\\nkernel nap 4\\n"))
ok(L.cuModuleGetFunction(by(nap), module, b"nap"))
us = ctypes.c_uint32(60000)
values = (vp * 1)(ctypes.cast(by(us), vp))
ok(L.cuStreamCreate(by(free[0]), 1))
for i, count in enumerate((16, 16, 40000, 2 << 20)):
    if i == 1:
        ok(L.cuStreamCreate(by(free[1]), 1))  # copies before a stream was made count, too
    ok(L.cuLaunchKernel(nap, 1, 1, 1, 1, 1, 1, 0, None, values, None))
    given = os.urandom(count); ok(L.cuMemcpyHtoD_v2(device, given, size(count)))
    for stream in free[: i + 1]:
        ok(L.cuMemcpyDtoHAsync_v2(room, device, size(count), stream))
        assert room.raw[:count] == given, (i, count)
    ok(L.cuLaunchKernel(nap, 1, 1, 1, 1, 1, 1, 0, None, values, None))
    ok(L.cuMemsetD8_v2(device, 7, size(count)))
    ok(L.cuMemcpyDtoHAsync_v2(room, device, size(count), free[i > 0]))
    assert room.raw[:count] == bytes([7]) * count
"""


def test_copies_to_the_host_are_whole_and_see_synchronous_ones_before_them() -> None:
    runs(_COPIES)
