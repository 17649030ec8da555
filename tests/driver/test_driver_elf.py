"""What `elf` reads of compiled programs: made by the C compiler, or by hand."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from tests.harness.driver import nvcc

from warpwell.driver import elf
from warpwell.driver.build import compiler
from warpwell.errors import ArgumentError

KERNELS = '__attribute__((section(".nvFatBinSegment"))) int fatbin[4] = {1};\n'
DYNAMIC = (
    KERNELS + "void **__cudaRegisterFatBinary(void *); void *handle(void) { return __cudaRegisterFatBinary(fatbin); }\n"
)
HOST_ONLY = (  # as nvcc links a program without kernels
    KERNELS + "void __cudaUnregisterFatBinary(void *); void end(void) { __cudaUnregisterFatBinary(fatbin); }\n"
)
STATIC = KERNELS + "void *__cudaRegisterFatBinary(void *code) { return code; }\n"
MAIN = "int main(void) { return 0; }\n"
HOST = os.uname().machine


def build(folder: Path, name: str, text: str, *flags: str) -> str:
    """Compile a program, or a library if it is named so; return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    library = ["-shared", "-fPIC", f"-Wl,-soname,{name.rpartition('/')[2]}"] if ".so" in name else []
    source = path.with_name(f"{path.name}.c")
    source.write_text(text)
    subprocess.run([*compiler(), str(source), "-o", str(path), "-Wl,--no-as-needed", *library, *flags], check=True)
    return str(path)


def refusal(path: str, library_path: str = "") -> str:
    return elf.examine_program(path, library_path)[0] or ""


def test_a_program_with_the_shared_runtime_is_accepted(tmp_path: Path) -> None:
    runtime = build(tmp_path, "libcudart.so.13", "void **__cudaRegisterFatBinary(void *code) { return code; }")
    program = build(tmp_path, "prog", DYNAMIC + MAIN, runtime)
    found = elf.read(program)
    assert found is not None and found.machine == HOST and not found.has_runtime
    assert "libcudart.so.13" in found.needed and found.rpath == found.runpath == []
    assert elf.examine_program(program) == (None, [])
    stripped = build(tmp_path, "stripped", DYNAMIC + MAIN, runtime, "-s")
    assert elf.examine_program(stripped) == (None, [])
    assert elf.uses_cuda(program) and elf.uses_cuda(stripped)


@pytest.mark.parametrize("flags", [(), ("-s",)])
def test_a_program_of_nvcc_without_kernels_is_accepted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    runtime = build(tmp_path, "libcudart.so.13", "void __cudaUnregisterFatBinary(void *code) { (void)code; }")
    assert elf.examine_program(build(tmp_path, "prog", HOST_ONLY + MAIN, runtime, *flags)) == (None, [])


@pytest.mark.parametrize("flags", [(), ("-s",), ("-static",)])
def test_a_program_with_the_static_runtime_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = build(tmp_path, "prog", STATIC + MAIN, *flags)
    assert elf.uses_cuda(program)
    assert refusal(program) == (
        "prog has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver library. Rebuild it with "
        "`nvcc -cudart shared` (CMake: -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared), or use `--cuda local` for this machine's "
        "GPUs."
    )


@pytest.mark.parametrize("flags", [(), ("-rdc=true", "-DSEPARATE")])
def test_programs_of_nvcc(flags: tuple[str, ...]) -> None:
    sources = ("core.cu", "other.cu") if flags else ("core.cu",)
    assert elf.examine_program(str(nvcc.compiled("shared", *sources, flags=flags))) == (None, [])
    static = nvcc.compiled("static", *sources, flags=(*flags, "-cudart=static"))
    assert refusal(str(static)).startswith("static has NVIDIA's CUDA runtime linked in")


def test_a_program_without_cuda_is_accepted(tmp_path: Path) -> None:
    assert elf.examine_program(build(tmp_path, "prog", MAIN)) == elf.examine_program(
        build(tmp_path, "static", MAIN, "-static")
    )
    assert elf.examine_program("/bin/sh") == elf.examine_program(__file__) == (None, [])
    assert not elf.uses_cuda("/bin/sh") and not elf.uses_cuda(__file__)


def test_an_old_runtime_is_named(tmp_path: Path) -> None:
    program = build(tmp_path, "prog", MAIN, build(tmp_path, "libcudart.so.11.0", ""))
    assert refusal(program) == "prog is built for CUDA 11 (libcudart.so.11.0): rebuild it with CUDA 12 or 13"


