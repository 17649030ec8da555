"""GatedMedium: a medium whose commands wait until a test lets them complete."""

from __future__ import annotations

from warpwell.storage import Medium

from .faulty import Faulty


class GatedMedium(Faulty):
    """A medium that answers no command between `hold` and `release`, so that a test decides the order of events.

    Held commands run at their release. Commands that arrived before `hold` and have not completed wait, too.

    Parameters
    ----------
    medium : Medium
        Closing the gated medium closes it.
    """

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.name = f"gated {medium.name}"

    def hold(self) -> None:
        """Answer no command until `release`."""
        self.stop()

    def release(self) -> None:
        """Answer all held commands, and later commands at once."""
        self.resume()

    @property
    def held(self) -> int:
        """Number of commands that wait for `release`."""
        return self.withheld
