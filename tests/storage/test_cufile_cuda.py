"""Bulk reads on a GPU with the real libcufile: equal data in compatibility mode, and the choice without P2PDMA.

Each test runs another program, because the parameters of libcufile hold for a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import functools, logging, sys
import numpy as np
import warpwell as ww
from warpwell.cache import cache
from warpwell.cache.prefetch import Bulk
from warpwell.storage import CuFileOptions, FileMedium

logging.basicConfig(level=logging.WARNING)
path, use, allow_compat = sys.argv[1], sys.argv[2] == "given", sys.argv[3] == "compat"
if use:
    from cuda.bindings import cufile

    cache.Bulk = functools.partial(Bulk, cufile=CuFileOptions(cufile, allow_compat=allow_compat))
values = np.fromfile(path, "<i8")
with ww.open(FileMedium(path), dtype="i8", device="cuda", cache="128MiB", page_size=4096) as a:
    counts = a.prefetch().result(300)
    assert counts.failed == counts.skipped == 0, counts
    before = a.stats
    rows = np.r_[np.arange(0, len(values), 511), np.arange(len(values) - 600, len(values))]
    assert (np.asarray(ww.gather(a, rows).result(300)) == values[rows]).all()
    assert a.stats.misses == before.misses, "all pages were prefetched"
    a.evict()
    assert (np.asarray(a[3 : len(values) - 1].read().copy_to_host()) == values[3:-1]).all()
    print(a.medium.description)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cufile") / "x.bin"
    np.random.default_rng(4).integers(0, 1 << 62, (40 << 20) // 8 + 77).tofile(path)
    return path


def require_library() -> None:
    cufile = pytest.importorskip("cuda.bindings.cufile")
    try:
        cufile.get_version()
    except Exception as error:
        pytest.skip(f"libcufile cannot be loaded (pip install nvidia-cufile): {str(error).splitlines()[0]}")


def description_of(file: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "O_DIRECT" not in done.stdout:
        pytest.skip(f"{file.parent} has no O_DIRECT")
    return done.stdout.strip() + done.stderr


def test_the_library_in_compatibility_mode_reads_the_bytes_of_the_file(file: Path) -> None:
    require_library()
    text = description_of(file, "given", "compat")
    kind = subprocess.run(["stat", "-f", "-c", "%T", file], capture_output=True, text=True, check=True).stdout.strip()
    if "by cuFile" not in text and kind not in ("ext2/ext3", "xfs"):
        pytest.skip(f"libcufile does not support the file system {kind}: {text}")
    if "HANDLE_NOT_REGISTERED" in text and not Path("/run/udev/data").is_dir():
        pytest.skip(f"libcufile asks udev, which does not run here, for the file system: {text}")
    assert "bulk reads by cuFile)" in text


def test_without_p2pdma_the_library_is_not_used_and_the_reason_is_named(file: Path) -> None:
    require_library()
    text = description_of(file, "given", "strict")
    if "bulk reads by cuFile)" in text:
        pytest.skip("this host has P2PDMA")
    assert "bulk reads staged, because " in text


def test_the_default_names_its_choice(file: Path) -> None:
    text = description_of(file, "default", "strict")
    assert "bulk reads by cuFile)" in text or "bulk reads staged, because " in text
