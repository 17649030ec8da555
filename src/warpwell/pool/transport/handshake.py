"""`Hello`: what processes tell each other before anything else, and refuse each other for."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import sys
from dataclasses import asdict, dataclass

from ...errors import PoolVersionError

PROTOCOL = 4
"""Grows with every change of what goes between processes."""

NBYTES = 1024
"""A hello has this size in every version, so that any two understand at least each other's versions."""

_MAGIC = b"WARPWELL"


@dataclass(frozen=True)
class Hello:
    """Versions and whereabouts of a process."""

    protocol: int
    package: str
    python: str
    host: str
    process: int

    @classmethod
    def mine(cls) -> Hello:
        """Return that of this process."""
        return cls(PROTOCOL, _version(), platform.python_version(), socket.gethostname()[:200], os.getpid())

    def encode(self) -> bytes:
        """Return it as `NBYTES` bytes."""
        text = json.dumps(asdict(self)).encode()
        return (_MAGIC + struct.pack("<q", len(text)) + text).ljust(NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Return what `encode` made.

        Raises
        ------
        PoolVersionError
            It is none.
        """
        try:
            if data[:8] != _MAGIC:
                raise ValueError("no hello")
            fields = json.loads(data[16 : 16 + struct.unpack("<q", data[8:16])[0]])
            return cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise PoolVersionError("the other process does not speak Warpwell's protocol") from error

    def check(self, other: Hello, rank: int) -> None:
        """Refuse `other` (of `rank`) if it cannot work with this one: code travels as bytes of one Python version.

        Raises
        ------
        PoolVersionError
            Some version is another one; all are named.
        """
        wrong = []
        if self.protocol != other.protocol:
            wrong.append(f"protocol {self.protocol} here and {other.protocol} there")
        if self.package != other.package:
            wrong.append(f"Warpwell {self.package} here and {other.package} there")
        if self.python.split(".")[:2] != other.python.split(".")[:2]:
            wrong.append(f"Python {self.python} here and {other.python} there")
        if wrong:
            raise PoolVersionError(
                f"rank {rank} on host {other.host} cannot work with this process on {self.host}: "
                f"{', '.join(wrong)}; install the same versions on every host"
            )


def _version() -> str:
    return str(sys.modules["warpwell"].__version__)
