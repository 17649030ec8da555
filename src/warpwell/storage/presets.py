"""Drive: what the drives of the BaM paper do, for emulation."""

from __future__ import annotations

from dataclasses import dataclass

from .. import errors


@dataclass(frozen=True)
class Drive:
    """Rates of a drive, as measured with one of them on four PCIe 4 lanes.

    Source: Qureshi and others, GPU-Initiated On-Demand High-Throughput Storage Access in the BaM System
    Architecture (2023), table 3.

    Attributes
    ----------
    name : str
    read_iops, write_iops : tuple of float
        Commands a second of 512 bytes, and of 4096 bytes.
    latency_us : float
        Of one command, in microseconds. That of the 980 Pro is under full load; no other is given.
    """

    name: str
    read_iops: tuple[float, float]
    write_iops: tuple[float, float]
    latency_us: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the rate of its reads of 4096 bytes."""
        return 4096 * self.read_iops[1]


DRIVES = (
    Drive("P5800X", (5.1e6, 1.5e6), (1.0e6, 1.5e6), 11.0),
    Drive("PM1735", (1.1e6, 1.6e6), (351e3, 351e3), 25.0),
    Drive("980Pro", (0.75e6, 0.75e6), (172e3, 172e3), 324.0),
)
"""Intel Optane P5800X, Samsung PM1735, Samsung 980 Pro."""


def drive(name: str) -> Drive:
    """Return a drive by name, whatever the case.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    for candidate in DRIVES:
        if candidate.name.lower() == name.lower().replace(" ", ""):
            return candidate
    known = ", ".join(d.name for d in DRIVES)
    raise errors.ArgumentError(f"no drive {name!r}: one of {known}", name="preset")
