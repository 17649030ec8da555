"""Compiled code: its keys on disk, and code that is not cached."""

import enum
import errno
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary
from tests.harness.until import HANG_SECONDS

import warpwell as ww
from warpwell import gpu
from warpwell._os import file_lock
from warpwell.targets.compiler import code_cache, compiled
from warpwell.targets.compiler.code_cache import cache_key
from warpwell.targets.compiler.compiled import dispatcher
from warpwell.targets.compiler.hooks import intrinsics_for
from warpwell.targets.primitives import BLOCK, copy_foreign, load_relaxed, scratch

SOURCE = "import warpwell as ww\n@ww.gpu.function\ndef twice(v):\n    return {} * v\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # files of the same size that are written in the same second look the same to Python's own cache
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(name: str, factor: int) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(SOURCE.format(factor))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.twice

    return load


def test_equal_kernels_of_two_modules_are_kept_apart(load: Any) -> None:
    # Numba imports a function's module when it loads its code. The other module may not exist then.
    key = cache_key(load("one_module", 2))
    assert key is not None and key == cache_key(load("one_module", 2))
    assert key != cache_key(load("one_module", 3))
    assert key != cache_key(load("other_module", 2))


def named(**scope: Any) -> Callable[..., Any]:
    """Return a function that names things, to which these are known."""

    def function(x):
        return A + B + C + conf.LIMIT + conf.inner.helper(x) + Kind.ONE  # type: ignore[name-defined] # noqa: F821

    return types.FunctionType(function.__code__, scope, function.__name__)


def closed(a: Any, b: Any, c: Any) -> Callable[..., Any]:
    return lambda x: a + b + c + x


def module(**attributes: Any) -> types.ModuleType:
    made = types.ModuleType("conf")
    vars(made).update(attributes)
    return made


def defaults(value: Any) -> Callable[..., Any]:
    return lambda x, y=value: x + y


def keyword(value: Any) -> Callable[..., Any]:
    return lambda x, *, y=value: x + y


def plus(x):
    return x + 1


def minus(x):
    return x - 1


def kind(value: int) -> Any:
    return enum.IntEnum("Kind", {"ONE": value}, module="conf")


@pytest.mark.parametrize(
    "functions",
    [
        (closed(1, 23, 4), closed(12, 3, 4), closed(1, 2, 34)),
        (closed(1, 2, 1), closed(1, 2, 2), closed(1, 1, 2)),
        (closed(1, "1", 1), closed("1", 1, 1), closed(1.0, "1", 1), closed(True, "1", 1)),
        (closed(plus, minus, plus), closed(plus, plus, minus), closed(minus, plus, minus), closed(plus, minus, minus)),
        (closed((1, 2), 3, 4), closed((1, 3), 2, 4), closed(1, (2, 3), 4), closed((plus, 1), 2, 3)),
        (named(A=1, B=23), named(A=12, B=3), named(A=1, C=23), named(B=1, A=23)),
        (named(conf=module(LIMIT=7)), named(conf=module(LIMIT=8)), named(conf=module())),
        (
            named(conf=module(inner=module(helper=plus))),
            named(conf=module(inner=module(helper=minus))),
            named(conf=module(inner=module(), helper=plus)),
        ),
        (named(Kind=kind(7)), named(Kind=kind(8))),
        (defaults(1), defaults(2), defaults(plus), defaults(minus), keyword(1), keyword(2)),
        ((lambda x: (x + 5) * 21 + 3), (lambda x: (x + 5) * 2 + 13)),
    ],
)
def test_functions_that_differ_have_different_keys(functions: tuple[Callable[..., Any], ...]) -> None:
    keys = [cache_key(function) for function in functions]
    assert None not in keys and len(set(keys)) == len(keys)
    assert keys == [cache_key(function) for function in functions]


def test_what_a_module_imports_late_counts() -> None:
    keys = set()
    for value in (7, 8):
        lazy_module = module()

        def import_late(name: str, value: int = value) -> int:
            if name != "LIMIT":
                raise AttributeError(name)
            return value

        vars(lazy_module).update(__getattr__=import_late, __dir__=lambda: ["LIMIT"])
        keys.add(cache_key(named(conf=lazy_module)))
    assert len(keys) == 2 and None not in keys


class Unhashed:
    """Which may stand for anything."""