def test_libraries_with_the_static_runtime_are_named(tmp_path: Path) -> None:
    blas = build(tmp_path, "libcublas.so.13", "")
    line = " has NVIDIA's CUDA runtime linked in, which works only with NVIDIA's own driver library. Use"
    direct = build(tmp_path, "direct", MAIN, blas)
    assert refusal(direct).startswith("libcublas.so.13" + line)  # named even if the library is not found
    for name, text, needed in (("libmine.so.1", STATIC, ()), ("libwraps.so.1", "", (blas,))):
        library = build(tmp_path, f"inner/{name}", text, *needed)
        own = build(tmp_path, "own", MAIN, library, f"-Wl,-rpath,{tmp_path}/inner", "-Wl,--enable-new-dtags")
        expected = (name if text else "libcublas.so.13") + line
        assert refusal(own).startswith(expected)
        relative = build(tmp_path, "relative", MAIN, library, "-Wl,-rpath,$ORIGIN/inner", "-Wl,--disable-new-dtags")
        assert refusal(relative).startswith(expected)
        hidden = build(tmp_path, "hidden", MAIN, library, f"-Wl,-rpath-link,{tmp_path}")
        assert refusal(hidden) == "" and refusal(hidden, f"/nothing:{tmp_path}/inner").startswith(expected)


def test_libraries_are_found_in_the_cache_of_the_linker() -> None:
    libc = elf._cached_libraries().get("libc.so.6")
    assert libc and any(os.path.exists(path) for path in libc)


def test_a_dt_rpath_needs_preloaded_libraries_and_a_runpath_does_not(tmp_path: Path) -> None:
    runtime, driver = build(tmp_path, "libcudart.so.12", ""), build(tmp_path, "libcuda.so.1", "")
    old, new = (f"-Wl,-rpath,{tmp_path},--{verb}-new-dtags" for verb in ("disable", "enable"))
    assert elf.examine_program(build(tmp_path, "new", MAIN, runtime, driver, new)) == (None, [])
    found = elf.examine_program(build(tmp_path, "old", MAIN, runtime, driver, old))
    assert found == (None, ["libcudart.so.12", "libcuda.so.1"])
    library = build(tmp_path, "libmine.so", "", runtime, old)
    assert elf.examine_program(build(tmp_path, "inner", MAIN, library), str(tmp_path)) == (None, ["libcudart.so.12"])


def test_what_this_host_cannot_execute(tmp_path: Path) -> None:
    path = Path(build(tmp_path, "prog", MAIN))
    assert elf.is_compiled(str(path))
    path.chmod(0o644)
    with pytest.raises(ArgumentError, match="prog is not executable; run chmod"):
        elf.is_compiled(str(path))
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 18, 21)
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=f"prog is built for ppc64le, and this host is {HOST}"):
        elf.is_compiled(str(path))
    path.write_bytes(b"MZ\0\0")
    with pytest.raises(ArgumentError, match="not a Python file or a program"):
        elf.is_compiled(str(path))


@pytest.mark.parametrize(
    ("name", "text", "compiled"),
    [
        ("a.py", "#!/bin/sh", False),
        ("script", "#!/usr/bin/env python3\n", False),
        ("script", "#!/bin/sh\npython x.py", True),
        ("text", "print(1)", False),
        ("empty", "", False),
        ("archive", "PK\3\4\0", False),
    ],
)
def test_scripts_are_for_their_interpreter(tmp_path: Path, name: str, text: str, compiled: bool) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
    assert elf.is_compiled(str(tmp_path / name)) is compiled
    with pytest.raises(ArgumentError, match=r"is a folder without __main__\.py; give a Python file"):
        elf.is_compiled(str(tmp_path))
    (tmp_path / "__main__.py").touch()
    assert not elf.is_compiled(str(tmp_path))


def test_a_text_file_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n")
    with pytest.raises(ArgumentError, match=r"notes\.txt is not a Python file \(\.py\), and not executable"):
        elf.is_compiled(str(path))


def test_damaged_files_raise_nothing(tmp_path: Path) -> None:
    content = Path(build(tmp_path, "prog", STATIC + MAIN)).read_bytes()
    path = tmp_path / "damaged"
    for size in (4, 20, 64, 200, len(content) // 2, len(content) - 40):
        path.write_bytes(content[:size])
        elf.examine_program(str(path))
    for offset in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[offset : offset + 8] = b"\xff" * 8
        path.write_bytes(damaged)
        elf.examine_program(str(path))
