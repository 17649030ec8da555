"""Loops over `range` in kernels on the CPU: LLVM assumes that their numbers are inside the range.

Numba counts such a loop down in addition to its number, from which LLVM cannot conclude ``j < n`` in ``for j in
range(n)``. With the assumption it drops the check of an index that is in range, and unrolls the loop. Only what is
compiled for a launch gets it; other users of Numba in the process see no difference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numba.cpython.rangeobj  # noqa: F401  (registers what is wrapped here)
from numba.core import cgutils, types
from numba.core.imputils import builtin_registry, lower_builtin

_RANGE = types.range_iter64_type
_ITEM = types.Pair(types.int64, types.boolean)
_state = threading.local()


@contextlib.contextmanager
def bounded_ranges(on: bool = True) -> Iterator[None]:
    """Have loops over ranges of 64-bit integers compiled with their bounds or not, in this thread, within the block."""
    before = getattr(_state, "on", False)
    _state.on = on
    try:
        yield
    finally:
        _state.on = before


def _install() -> None:
    registered = [
        body for body, name, types_ in builtin_registry.functions if name == "iternext" and tuple(types_) == (_RANGE,)
    ]
    if len(registered) != 1:
        return  # another version of Numba: loops are compiled as it does
    numbas = registered[0]

    def iternext(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pair = numbas(context, builder, sig, args)
        if getattr(_state, "on", False):
            item = cgutils.create_struct_proxy(_ITEM)(context, builder, value=pair)
            state = cgutils.create_struct_proxy(_RANGE)(context, builder, value=args[0])
            upwards = builder.icmp_signed(">", state.step, state.step.type(0))
            below = builder.icmp_signed("<", item.first, state.stop)
            above = builder.icmp_signed(">", item.first, state.stop)
            with builder.if_then(cgutils.as_bool_bit(builder, item.second)):
                builder.assume(builder.select(upwards, below, above))
        return pair

    lower_builtin("iternext", _RANGE)(iternext)


_install()
