"""Launches in processes of their own: the first action of a program, Ctrl-C, forks; and refused arguments."""

import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import errors, gpu
from warpwell.targets.compiler import run_cpu


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program, which must end by itself and well, and return what it printed."""
    script = folder / "program.py"  # a file, because interactive code is not cached on disk
    script.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


FIRST = """
    import sys
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def ask(x):
        i = ww.gpu.grid(1)
        if ww.gpu.failed():
            return
        x[i] = 1

    x = np.zeros(4)
    if sys.argv[1] == "scheduler":
        with ww.scheduler.Scheduler() as scheduler:
            scheduler.submit(ask[4], x).result()
    elif sys.argv[1] == "pool":
        with ww.devices()[0]:
            ask[4](x)
            ww.devices()[0].synchronize()
    else:
        ask[4](x, device=sys.argv[1])
    print(x.tolist())
"""


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("where", ["cpu", "interp", "scheduler", "pool"])
def test_failed_may_be_the_first_thing_that_a_process_asks(tmp_path: Path, where: str) -> None:
    assert run(tmp_path, FIRST, where) == "[1.0, 1.0, 1.0, 1.0]\n"


STUCK = """
    import os, signal, threading, time
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def spin(x, begun):
        begun[ww.gpu.grid(1)] = 1
        while x[0] == 0:
            if ww.gpu.failed():
                x[1 + ww.gpu.grid(1)] += 1
                return

    stuck, other = np.zeros(5, np.int64), np.zeros(5, np.int64)
    begun = np.zeros(4, np.int64)
    def interrupt():
        while not begun.all():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    spin[1](np.ones(1, np.int64), begun.copy())  # compiled now, so the interrupt comes in the middle of the launch
    other_launch = threading.Thread(target=lambda: spin[4](other, np.zeros(4, np.int64)))
    other_launch.start()
    threading.Thread(target=interrupt).start()
    try:
        spin[4](stuck, begun)
    except KeyboardInterrupt:
        print("interrupted", stuck.tolist())
    print("other", other.tolist())
    other[0] = 1
    other_launch.join()
    print("other", other.tolist())
"""


def test_ctrl_c_ends_a_loop_that_asks_and_that_of_no_other_launch(tmp_path: Path) -> None:
    assert run(tmp_path, STUCK).splitlines() == [
        "interrupted [0, 1, 1, 1, 1]",
        "other [0, 0, 0, 0, 0]",
        "other [1, 0, 0, 0, 0]",
    ]


LATER = """
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def total(x, out):
        i = ww.gpu.grid(1)
        ww.gpu.atomic_add(out, 0, x[i])

    out = np.zeros(1)
    total[9](np.ones(9), out)
    np.save("a.npy", np.ones(9))
    with ww.open("a.npy", cache="64KiB") as a:  # imports what its items are read by
        total[9](a, out)
    print(out[0])
