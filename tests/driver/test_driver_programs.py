"""Random CUDA programs through layer, ring and worker on the fake driver equal what NumPy computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.driver import faults, natives
from tests.harness.driver.programs import LAYER
from tests.harness.until import HANG_SECONDS

from lab.driver import build
from lab.driver.serve import Servers, serve
from warpwell.driver import generate
from warpwell.driver.build import FLAGS, compiler

SECONDS = HANG_SECONDS
ROOT = Path(__file__).parents[2]


def programs(server: Servers, *arguments: str, seconds: float = SECONDS) -> str:
    """Run random programs in a process of their own; return what it says."""
    command = [sys.executable, "-m", "tests.harness.driver.programs", "--devices", "2", *arguments]
    out = subprocess.PIPE
    done = subprocess.run(
        command, env=server.environ(), cwd=ROOT, timeout=seconds, stdout=out, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


def are_right(server: Servers, seeds: range, *arguments: str) -> None:
    """Run the random programs of some seeds."""
    output = programs(server, "--seeds", f"{seeds.start}:{seeds.stop}", *arguments)
    assert output == f"{len(seeds)} programs are right\n"


def few_and_more(first: int, middle: int, end: int) -> list[Any]:
    """Return seeds for `make test`, and more for `make thorough`."""
    return [
        pytest.param(range(first, middle), id="few"),
        pytest.param(range(middle, end), id="more", marks=pytest.mark.slow),
    ]


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which the fake writes calls that waited for others; set the seed of its delays."""
    monkeypatch.setenv("FAKE_SEED", "7")
    monkeypatch.setenv("FAKE_BLOCKED", str(tmp_path / "blocked"))
    return tmp_path / "blocked"


@pytest.fixture
def tight() -> Iterator[build.Built]:
    """Return native parts with limits at which all waits for room, and most calls are parked."""
    with natives.changed(natives.TIGHT) as built:
        yield built


def waited_on_main(blocked: Path) -> list[str]:
    """Return calls of the executor that the driver let wait."""
    return [line for line in blocked.read_text().splitlines() if line.endswith(" main")] if blocked.exists() else []


@pytest.mark.parametrize("seeds", few_and_more(0, 30, 100))
def test_random_programs_are_right(seeds: range, blocked: Path) -> None:
    with serve(2, driver=build.build().fake) as server:
        are_right(server, seeds)
    assert not waited_on_main(blocked)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", few_and_more(100, 110, 250))
def test_random_programs_are_right_where_all_is_scarce(seeds: range, tight: build.Built, blocked: Path) -> None:
    with serve(2, driver=tight.fake) as server:
        are_right(server, seeds)
    assert not waited_on_main(blocked)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", few_and_more(1000, 1032, 1064))
def test_eight_threads_run_programs_side_by_side(seeds: range, blocked: Path) -> None:
    with serve(2, driver=build.build().fake) as server:
        are_right(server, seeds, "--threads", "8")
    assert not waited_on_main(blocked)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", few_and_more(1100, 1140, 1200))
def test_threads_that_hold_places_wait_for_no_others(seeds: range, tight: build.Built, blocked: Path) -> None:
    with serve(2, driver=tight.fake) as server:
        are_right(server, seeds, "--threads", "8")
    assert not waited_on_main(blocked)


@pytest.mark.parametrize(
    ("relied", "count"),
    [("", 40), pytest.param("", 400, marks=pytest.mark.slow), *((relied, 100) for relied in sorted(LAYER))],
)
def test_programs_without_workers_rely_on_cuda_alone(relied: str, count: int, tmp_path: Path) -> None:
    """The layer gives more than CUDA promises; programs that rely on it are wrong on a driver that does not."""
    fake = build.build().fake
    (tmp_path / "libcuda.so.1").symlink_to(fake)
    command = [sys.executable, "-m", "tests.harness.driver.programs", "--devices", "2", "--seeds", f"0:{count}"]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_WEAK": "1", "FAKE_SEED": "7"}
    done = subprocess.run(
        [*command, "--relies", relied], env=environ, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True
    )
    assert (done.stdout == f"{count} programs are right\n") == (not relied), done.stdout + done.stderr


