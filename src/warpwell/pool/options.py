"""`silence_from_environment` and others: what the environment says of a pool."""

from __future__ import annotations

import os

from ..errors import ArgumentError

SILENCE = 3.0
"""Seconds after which a process that says nothing is lost: with everything else, less than 5."""


def silence_from_environment() -> float:
    """Return the seconds in ``WARPWELL_POOL_TIMEOUT``, or the default.

    Raises
    ------
    ArgumentError
        It is no number, or not a positive one.
    """
    text = os.environ.get("WARPWELL_POOL_TIMEOUT", "")
    try:
        seconds = float(text) if text else SILENCE
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ArgumentError(
            f"WARPWELL_POOL_TIMEOUT is {text!r}: give seconds, more than 0", name="WARPWELL_POOL_TIMEOUT"
        )
    return seconds
