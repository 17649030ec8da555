"""CRC-32C: published check values, both compiled forms, the interpreter's, and chaining."""

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.harness.until import HANG_SECONDS

from warpwell.kv.log.checksum import crc32c, crc32c_many
from warpwell.targets import native
from warpwell.targets.checksum import crc32c_of
from warpwell.targets.interp.interpreter import launch
from warpwell.targets.primitives import copy_crc32c, store_relaxed
from warpwell.targets.primitives import crc32c as crc32c_at

SIZES = [*range(40), 127, 255, 256, 511, 512, 383, 384, 385, 1000, 3071, 3072, 3073, 8192, 10001, 32768, 70000]

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
EXPECTED_CHECKSUMS = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "value"), EXPECTED_CHECKSUMS)
def test_published_values(data: bytes, value: int) -> None:
    assert crc32c(data) == crc32c_of(data) == value


@pytest.mark.parametrize("nbytes", SIZES)
def test_compiled_and_python_agree_at_any_alignment(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8)[3:]
    checksum = crc32c_of(data.tobytes())
    assert crc32c(data) == checksum
    assert crc32c(data[nbytes // 3 :], crc32c(data[: nbytes // 3])) == checksum


@native
def copy_checked(target: int, source: int, nbytes: int, seed: int) -> int:
    return copy_crc32c(target, source, nbytes, seed)


@pytest.mark.parametrize("nbytes", SIZES)
def test_copies_with_their_checksum(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8)[3:]
    copy = np.zeros(nbytes + 64, np.uint8)
    seed = crc32c_of(b"before")
    assert copy_checked(copy.ctypes.data + 5, data.ctypes.data, nbytes, seed) == crc32c_of(data.tobytes(), seed)
    assert (copy[5 : nbytes + 5] == data).all() and not copy[:5].any() and not copy[nbytes + 5 :].any()


def test_many_buffers() -> None:
    parts = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in (0, 900, 1000)]
    addresses = np.array([p.ctypes.data for p in parts])
    sizes = np.array([p.nbytes for p in parts])
    assert crc32c_many(addresses, sizes).tolist() == [crc32c_of(p.tobytes()) for p in parts]


@pytest.mark.parametrize("features", ["", "+sse4.2,+crc32", "+sse4.2,+crc32,+pclmul"])
def test_processors_without_the_instructions_agree(features: str) -> None:
    code = (
        "from warpwell.kv.log.checksum import crc32c; from warpwell.targets.compiler.checksum import has_features;"
        f"assert has_features('sse4.2') == {bool(features)} and not has_features('vpclmulqdq');"
        f"print(*(crc32c(bytes(k * 7 % 251 for k in range(n))) for n in {SIZES}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    expected = [crc32c_of(bytes(k * 7 % 251 for k in range(n))) for n in SIZES]
    assert [int(word) for word in run.stdout.split()] == expected


def test_the_interpreter_has_it() -> None:
    data = np.frombuffer(b"123456789" + bytes(7), np.uint8).copy()
    out = np.zeros(1, np.int64)

    def thread() -> None:
        store_relaxed(out.ctypes.data, crc32c_at(data.ctypes.data, 9, 0), 2)

    launch(thread, 1)
    assert out[0] == 0xE3069283