@pytest.mark.parametrize("unknown", [Unhashed, Unhashed(), [1], {}, module(LIMIT=[])])
def test_what_cannot_be_known_is_not_kept(unknown: Any) -> None:
    assert cache_key(closed(1, 2, unknown) if type(unknown) is not types.ModuleType else named(conf=unknown)) is None


def test_scratch_memory_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To clear it would take longer than a short span, and LLVM seconds, since it takes the store apart."""
    # A new folder, because code that an earlier run compiled cannot be inspected.
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))

    def last_word(value: int) -> int:
        end_address = scratch(4096)
        copy_foreign(end_address + 4088, value, 8)
        return load_relaxed(end_address + 4088, BLOCK)

    intrinsics_for("cpu")
    function = dispatcher(last_word)
    word = np.array([7])
    assert function(word.ctypes.data) == 7
    (code,) = function.inspect_llvm().values()
    assert "memset" not in code and "zeroinitializer" not in code


LAPTOP = """
import sys
import numpy as np
import warpwell as ww
from warpwell.targets.compiler import machine_code

SOURCE_VERSION = 0  # part of the kernels' keys

@ww.kernel
def total(a, out):
    out[0] = SOURCE_VERSION
    for j in range(a.shape[0]):
        out[0] += a[j]

@ww.kernel
def lends(text, out):  # calls Numba's runtime, and knows the secret of this process's hashes
    out[0] = int(np.ones(3).sum()) + SOURCE_VERSION + hash(str(text[0]))

def misses():
    return any("cache_access" in name for name in machine_code._linked)

for options in ({}, {"cache": "256KiB", "page_size": 4096}):
    with ww.open(sys.argv[1], device="cpu", **options) as a:
        out = np.zeros(1, np.int64)
        total[1](a, out)
        assert out[0] == 4950 + SOURCE_VERSION
        assert misses() == bool(options), (options, list(machine_code._linked))
hits = sum(total.current().compiled["cpu", 2].stats.cache_hits.values())
light = "numba.np.arraymath" not in sys.modules
text, out = np.array([45]), np.zeros(1, np.int64)
lends[1](text, out, device="cpu")
assert (int(out[0]) - 3 - SOURCE_VERSION - hash("45")) % 2**64 == 0  # the sum may be beyond 64 bits
hits += sum(lends.current().compiled["cpu", 2].stats.cache_hits.values())
print(hits, light)
"""


def test_only_what_a_kernel_calls_is_compiled_and_code_from_the_disk_finds_it(tmp_path: Path) -> None:
    """The first kernel over a mapped file waited ten seconds for the miss path, which it does not call."""
    np.save(tmp_path / "a.npy", np.arange(100))
    program = tmp_path / "laptop.py"  # only kernels from files are cached on disk
    program.write_text(LAPTOP.replace("SOURCE_VERSION = 0", f"SOURCE_VERSION = {time.time_ns()}"))
    hits = []
    for _ in range(2):  # first compiled, then loaded from disk
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "a.npy")],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        hits.append(done.stdout.split())
    assert hits == [["0", "False"], ["3", "True"]], "and does not import Numba's compilers"


@gpu.function
def says(value):
    if value == 3:
        print("met", value, "here")
    return value


@gpu.function
def halves(value):
    return says(value) // 2


def test_device_functions_have_no_machine_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    finalize = JITCodeLibrary._finalize_specific

    def counted(library: Any) -> None:
        made.append(library.name)
        finalize(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", counted)

    @gpu.function
    def more(value):
        return value + 1

    @gpu.function
    def much_more(value):
        return more(value) * 3

    intrinsics_for("cpu")
    assert dispatcher(lambda value: much_more(value) + more(value))(1) == 8
    assert len(made) == 1


def test_device_functions_print(capfd: pytest.CaptureFixture[str]) -> None:
    """In a kernel, and in a function of Numba's that no kernel calls."""

    @ww.kernel
    def prints(out):
        i = gpu.grid(1)
        out[i] = halves(i)

    out = np.zeros(5, np.int64)
    prints[5](out, device="cpu")
    assert out.tolist() == [0, 0, 1, 1, 2]
    assert numba.njit(lambda value: halves(value))(3) == 1
    assert capfd.readouterr().out == "met 3 here\n" * 2


# -- processes that compile the same at once ----------------------------------------------------------------


