"""`handles`: the table of an agent's handlers, one for each operation that it receives."""

from __future__ import annotations

from collections.abc import Callable

from .protocol import Op

HANDLERS: dict[int, Callable[..., None]] = {}
"""The function that handles each operation: ``(agent, stream, sequence, *operands)`` for calls of the application, and
``(agent, peer, *operands)`` for what another agent sends. The main loop calls it, so it must not wait."""


def handles(op: Op) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers the handler of an operation."""

    def register(handler: Callable[..., None]) -> Callable[..., None]:
        if op in HANDLERS:
            raise ValueError(f"{op!r} has two handlers: {HANDLERS[op].__qualname__} and {handler.__qualname__}")
        HANDLERS[op] = handler
        return handler

    return register
