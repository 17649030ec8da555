"""Submission and completion rings that device threads and a controller share."""

from .pair import QueuePairs

__all__ = ["QueuePairs"]