"""


def test_code_from_the_disk_finds_what_was_imported_after_the_first_launch(tmp_path: Path) -> None:
    for _ in range(2):  # first compiled, then loaded from disk
        assert run(tmp_path, LATER) == "18.0\n"


# -- refused arguments --------------------------------------------------------------------------------------------


@gpu.function
def row_and_column():
    return gpu.grid(2)


@ww.kernel
def flat(x):
    x[gpu.grid(1)] = 1


@ww.kernel
def plane(x):
    i, j = row_and_column()
    x[i + j] = 1


@ww.kernel
def nowhere(x):
    x[0] += 1


@ww.kernel(block=32)
def tiles(x):
    x[gpu.block_index()] = 1


@ww.kernel
def three(x, n, more=1):
    x[gpu.grid(1)] = n + more


LAUNCHES = [
    (flat[2, 32], r"'flat' asks grid\(1\) .* in a launch of shape \(2, 32\): launch over one extent, or ask grid\(2\)"),
    (flat[2, 2, 2], r"or ask grid\(3\)"),
    (plane[4], r"'plane' asks grid\(2\) \(.*test_launches.py, line \d+\).*: launch over two extents, or ask grid\(1\)"),
    (plane[4, 1, 1], r"launch over two extents"),
    (tiles[2, 32], r"of a block kernel: pass one number, of blocks"),
]


@pytest.mark.parametrize("device", ["cpu", "interp", "pool", "scheduler"])
@pytest.mark.parametrize(("launch", "message"), LAUNCHES)
def test_an_index_is_asked_for_in_the_extents_of_the_launch(launch: Any, message: str, device: str) -> None:
    x = np.zeros(4)
    with pytest.raises(errors.ArgumentError, match=message):
        if device == "pool":
            with ww.devices()[0]:
                launch(x)
        elif device == "scheduler":
            launch.cut((x,), "cpu")
        else:
            launch(x, device=device)
    assert not x.any()


def test_launches_that_fit() -> None:
    x = np.zeros(64)
    flat[64](x, device="cpu")
    plane[8, 8](x, device="cpu")
    nowhere[2, 1, 2](x, device="interp")
    assert x.tolist() == [5.0] + [1.0] * 63
    flat[0, 3](x, device="cpu")
    three[4](x, 2, device="cpu")
    three[2](x, 2, 2, device="cpu")
    assert x[:5].tolist() == [4, 4, 3, 3, 1]


def test_extents_that_a_launch_has_not_are_one() -> None:
    """Code that asks for them, and could not be seen to, gets index 0 and no division by 0."""
    x = np.full(4, -1)
    mixed = ww.kernel(either)
    mixed.checked.add((1, 1))
    mixed[4](x, device="cpu")
    assert x.tolist() == [0, 0, 0, 0]


def either(x):
    i, j, k = gpu.grid(3)
    x[i] = j + k


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_arguments_that_cannot_be(device: str) -> None:
    x = np.zeros(4)
    with pytest.raises(errors.ArgumentError, match=r"'flat' takes 1 argument \(x\), not 2"):
        flat[4](x, 1, device=device)
    with pytest.raises(errors.ArgumentError, match=r"'three' takes 2 to 3 arguments \(x, n, more\), not 1"):
        three[4](x, device=device)
    with pytest.raises(errors.ArgumentError, match=r"positional arguments only, not arguments by name \(y=\)"):
        flat[4](y=x, device=device)
    with pytest.raises(errors.ArgumentError, match=r"'x' of kernel 'flat' is a list, .* convert it"):
        flat[4]([1.0, 2.0, 3.0, 4.0], device=device)


@pytest.mark.parametrize("dtype", ["f2", "longdouble", "O", ">i4"])
def test_items_that_cannot_be(dtype: str) -> None:
    with pytest.raises(errors.DTypeError, match=r"'x' of kernel 'flat' has items of .*astype"):
        flat[4](np.zeros(4, dtype), device="cpu")


def test_a_store_on_the_host_is_no_argument(tmp_path: Path) -> None:
    with ww.kv.create(tmp_path / "store") as store, pytest.raises(errors.ArgumentError, match="open it with device="):
        flat[4](store, device="cpu")


def test_shapes_and_streams_that_cannot_be() -> None:
    for shape in (-1, 2**63, (2**62, 2)):
        with pytest.raises(errors.ArgumentError, match="launch shape"):
            flat[shape]
    with pytest.raises(errors.ArgumentError, match="'a' is not a stream"):
        flat[4, "a"]


@ww.kernel
def misspelt(x):
    x[gpu.grid(1)] = x.sise


@ww.kernel
def narrow(x):
    gpu.atomic_add(x, gpu.grid(1), 1)


def test_what_does_not_compile_says_so_in_a_line() -> None:
    with pytest.raises(errors.CompileError) as raised:
        misspelt[4](np.zeros(4), device="cpu")
    assert "Unknown attribute 'sise' of type array(float64, 1d, C)" in str(raised.value)
    assert "test_launches.py" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None and "nopython mode" in str(raised.value.__context__)
    with pytest.raises(errors.CompileError, match=r"there is no atomic_add\(array\(int16"):
        narrow[4](np.zeros(4, np.int16), device="cpu")


@pytest.mark.parametrize("options", [{"max_registers": -1}, {"max_registers": "x"}, {"block": "x"}, {"block": 33}])
def test_options_of_kernels_that_cannot_be(options: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="give a"):
        ww.kernel(**options)
    with pytest.raises(errors.ArgumentError, match="1 is not a Python function"):
        ww.kernel(1)


def test_priorities_of_streams() -> None:
    device = ww.devices()[0]
    with device.stream(np.int64(1)) as stream:
        assert stream.priority == 1
        stream.synchronize()
    with pytest.raises(errors.ArgumentError, match="priority is 'x': give an integer"):
        device.stream("x")


def test_rows_and_files_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(24))
    with ww.open(path, device="cpu", cache="16KiB") as a:
        a.prefetch(-2)
        for call in (a.prefetch, a.pin, a.unpin, a.evict):
            with pytest.raises(
                errors.ArgumentError, match=r"rows -1 to 2 of 24 .*: the stop must not be before the start"
            ):
                call(-1, 2)
    with pytest.raises(errors.ArgumentError, match="has a dtype and a shape of its own"):
        ww.open(path, dtype="int32")
    with ww.open(path, dtype="int64", offset=128, device="cpu") as a:
        assert a[23] == 23


def test_arrays_are_compared_by_identity_and_items_once_they_were_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(24))
    with ww.open(path, device="cpu", cache="16KiB") as a, ww.open(path, device="cpu", cache="16KiB") as b:
        assert {a: 1, b: 2}[a] == 1 and a in weakref.WeakSet([b, a]) and [b, a].index(a) == 1
        for compare, sign in ((lambda: a == 3, "=="), (lambda: a != 3, "!="), (lambda: a == [1, 2], "==")):
            with pytest.raises(TypeError, match=rf"read them first, a\[:\] {sign} "):
                compare()
        with pytest.raises(TypeError, match=r"read them first, np\.equal\(.*, a\[:\]\)"):
            np.arange(24) == a  # noqa: B015
        assert (a[:] == 3).sum() == 1 and (np.arange(24) == a[:]).all()
        assert a.reshape(-1, 6).shape == (4, 6) and a.reshape((2, -1)).shape == (2, 12)
        for shape in ((-1, 5), (-1, -1), (5, 5), (-1, 0)):
            with pytest.raises(errors.ArgumentError, match="cannot become"):
                a.reshape(*shape)


def test_device_code_outside_of_a_launch() -> None:
    for call in (gpu.grid, gpu.shared_array):
        with pytest.raises(RuntimeError, match="outside of a launch"):
            call(*(1, np.float64)[: 1 + (call is gpu.shared_array)])
    for primitive in (gpu.thread_index, gpu.block_threads, gpu.block_index, gpu.barrier, gpu.failed):
        with pytest.raises(RuntimeError, match="outside of a launch"):
            primitive()


def test_devices_that_are_not_there() -> None:
    with pytest.raises(IndexError, match=r"devices\(\)\[300\]: there .* `warpwell run --agents N"):
        ww.devices()[300]


# -- forks ------------------------------------------------------------------------------------------------------------

FORK = """
    import os, signal, sys
    import numpy as np
    import warpwell as ww

    @ww.kernel
    def add(a, x):
        i = ww.gpu.grid(1)
        x[i] += 1 + a[i]

    def tell(call):
        try:
            print(call(), flush=True)
        except Exception as error:
            print(type(error).__name__, "forked" in str(error), flush=True)

    def launch(a):
        x = np.zeros(4)
        add[4](a, x, device="cpu")
        return x.sum()

    def opened():
        with ww.open("a.npy", "r+", device="cpu", cache="64KiB", tier="storage") as again:
            return again[999]

    np.save("a.npy", np.arange(1000))
    a = ww.open("a.npy", "r+", device="cpu", cache="64KiB", tier="storage")
    b = ww.devices()[0].to_device(np.arange(3))
    b.copy_to_host()
    later = ww.devices()[0].call(sum, [1, 2])
    launch(np.zeros(4))
    launch(a)
    child = os.fork()
    if not child:
        signal.alarm(60)
        tell(lambda: launch(np.zeros(4)))
        tell(lambda: a[999])
        tell(lambda: launch(a))
        tell(lambda: a.close())
        tell(lambda: b.copy_to_host())
        tell(lambda: ww.devices()[0].to_device(np.arange(3)).copy_to_host().sum())
        tell(opened)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(a[999], launch(a), b.copy_to_host().sum(), later.get())
    a.close()
