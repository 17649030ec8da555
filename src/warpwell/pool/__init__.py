"""Every GPU of a cluster as a local device: agents, one a device, that one ordinary program calls.

See ``docs/pool.md``.
"""

from typing import TYPE_CHECKING, Any

from .communicator import communicator

if TYPE_CHECKING:
    from .copy.plan import Tuning

__all__ = ["Tuning", "communicator"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import `Tuning` when it is first used: the launcher needs none of what it brings."""
        if name != "Tuning":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .copy.plan import Tuning

        return Tuning


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
