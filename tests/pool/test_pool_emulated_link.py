"""The emulated link: passes all checks of a transport, and takes the time that it says."""

import threading
import time

import numpy as np
import pytest
from tests.harness.transports.conformance import TransportConformance
from tests.harness.until import HANG_SECONDS

from lab.link import LINK, EmulatedLink, main
from warpwell.errors import ArgumentError, DeviceLostError
from warpwell.pool.launch.member import named_transport
from warpwell.pool.transport.bulk import Region
from warpwell.pool.transport.local_transport import local_transports


class TestEmulatedLink(TransportConformance):
    def make(self, count: int) -> list[EmulatedLink]:
        return [EmulatedLink(end, 1e9, 100e-6) for end in local_transports(count)]


@pytest.fixture
def ends() -> tuple[EmulatedLink, EmulatedLink]:
    first, second = local_transports(2)
    return EmulatedLink(first, 100e6, 5e-3), EmulatedLink(second, 100e6, 5e-3)


def test_slots_that_are_free_are_told_however_late_their_thread_is(ends: tuple[EmulatedLink, EmulatedLink]) -> None:
    """The link's own thread polls between the store of the word and the wake-up call."""
    first, second = ends
    source, sink = np.arange(8, dtype=np.uint8), np.zeros(4, np.uint8)
    put = first.put(1, 1, Region.over(source, chunk=4))
    get = second.get(0, 1, Region(int(sink.ctypes.data), 8, 4, 1, sink))
    wake = get.wake
    assert wake is not None

    def pause() -> None:
        second._doorbell.raise_()
        time.sleep(0.05)
        wake()

    get.wake = pause
    for k in range(2):
        get.allow(k + 1)
        get.wait(k + 1, HANG_SECONDS)
        assert sink.tolist() == source[4 * k : 4 * k + 4].tolist()
    put.wait(2, HANG_SECONDS)
    for end in ends:
        end.close()


@pytest.mark.timing
def test_a_copy_takes_its_time_on_the_link(ends: tuple[EmulatedLink, EmulatedLink]) -> None:
    first, second = ends
    assert "emulated" in first.name and "100 MB/s" in first.name and "5000 us" in first.name
    nbytes, chunk = 10_000_000, 500_000
    times: dict[int, list[float]] = {1: [], 2: []}
    for count in (1, 2, 1, 2, 1, 2):  # two share the link
        sinks = [np.zeros(nbytes, np.uint8) for _ in range(count)]
        source = np.full(nbytes, 7, np.uint8)
        before = time.monotonic()
        gets = [second.get(0, tag, Region.over(sink, chunk=chunk)) for tag, sink in enumerate(sinks)]
        puts = [first.put(1, tag, Region.over(source, chunk=chunk)) for tag in range(count)]
        gets[0].wait(1, HANG_SECONDS)
        early = time.monotonic() - before
        assert early > 5e-3
        for half in (*gets, *puts):
            half.wait(half.chunks, HANG_SECONDS)
        times[count].append(time.monotonic() - before)
        assert all(sink.all() for sink in sinks)
    for count, took in times.items():  # other load only adds to the times
        assert 0.99 * (count * 0.1 + 5e-3) < min(took) < count * 0.1 + 0.05
    for end in ends:
        end.close()


@pytest.mark.timing
def test_a_message_takes_its_time_and_many_share_the_latency(ends: tuple[EmulatedLink, EmulatedLink]) -> None:
    first, second = ends
    before = time.monotonic()
    for number in range(20):
        first.send(1, bytes([number]))
    assert [second.receive(HANG_SECONDS) for _ in range(20)] == [(0, bytes([number])) for number in range(20)]
    assert 5e-3 <= time.monotonic() - before < 80e-3
    for end in ends:
        end.close()


def test_a_loss_is_told_with_its_reason(ends: tuple[EmulatedLink, EmulatedLink]) -> None:
    _, second = ends
    get = second.get(0, 1, Region.over(np.zeros(100, np.uint8)))
    threading.Timer(0.05, second.transport.lose, (0, "it fell over")).start()  # type: ignore[attr-defined]
    with pytest.raises(DeviceLostError, match="it fell over"):
        get.wait(1, HANG_SECONDS)
    for end in ends:
        end.close()


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1.0, 0), (1e9, -1e-6), (float("nan"), 0)])
def test_links_that_cannot_be(bandwidth: float, latency: float) -> None:
    with pytest.raises(ArgumentError):
        EmulatedLink(local_transports(2)[0], bandwidth, latency)


@pytest.mark.parametrize("name", ["lab.link", "lab.link:no_such_function", "no_such_module:f", ":f"])
def test_names_of_transports_that_do_not_exist(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"WARPWELL_POOL_TRANSPORT must be module:function, got '{name}'"):
        named_transport(name)


def test_the_named_function_makes_the_link_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LINK, "3600,20")
    link = named_transport("lab.link:emulated")(local_transports(2)[0])
    assert "emulated link: 3600 MB/s, 20 us" in link.name
    link.close()


@pytest.mark.parametrize("option", [["--bandwidth", "-1"], ["--latency", "nan"], ["--latency", "-2"]])
def test_options_of_lab_run(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*option, "--", "program.py"])
    assert f"{option[0]} must be from 0" in capsys.readouterr().err