"""


def test_a_forked_process_launches_and_is_told_what_is_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # only CPU devices; test_gpu_device tests GPUs
    assert run(tmp_path, FORK).splitlines() == [
        "4.0",
        "ForkError True",
        "ForkError True",
        "None",
        "ForkError True",
        "3",
        "999",
        "999 10.0 3 3",
    ]


def test_nothing_is_served_while_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that look for commands would take time from the compiler."""

    @ww.kernel
    def double(a):
        a[gpu.grid(1)] *= 2

    @ww.kernel
    def wrong(a):
        a[gpu.grid(1)] = "text"

    np.save(tmp_path / "a.npy", np.arange(9))
    compile_for, in_flight = run_cpu.compile_for, []

    def noting(*args: Any) -> None:
        in_flight.append(a.cache._in_flight)
        compile_for(*args)

    with ww.open(tmp_path / "a.npy", "r+", device="cpu", cache="64KiB", tier="storage") as a:
        monkeypatch.setattr(run_cpu, "compile_for", noting)
        double[9](a)
        double[9](a)
        assert in_flight == [0]
        with pytest.raises(errors.CompileError):
            wrong[9](a)
        assert in_flight == [0, 0] and a.cache._in_flight == 0
        monkeypatch.undo()
        assert a[:].tolist() == [4 * k for k in range(9)]
