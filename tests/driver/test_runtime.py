"""Programs of the CUDA runtime on the stub driver and through layer and worker; the list of its functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.driver import nvcc
from tests.harness.until import HANG_SECONDS

from lab.driver import build as lab_build
from lab.driver.serve import serve
from warpwell.driver import build, runtime

CORE = {
    "plain": ("core", ("core.cu",), ()),
    "linked": ("core_linked", ("core.cu", "other.cu"), ("-rdc=true", "-DSEPARATE")),
    "per-thread": ("core_threads", ("core.cu",), ("-default-stream", "per-thread")),
}
NOT_SUPPORTED = 801
# Bytes of struct cudaDeviceProp and of its reserved ints at the end.
PROPERTY_BYTES = {12: (1032, 63), 13: (1008, 56)}


@pytest.fixture(scope="module")
def parts() -> lab_build.Built:
    return lab_build.build()


@pytest.fixture(scope="module")
def native(parts: lab_build.Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a program on the stub driver itself."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "libcuda.so.1").symlink_to(parts.fake)
    for path in lab_build.library_folder().glob("libcudart.so.*"):
        (folder / path.name).symlink_to(path)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_DEVICES": "2"}


@pytest.fixture(scope="module")
def pooled(parts: lab_build.Built) -> Iterator[dict[str, str]]:
    """Environment of a program whose two devices are served by workers."""
    with serve(2, driver=parts.fake, parts=parts) as server:
        yield server.environ()


def run(environ: dict[str, str], *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def passes(environ: dict[str, str], *command: str | Path) -> str:
    """Return what a test program prints on stderr; fail if a check of it does."""
    done = run(environ, *command)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("variant", CORE)
def test_core_calls_on_the_driver_itself(native: dict[str, str], variant: str) -> None:
    name, sources, flags = CORE[variant]
    refused = passes(native, nvcc.compiled(name, *sources, flags=flags))
    assert refused == "warpwell: cudaMallocArray is not served by this CUDA runtime: cudaErrorNotSupported\n"


@pytest.mark.parametrize("variant", CORE)
def test_core_calls_through_the_layer(pooled: dict[str, str], variant: str) -> None:
    name, sources, flags = CORE[variant]
    passes(pooled, nvcc.compiled(name, *sources, flags=flags), "pooled")


def test_graphs_and_managed_memory_through_the_layer(parts: lab_build.Built) -> None:
    program = nvcc.compiled("graph", "graph.cu")
    with serve(1, driver=parts.fake, parts=parts) as server:  # several devices have no managed memory
        passes(server.environ(), program)


def test_managed_variables(native: dict[str, str], pooled: dict[str, str]) -> None:
    program = nvcc.compiled("managed", "managed.cu")
    passes(native, program)
    done = run(pooled, program)
    assert (done.returncode, done.stdout) == (1, "")
    assert "warpwell: __managed__ variables cannot be used here: cudaErrorNotSupported" in done.stderr


def test_a_client_of_release_12_that_registers_by_hand(
    native: dict[str, str], pooled: dict[str, str], tmp_path: Path
) -> None:
    program, library = tmp_path / "client", lab_build.library_folder() / "libcudart.so.12"
    source = nvcc.PROGRAMS / "client12.c"
    files = [str(program), str(source), str(library)]
    subprocess.run([*build.compiler(), "-o", *files, "-Wl,--allow-shlib-undefined"], check=True, timeout=HANG_SECONDS)
    for environ in (native, pooled):
        output = passes(environ, program, lab_build.IMAGE)
        assert "warpwell: cudaGetDeviceProperties is not served" in output
        assert output.count("warpwell: the program has no code for this GPU") == 1


def test_a_program_without_a_device_is_told_so(native: dict[str, str]) -> None:
    program = nvcc.compiled("core", "core.cu")
    done = run(native | {"FAKE_DEVICES": "0"}, program)
    assert done.returncode == 1
    assert "cudaGetDeviceCount(&count) is 100" in done.stdout


# -- the list of functions ---------------------------------------------------------------------------------------------


def exports(library: Path) -> set[str]:
    """Return the symbols that a library exports with their version, without the version's own."""
    command = ["nm", "-D", "--defined-only", "--with-symbol-versions", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in symbols if "@@" in line}


@pytest.mark.parametrize("release", runtime.RELEASES)
def test_the_library_exports_what_the_list_has(release: int) -> None:
    names = {name for function in runtime.functions(release) for name in function.exports}
    found = exports(lab_build.library_folder() / f"libcudart.so.{release}")
    assert found == {f"{name}@@libcudart.so.{release}" for name in names}


