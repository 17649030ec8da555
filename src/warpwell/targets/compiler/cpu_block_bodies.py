"""Compiled bodies of what `block` declares, for the `cpu` target, whose blocks have one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types

from .. import block as b
from .cpu_bodies import _define, _thread_context, seam
from .seam import I64


def _index(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(_thread_context(builder))


_define(b.block_index, types.int64, 0, _index)
_define(b.thread_index, types.int64, 0, lambda *_: I64(0))
_define(b.block_threads, types.int64, 0, lambda *_: I64(1))
_define(b.barrier, types.void, 0, lambda context, *_: context.get_dummy_value())


def _shared_array(shape: Any, dtype: Any) -> Callable[..., Any]:
    def implementation(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    return implementation


# for this target alone: numba-cuda takes over what has no target
seam.overload(b.shared_array, target="cpu")(_shared_array)