def test_a_file_lock_excludes_others_and_its_wait_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.lock"
    with file_lock(path) as first, file_lock(path, 0.05) as second:
        assert first and not second
    with file_lock(path, 0.0) as third:
        assert third
    (tmp_path / "file").write_text("")
    with file_lock(tmp_path / "file" / "a.lock") as nowhere:
        assert not nowhere


def test_who_waited_for_another_loads_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dispatchers of a function behave like dispatchers of two processes."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    compiling, waiting = dispatcher(plus), dispatcher(plus)

    def waited(path: Path, *seconds: float) -> Any:
        monkeypatch.setattr(compiled, "file_lock", file_lock)
        assert compiling(1) == 2  # another process compiles and stores the code while this one waits
        return file_lock(path, *seconds)

    monkeypatch.setattr(compiled, "file_lock", waited)
    assert waiting(1) == 2
    assert sum(compiling.stats.cache_misses.values()) == 1
    assert not waiting.stats.cache_misses and sum(waiting.stats.cache_hits.values()) == 1


def test_a_process_that_holds_a_lock_for_ever_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "file_lock", lambda path: file_lock(path, 0.05))
    first, function, again = dispatcher(minus), dispatcher(minus), dispatcher(minus)
    assert first(3) == 2
    (lock,), (code_file,) = tmp_path.rglob("*.lock"), tmp_path.rglob("*.nbc")
    code_file.unlink()
    with file_lock(lock):
        assert function(3) == 2 and len(function.stats.cache_misses) == 1
    assert again(3) == 2 and len(again.stats.cache_hits) == 1


def test_code_is_kept_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without ``-o flock``, some FUSE: the code is cached without locks."""

    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, again = dispatcher(minus), dispatcher(minus)
    assert first(3) == again(3) == 2
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses


def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image of a container, or another user's."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    first, again = dispatcher(minus), dispatcher(minus)
    assert first(3) == 2
    files = set(tmp_path.rglob("*"))

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "write_bytes", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(code_cache.os, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert again(3) == 2
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses
    assert again(3.5) == 2.5, "missing code is compiled"
    assert set(tmp_path.rglob("*")) == files


def test_a_cache_that_cannot_be_looked_into_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the home of another user, whom `su` left in the environment; here what not even root can look into."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert dispatcher(minus)(3) == 2


def test_types_that_look_the_same_are_told_apart(tmp_path: Path) -> None:
    class Same:
        def __init__(self, value: int) -> None:
            self.value = value

        def __repr__(self) -> str:
            return "Same"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same) and other.value == self.value

        __hash__ = None  # type: ignore[assignment]

    files = compiled.CodeCache(tmp_path)
    files.write((Same(1),), "one")
    assert files.read((Same(1),)) == "one" and files.read((Same(2),)) is None


def test_the_lock_is_one_that_nfs_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes flock a lock of bytes, which needs a file that may be written: nothing was kept in a home on NFS."""
    flock = fcntl.flock

    def of_nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with file_lock(tmp_path / "a.lock") as held:
        assert held


@pytest.mark.parametrize("left", [0, 40, -8])
def test_files_that_were_damaged_are_written_anew(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage as after a loss of power must not make every launch fail."""
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    first = dispatcher(plus)
    assert first(1) == 2
    (path,) = tmp_path.rglob("*.nbc")
    content = path.read_bytes()
    path.write_bytes(content[:left] + bytes(8 if left < 0 else 0))
    again = dispatcher(plus)
    assert again(1) == 2 and sum(again.stats.cache_misses.values()) == 1
    later = dispatcher(plus)
    assert later(1) == 2 and sum(later.stats.cache_hits.values()) == 1


def test_signatures_that_two_processes_keep_at_once_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPWELL_CACHE_DIR", str(tmp_path))
    of_int, of_float = dispatcher(plus), dispatcher(plus)

    def write_late(*arguments: Any) -> None:
        monkeypatch.setattr(compiled, "write_kept", code_cache.write_kept)
        assert of_float(1.5) == 2.5
        code_cache.write_kept(*arguments)

    monkeypatch.setattr(compiled, "write_kept", write_late)
    assert of_int(1) == 2
    later = dispatcher(plus)
    assert (later(1), later(1.5)) == (2, 2.5)
    assert set(later.overloads) == {(numba.int64,), (numba.float64,)} and not later.stats.cache_misses


def test_without_numbas_compiler_a_kernel_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ww.errors.CompileError, match="NUMBA_DISABLE_JIT is set"):
        dispatcher(lambda v: v)
