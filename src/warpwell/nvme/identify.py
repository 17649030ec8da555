"""Data structures of Identify: controller, namespaces, command sets.

Each table has the fields that Warpwell reads, with their bytes in the specification. Source: NVM Express Base
Specification, "Identify Controller Data Structure", "Namespace Identification Descriptor"; NVM Command Set
Specification, "Identify Namespace Data Structure, NVM Command Set", "LBA Format Data Structure".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .wire import layout

IDENTIFY_BYTES = 4096

CNS_NAMESPACE = 0x00
"""Identify: a namespace."""
CNS_CONTROLLER = 0x01
"""Identify: the controller."""
CNS_ACTIVE_NAMESPACES = 0x02
"""Identify: at most 1,024 ids of active namespaces, those greater than NSID."""
CNS_DESCRIPTORS = 0x03
"""Identify: descriptors of a namespace; one of them names its command set."""

CSI_NVM = 0
"""Command set identifier: blocks."""
CSI_KEY_VALUE = 1
"""Command set identifier: keys and values."""
CSI_ZONED = 2
"""Command set identifier: zones."""

DESCRIPTOR_CSI = 4
"""Type of the descriptor that holds a command set identifier."""

CONTROLLER: np.dtype[Any] = layout(
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

NAMESPACE: np.dtype[Any] = layout(
    ("nsze", "<u8", 0, 7),  # size in blocks
    ("ncap", "<u8", 8, 15),  # blocks that may be in use
    ("nuse", "<u8", 16, 23),
    ("nsfeat", "u1", 24, 24),
    ("nlbaf", "u1", 25, 25),  # number of formats, less one
    ("flbas", "u1", 26, 26),  # the format in use: bits 3:0 and 6:5; bit 4: metadata behind each block
    ("mc", "u1", 27, 27),
    ("dpc", "u1", 28, 28),
    ("dps", "u1", 29, 29),  # bits 2:0: type of the protection information in use
    ("nmic", "u1", 30, 30),  # bit 0: other controllers may use it, too
    ("nsattr", "u1", 99, 99),  # bit 0: write-protected
    ("nguid", "V16", 104, 119),
    ("eui64", "V8", 120, 127),
    ("lbaf", "(64,)<u4", 128, 383),  # LBA formats: see `block_format`
    size=IDENTIFY_BYTES,
)
"""Identify Namespace of the NVM command set."""


@dataclass(frozen=True)
class BlockFormat:
    """Format of a namespace.

    Attributes
    ----------
    block : int
        Bytes of a logical block; 0 if the format is not available.
    metadata : int
        Bytes of metadata for each block.
    extended : bool
        Whether the metadata follow the data of each block.
    protection : int
        Type of the protection information, 0 for none.
    """

    block: int
    metadata: int
    extended: bool
    protection: int


def block_format(namespace: NDArray[Any]) -> BlockFormat:
    """Return the format in use of one `NAMESPACE`."""
    flbas = int(namespace["flbas"])
    lbaf = int(namespace["lbaf"][flbas & 0xF | (flbas >> 5 & 3) << 4])
    shift = lbaf >> 16 & 0xFF
    # A larger shift is garbage: it must not become a number of that many bits.
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
    """Return the command set identifier out of a list of descriptors, `CSI_NVM` if it is missing.

    A descriptor has its type, the length of its content, two reserved bytes and the content; length 0 ends the list.
    """
    offset = 0
    while offset + 4 < IDENTIFY_BYTES and data[offset + 1] != 0:
        if data[offset] == DESCRIPTOR_CSI:
            return data[offset + 4]
        offset += 4 + data[offset + 1]
    return CSI_NVM


def text_of(field: Any) -> str:
    """Return a text field without its padding; bytes that are not ASCII become question marks."""
    return bytes(field).decode("ascii", "replace").replace("�", "?").strip("\0 ")
