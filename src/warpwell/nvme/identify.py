"""What a controller says of itself and of its namespaces: the answers to Identify.

Each table below has the fields that Warpwell reads, with the bytes at which the specification has them. Figures:
NVM Express Base Specification, "Identify Controller Data Structure", "Namespace Identification Descriptor"; NVM
Command Set Specification, "Identify Namespace Data Structure, NVM Command Set", "LBA Format Data Structure".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._check import table

IDENTIFY_BYTES = 4096

CNS_NAMESPACE = 0x00
"""Identify: a namespace."""
CNS_CONTROLLER = 0x01
"""Identify: the controller."""
CNS_ACTIVE_NAMESPACES = 0x02
"""Identify: the ids of active namespaces that are greater than NSID, 1,024 at most."""
CNS_DESCRIPTORS = 0x03
"""Identify: descriptors of a namespace, one of which names its command set."""

CSI_NVM = 0
"""Command set identifier: blocks."""
CSI_KEY_VALUE = 1
"""Command set identifier: keys and values."""
CSI_ZONED = 2
"""Command set identifier: zones."""

DESCRIPTOR_CSI = 4
"""Type of the descriptor that holds a command set identifier."""

CONTROLLER: np.dtype[Any] = table(
    ("vid", "<u2", 0, 1),  # PCI vendor
    ("sn", "S20", 4, 23),  # serial number
    ("mn", "S40", 24, 63),  # model number
    ("fr", "S8", 64, 71),  # firmware revision
    ("cmic", "u1", 76, 76),  # more than one port, controller
    ("mdts", "u1", 77, 77),  # maximal data transfer: 2**mdts pages of CAP.MPSMIN, 0: no limit
    ("cntlid", "<u2", 78, 79),
    ("ver", "<u4", 80, 83),
    ("rtd3e", "<u4", 88, 91),  # how long a shutdown takes, microseconds
    ("cntrltype", "u1", 111, 111),  # 1: an I/O controller
    ("oacs", "<u2", 256, 257),
    ("elpe", "u1", 262, 262),  # entries of the error log, less one
    ("sqes", "u1", 512, 512),  # entry sizes as powers of two: smallest in bits 3:0, largest in 7:4
    ("cqes", "u1", 513, 513),
    ("nn", "<u4", 516, 519),  # largest namespace id
    ("oncs", "<u2", 520, 521),
    ("vwc", "u1", 525, 525),  # bit 0: a volatile write cache, which Flush empties
    ("awun", "<u2", 526, 527),  # atomic write unit, blocks less one
    ("awupf", "<u2", 528, 529),  # the same when power fails
    ("sgls", "<u4", 536, 539),
    ("subnqn", "S256", 768, 1023),
    size=IDENTIFY_BYTES,
)
"""Identify Controller."""

NAMESPACE: np.dtype[Any] = table(
    ("nsze", "<u8", 0, 7),  # size in blocks
    ("ncap", "<u8", 8, 15),  # how many may be in use
    ("nuse", "<u8", 16, 23),
    ("nsfeat", "u1", 24, 24),
    ("nlbaf", "u1", 25, 25),  # number of formats, less one
    ("flbas", "u1", 26, 26),  # the format in use: bits 3:0 and 6:5; bit 4: metadata behind each block
    ("mc", "u1", 27, 27),
    ("dpc", "u1", 28, 28),
    ("dps", "u1", 29, 29),  # bits 2:0: type of the protection information in use
    ("nmic", "u1", 30, 30),  # bit 0: other controllers may have it, too
    ("nsattr", "u1", 99, 99),  # bit 0: write-protected
    ("nguid", "V16", 104, 119),
    ("eui64", "V8", 120, 127),
    ("lbaf", "(64,)<u4", 128, 383),  # LBA formats: see `block_format`
    size=IDENTIFY_BYTES,
)
"""Identify Namespace of the NVM command set."""


@dataclass(frozen=True)
class BlockFormat:
    """How a namespace is formatted.

    Attributes
    ----------
    block : int
        Bytes of a logical block; 0 where the format is not available.
    metadata : int
        Bytes of metadata for each block.
    extended : bool
        Whether the metadata lie behind the data of each block.
    protection : int
        Type of the protection information, 0 for none.
    """

    block: int
    metadata: int
    extended: bool
    protection: int


def block_format(namespace: NDArray[Any]) -> BlockFormat:
    """Return the format in use of a namespace.

    Parameters
    ----------
    namespace : ndarray
        One `NAMESPACE`.
    """
    flbas = int(namespace["flbas"])
    lbaf = int(namespace["lbaf"][flbas & 0xF | (flbas >> 5 & 3) << 4])
    shift = lbaf >> 16 & 0xFF
    # a shift beyond 63 is garbage, and must not become a number of that many bits
    block = 1 << shift if 9 <= shift <= 63 else 0
    return BlockFormat(block, lbaf & 0xFFFF, bool(flbas >> 4 & 1), int(namespace["dps"]) & 7)


def controller_of(data: bytes) -> NDArray[Any]:
    """Return Identify Controller data as one `CONTROLLER`."""
    return np.frombuffer(data, CONTROLLER, 1)[0]  # type: ignore[no-any-return]


def namespace_of(data: bytes) -> NDArray[Any]:
    """Return Identify Namespace data as one `NAMESPACE`."""
    return np.frombuffer(data, NAMESPACE, 1)[0]  # type: ignore[no-any-return]


def namespace_ids(data: bytes) -> list[int]:
    """Return the ids of an active namespace list: they end with a 0."""
    ids: list[int] = np.frombuffer(data, "<u4", IDENTIFY_BYTES // 4).tolist()
    return ids[: ids.index(0)] if 0 in ids else ids


def command_set(data: bytes) -> int:
    """Return the command set identifier out of a list of descriptors; `CSI_NVM` where none says it.

    A descriptor has its type, its length, two reserved bytes and so many bytes of content; a length of 0 ends the list.
    """
    at = 0
    while at + 4 < IDENTIFY_BYTES:
        kind, length = data[at], data[at + 1]
        if length == 0:
            break
        if kind == DESCRIPTOR_CSI:
            return data[at + 4]
        at += 4 + length
    return CSI_NVM


def text_of(field: Any) -> str:
    """Return a text field without what pads it; bytes that are not ASCII become question marks."""
    return bytes(field).decode("ascii", "replace").replace("�", "?").strip("\0 ")
