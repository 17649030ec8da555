"""`versions`: the versions that must be equal in all processes of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping

PROTOCOL = 6
"""Version of the protocol; incremented with every change of a message."""


def versions() -> dict[str, str]:
    """Return the versions of this process by name. Code is sent as bytecode, so Python's version counts."""
    package, python = str(sys.modules["warpwell"].__version__), "{}.{}".format(*sys.version_info)
    return {"Warpwell": package, "Python": python, "protocol": str(PROTOCOL)}


def difference(peer: Mapping[str, str]) -> str:
    """Return the differences between the versions of this process and of a peer as text; "" if they are equal."""
    pairs = [(name, own, peer.get(name, "unknown")) for name, own in versions().items()]
    return ", ".join(f"{name} {own} here and {version} there" for name, own, version in pairs if own != version)
