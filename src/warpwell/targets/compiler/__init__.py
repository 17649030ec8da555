"""Device code to machine code, by Numba and numba-cuda, and its launches. The only folder that registers with them.

In the order in which a launch meets them:

- `bytecode.py`: the names and objects in a function's code; functions as bytes. No compiler.
- `snapshot.py`: functions bound to the present values of the variables that they name. No compiler.
- `virtual.py`: copies of functions that take their block from a worker. No compiler.
- `code_cache.py`: the folder of compiled code on disk, its cache keys, and its locks. No compiler.
- `hooks.py`: `intrinsics_for`, which imports a target's compiler when the target is first used.
- `intrinsics.py`: structs, device functions and primitives as a Numba target's own types and functions.
- `cpu_lowerings.py`, `cuda_lowerings.py`: the code of each primitive on a target, as LLVM IR and as PTX.
- `checked_arrays.py`: arrays with bounds checks.
- `checksum.py`: CRC-32C as compiled host code.
- `numba_patches.py`: code that depends on the inside of Numba: bounds of loops, device functions as parts of callers.
- `reasons.py`: why a kernel does not compile, in the words of Python. No compiler.
- `compiling.py`: messages about a compilation that takes long or fails.
- `compiled.py`: host code by Numba, kept on disk.
- `written.py`: which arguments of a kernel it may write.
- `symbols.py`: addresses of the process that compiled code finds by name. No Numba.
- `machine_code.py`: native functions as object files, which are loaded without Numba.
- `run_cpu.py`, `run_cuda.py`: a launch on the CPU's threads, and on a GPU.
"""

from typing import TYPE_CHECKING

from ...registry import on_first_use
from .hooks import intrinsics_for

if TYPE_CHECKING:
    from .bytecode import cloudpickle, names_of
    from .code_cache import cache_folder, cache_key
    from .compiled import dispatcher
    from .run_cpu import compile_launch, load_cpu
    from .run_cuda import Series, keep, max_registers, numba_cuda, reads_launch_flag, start, synchronize
    from .written import written_arguments

__all__ = ["intrinsics_for"]

# Numba is imported on first use.
_FROM = {
    "bytecode": "cloudpickle names_of",
    "code_cache": "cache_folder cache_key",
    "compiled": "dispatcher",
    "run_cpu": "compile_launch load_cpu",
    "run_cuda": "Series keep max_registers numba_cuda reads_launch_flag start synchronize",
    "written": "written_arguments",
}
__getattr__, __dir__ = on_first_use(
    __name__, {name: f"{module}:" for module, names in _FROM.items() for name in names.split()}
)