def test_the_list_has_all_exports_of_nvidia() -> None:
    found = nvcc.find()
    folders = [found.parents[1] / name for name in ("lib64", "lib")] if found else []
    libraries = [folder / "libcudart.so.13" for folder in folders if (folder / "libcudart.so.13").exists()]
    if not libraries:
        pytest.skip(nvcc.MISSING)
    assert exports(libraries[0]) == exports(lab_build.library_folder() / "libcudart.so.13")


@pytest.mark.parametrize("release", runtime.RELEASES)
def test_properties_end_where_the_reserved_words_begin(release: int) -> None:
    nbytes, reserved = PROPERTY_BYTES[release]
    _, offset, size, _ = runtime.properties(release)[-1]
    assert offset + size == nbytes - 4 * reserved


def test_properties_are_where_the_header_has_them(tmp_path: Path) -> None:
    include = nvcc.include()
    if include is None:
        pytest.skip(nvcc.MISSING)
    first = {name: offset for name, offset, _, _ in reversed(runtime.properties(13))}
    checks = [
        f"_Static_assert(offsetof(struct cudaDeviceProp, {n}) == {offset}, {n!r});" for n, offset in first.items()
    ]
    text = "#include <cuda_runtime_api.h>\n#include <stddef.h>\n" + "\n".join(checks).replace("'", '"')
    source = tmp_path / "properties.c"
    source.write_text(text)
    subprocess.run([*build.compiler(), "-fsyntax-only", f"-I{include}", source], check=True, timeout=HANG_SECONDS)


def test_prototypes_equal_those_of_the_header() -> None:
    include = nvcc.include()
    if include is None:
        pytest.skip(nvcc.MISSING)
    command = [*build.compiler(), "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", f"-I{include}", "-xc", "-"]
    text = "#include <cuda_runtime_api.h>\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    declared = dict(prototypes(re.sub(r"__attribute__\(\(.*?\)\)", "", done.stdout)))
    compared = 0
    for function in runtime.functions(13):
        elsewhere = function.name.startswith(("__", "cudaProfiler"))  # declared in other headers
        if function.how in ("own", "refused") or elsewhere:
            continue
        for name in function.exports:
            expected = [passing_of(c_type + " x") for c_type in function.c_types]
            assert expected == [passing_of(parameter) for parameter in declared[name]], name
            compared += 1
    assert compared > 250


def prototypes(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield name and parameters of the declarations in preprocessed text."""
    for match in re.finditer(r"\b(cuda\w+)\s*\(([^;{}]*)\)\s*;", text):
        flat = re.sub(r"\([^()]*\)", "*", match[2]).replace("**", "*")
        yield match[1], [] if flat.strip() in ("", "void") else flat.split(",")


def passing_of(parameter: str) -> str:
    """Return how a parameter is passed: as a pointer, a structure, or an integer of 4 or 8 bytes."""
    tokens = parameter.replace("*", " * ").replace("[", " * ").split()
    if "*" in tokens or any(re.fullmatch(r"cuda\w+_t|cudaHostFn_t|CU\w+", word) for word in tokens):
        return "4" if "cudaError_t" in tokens else "pointer"
    kinds = {"size_t": "8", "long": "8", "uint64_t": "8", "cudaMemLocation": "8", "cudaGraphConditionalHandle": "8"}
    kinds |= {"dim3": "dim3", "cuda_dim3": "dim3", "cudaExtent": "extent", "cuda_extent": "extent"}
    kinds |= {"cudaPitchedPtr": "pitched", "cuda_pitched": "pitched"}
    return next((kinds[word] for word in tokens if word in kinds), "4")


def test_refused_functions_name_themselves_once(native: dict[str, str]) -> None:
    names = [f.name for f in runtime.functions(13) if f.how == "refused"]
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL('libcudart.so.13')\n"
        "for name in sys.argv[1:] * 2:\n"
        f"    assert getattr(library, name)() == {NOT_SUPPORTED}, name\n"
        f"assert library.cudaGetLastError() == {NOT_SUPPORTED}\n"
        "assert library.cudaGetLastError() == 0\n"
    )
    done = run(native, sys.executable, "-c", code, *names)
    assert done.returncode == 0, done.stderr
    reported = [line.split()[1] for line in done.stderr.splitlines()]
    assert reported == names
    assert "cudaGetExportTable" in names


def test_codes_have_names(native: dict[str, str]) -> None:
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL('libcudart.so.13')\n"
        "library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p\n"
        "for code in sys.argv[1:]:\n"
        "    print(library.cudaGetErrorName(int(code)).decode(), '-', library.cudaGetErrorString(int(code)).decode())\n"
    )
    codes = runtime.errors()
    output = run(native, sys.executable, "-c", code, *map(str, codes)).stdout.splitlines()
    assert [line.split()[0] for line in output] == list(codes.values())
    assert "cudaErrorMemoryAllocation - memory allocation" in output
