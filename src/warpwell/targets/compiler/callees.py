"""Device functions as parts of their callers: `CalleeCompiler` gives them no machine code of their own.

Numba turns each function that another calls into machine code and into a C function, too. No code can call a device
function from outside, and a kernel has up to a hundred of them: they take a fifth less time without. Each is still
optimised before its callers are: where they were optimised all at once, additions in kernels took twice as long.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

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
        """Give the function its Python objects, by a symbol, if it calls Python at all: it prints."""
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