READS_EARLY = """
import ctypes
from tests.harness.driver.calls import *
cuda = Cuda()
cuda.start(1)
cuda.use(0)
(pinned, data), address, other = cuda.pinned(4096), cuda.alloc(4096), cuda.alloc(4096)
for first, second in ((0, cuda.stream()), (0, PER_THREAD), (cuda.stream(), 0), (PER_THREAD, 0)):
    data[:] = bytes([1]) * 4096
    cuda.cuMemsetD8_v2(other, ctypes.c_ubyte(9), 4096)
    cuda.cuCtxSynchronize()
    cuda.launch(0, first, "nap", 20_000)
    cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(pinned), other, 4096, first)
    cuda.cuMemcpyHtoDAsync_v2(address, ctypes.c_void_p(pinned), 4096, second)
    cuda.cuCtxSynchronize()
    print(cuda.read(address, 4096) == bytes([9]) * 4096)
"""


def test_a_driver_that_reads_pinned_memory_early_does_so_in_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WEAK", "1")
    with serve(1, driver=build.build().fake) as server:
        command = [sys.executable, "-c", READS_EARLY]
        done = subprocess.run(
            command, env=server.environ(), cwd=ROOT, timeout=SECONDS, stdout=subprocess.PIPE, text=True
        )
    assert done.stdout.split() == 4 * ["True"]


COPIES_IN_PARTS = """
import ctypes
from tests.harness.driver.calls import *
from tests.harness.driver.capture_checks import *
cuda = Cuda()
cuda.start(1)
cuda.use(0)
ran = []
run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ran.append(True))
stream, nbytes = cuda.stream(NON_BLOCKING), 1 << 20
address, data = cuda.alloc(nbytes), bytes(range(256)) * (nbytes >> 8)
begin(cuda, stream)
cuda.cuLaunchHostFunc(stream, run, None)
cuda.cuMemcpyHtoDAsync_v2(address, data, nbytes, stream)
graph = end(cuda, stream)
launch(cuda, graph, stream, 3)
print(len(ran), cuda.read(address, nbytes) == data)
"""


def test_a_graph_copies_in_parts_behind_a_host_function(tight: build.Built) -> None:
    with serve(1, driver=tight.fake) as server:
        command = [sys.executable, "-c", COPIES_IN_PARTS]
        done = subprocess.run(
            command, env=server.environ(), cwd=ROOT, timeout=SECONDS, stdout=subprocess.PIPE, text=True
        )
    assert done.stdout == "3 True\n"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_planted_faults_apply_and_compile(tmp_path: Path, compiled: bool) -> None:
    for name, text in generate.sources().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "gen_fake.c").write_text(build.generated_source())
    for path in [*generate.NATIVE.glob("*.[ch]"), *build.SOURCES.glob("*.[ch]")]:
        tight = natives.edit(path.read_text(), natives.TIGHT.get(path.name, {}), path.name)
        (tmp_path / path.name).write_text(tight)
    files = []
    for number, (fault, changes) in enumerate(faults.every()):
        for name, pairs in changes.items():
            files.append(tmp_path / f"{number}_{name}")
            files[-1].write_text(natives.edit((tmp_path / name).read_text(), pairs, f"{fault}: {name}"))
    if not compiled:
        return
    line = [*compiler(), *FLAGS, "-Werror", "-fsyntax-only", f"-I{tmp_path}", *map(str, files)]
    done = subprocess.run(line, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert not done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.PLANTED)
def test_planted_faults_are_found(fault: str, blocked: Path) -> None:
    with natives.changed(natives.merged(natives.TIGHT, faults.PLANTED[fault])) as planted:
        with serve(2, driver=planted.fake) as server:
            try:
                assert programs(server, "--seeds", "100:900", seconds=40) != "800 programs are right\n"
            except subprocess.TimeoutExpired:
                pass  # some planted faults let calls wait forever
