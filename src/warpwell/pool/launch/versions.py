"""`versions`: the versions that all processes of a job must have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping

PROTOCOL = 5
"""Version of the protocol; incremented with every change of a message."""


def versions() -> dict[str, str]:
    """Return the versions of this process by name. Code is sent as bytecode, so Python's version counts."""
    return {
        "Warpwell": str(sys.modules["warpwell"].__version__),
        "Python": "{}.{}".format(*sys.version_info),
        "protocol": str(PROTOCOL),
    }


def difference(theirs: Mapping[str, str]) -> str:
    """Return how the versions of another process differ from those of this one, or "" if they are equal."""
    found = [(name, here, theirs.get(name, "unknown")) for name, here in versions().items()]
    return ", ".join(f"{name} {here} here and {there} there" for name, here, there in found if here != there)
