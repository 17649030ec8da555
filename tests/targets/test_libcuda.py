"""The driver's library by ctypes."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from warpwell import libcuda


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    libcuda.driver.cache_clear()
    yield
    libcuda.driver.cache_clear()


def test_types_are_those_of_what_the_library_has(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(cuStreamQuery=SimpleNamespace())
    monkeypatch.setattr(libcuda, "CDLL", lambda name: library)
    assert libcuda.driver() is library and vars(library).keys() == {"cuStreamQuery"}
    assert library.cuStreamQuery.argtypes == (ctypes.c_void_p,)


def test_there_may_be_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(libcuda, "CDLL", fails)
    assert libcuda.driver() is None


def test_a_part_of_a_gpu_has_a_name_of_its_own() -> None:
    def names(byte: int, status: int = 0) -> Any:
        def name(found: Any, device: Any) -> int:
            found[0] = byte
            return status

        return name

    older = SimpleNamespace(cuDeviceGetUuid=names(1))
    newer = SimpleNamespace(cuDeviceGetUuid=names(1), cuDeviceGetUuid_v2=names(2))
    assert [(libcuda.uuid_of(library, ctypes.c_int(0)) or b"")[0] for library in (older, newer)] == [1, 2]
    assert libcuda.uuid_of(SimpleNamespace(cuDeviceGetUuid=names(1, 400)), ctypes.c_int(0)) is None
