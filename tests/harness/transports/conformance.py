"""TransportConformance: tests that every transport passes; a subclass creates the transport.

Needs pytest. A subclass in a test module is collected as it is::

    class TestMine(TransportConformance):
        def make(self, count):
            return my_transports(count)
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence

import pytest

from warpwell.pool.transport.transport import Transport

from .checks import CHECKS, LAST, PATIENCE, Party

COUNTS = (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
"""Numbers of ranks to test with."""


class TransportConformance:
    """Tests that hold for every transport whose ends can be in one process. A subclass implements `make`.

    Transports between processes run `run_checks` in each of them instead.
    """

    def make(self, count: int) -> Sequence[Transport]:
        """Return `count` connected transports, of ranks 0 to count - 1."""
        raise NotImplementedError

    @pytest.mark.parametrize("count", COUNTS)
    @pytest.mark.parametrize("name", [*CHECKS, LAST.__name__])
    def test_check(self, name: str, count: int) -> None:
        ends = self.make(count)
        failures: list[str] = []

        def run(end: Transport) -> None:
            party = Party(end)
            try:
                if name != LAST.__name__:
                    CHECKS[name](party)
                else:
                    LAST(party)
            except BaseException:
                failures.append(f"rank {end.rank}:\n{traceback.format_exc()}")

        threads = [threading.Thread(target=run, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        stuck = [thread for thread in threads if thread.is_alive()]
        for end in ends:
            end.close(1.0)
        assert not failures, "\n".join(failures)
        assert not stuck


def run_checks(transport: Transport, report: Callable[[str, str], None]) -> None:
    """Run all checks as one rank of many, and ``report(name, failure)`` each, with "" for success.

    The last one closes the transport. After a failure the others are not run, since messages may be left.
    """
    party = Party(transport)
    for name, program in [*CHECKS.items(), (LAST.__name__, LAST)]:
        try:
            program(party)
            if program is not LAST:
                party.barrier()
        except BaseException:
            report(name, f"rank {transport.rank}:\n{traceback.format_exc()}")
            return
        report(name, "")
