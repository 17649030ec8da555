"""Parts of Warpwell that depend on the inside of Numba: bounds of loops, and device functions without machine code.

`bounded_ranges`: loops over `range` in kernels on the CPU. Numba counts such a loop down in addition to its number,
from which LLVM cannot conclude ``j < n`` in ``for j in range(n)``. With an assumption LLVM drops the check of an
index that is in range, and unrolls the loop. Only code that is compiled for a launch has it; other users of Numba in
the process see no difference.

`CalleeCompiler`: device functions as parts of their callers. Numba turns each function that another one calls into
machine code and into a C function, too. Only compiled code calls a device function, and a kernel has up to a hundred of
them: without these functions, compilation takes a fifth less time. Each function is still optimized before its callers:
when all were optimized at once, additions in kernels took twice as long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numba.cpython.rangeobj  # noqa: F401  (registers what is wrapped here)
from numba.core import cgutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
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
        return  # another version of Numba: compile loops without bounds
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


_CALLS_PYTHON = "numba_gil_ensure"


class _CalleeLibrary(JITCodeLibrary):
    """The LLVM module of a device function, to be linked into others."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Set the Python objects of the function, by a symbol, if it calls Python, as print does."""
        if any(function.name == _CALLS_PYTHON for function in self._final_module.functions):
            super()._finalize_final_module()
            self._codegen.set_env(name, environment)


class CalleeCompiler(Compiler):
    """Compiles device functions."""

    def define_pipelines(self) -> Any:
        if self.state.library is None:
            self.state.library = _CalleeLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
            self.state.library.enable_object_caching()
        return super().define_pipelines()
