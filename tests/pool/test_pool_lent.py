"""Pinned arrays that agents map: nothing is sent, but arrays that cannot be mapped are."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.pool_agents import pool_of
from tests.harness.until import until

from lab.emulated_device import EmulatedDevice
from warpwell.pool import copies
from warpwell.pool.agent.agent import Agent
from warpwell.pool.agent.copies import MappedArray
from warpwell.pool.devices import Devices
from warpwell.pool.host_memory import memory_of, pinned_empty

MANY = 300_000


@pytest.fixture
def agents() -> Iterator[tuple[Devices, list[Agent]]]:
    with pool_of(EmulatedDevice(5e9) for _ in range(2)) as made:
        yield made


def mappings(agent: Agent) -> int:
    return sum(isinstance(value, MappedArray) for value in list(agent.handles.values()))


def test_nothing_is_sent(agents: tuple[Devices, list[Agent]]) -> None:
    devices, (first, second) = agents
    source, out = pinned_empty(MANY), pinned_empty(2 * MANY)
    source[:] = np.arange(MANY)
    out[:] = -1
    buffer = devices[0].to_device(source)
    buffer.copy_to_host(out[MANY:])
    assert np.array_equal(out[MANY:], source) and (out[:MANY] == -1).all()
    part = devices[1].to_device(source[1000:200_000])
    assert np.array_equal(part.copy_to_host(), source[1000:200_000])
    assert mappings(first) == 2 and mappings(second) == 1
    assert first.counts.get("WRITE_BULK", 0) == first.counts.get("READ_BULK", 0) == 0
    assert second.counts["WRITE"] == 1 and second.counts.get("WRITE_BULK", 0) == 0


def test_arrays_that_are_dropped(agents: tuple[Devices, list[Agent]]) -> None:
    devices, (first, _) = agents
    buffers = []
    for k in range(5):
        source = pinned_empty(MANY)
        source[:] = k
        buffers.append(devices[0].to_device(source))
        del source  # the copy may not have begun
    assert [float(b.copy_to_host()[-1]) for b in buffers] == [0, 1, 2, 3, 4]
    gc.collect()
    until(lambda: mappings(first) == 0)


def test_what_cannot_be_mapped_is_sent(agents: tuple[Devices, list[Agent]], monkeypatch: pytest.MonkeyPatch) -> None:
    devices, (first, _) = agents
    source = pinned_empty((MANY, 2))
    source[:] = np.arange(2 * MANY).reshape(MANY, 2)
    assert np.array_equal(devices[0].to_device(source[:, 1]).copy_to_host(), source[:, 1])
    assert mappings(first) == 0, "one that is not contiguous is packed first"
    memory = memory_of(source)
    assert memory is not None
    monkeypatch.setattr(type(memory), "path", "/proc/self/no/such/file")
    assert np.array_equal(devices[0].to_device(source).copy_to_host(), source)
    assert memory.mapped == {devices[0].connection: False} and first.counts["WRITE_BULK"] >= 1


def test_another_host_is_sent_to(agents: tuple[Devices, list[Agent]], monkeypatch: pytest.MonkeyPatch) -> None:
    devices, (first, _) = agents
    monkeypatch.setattr(copies.socket, "gethostname", lambda: "elsewhere")
    source = pinned_empty(MANY)
    source[:] = 3
    assert (devices[0].to_device(source).copy_to_host() == 3).all()
    assert mappings(first) == 0
