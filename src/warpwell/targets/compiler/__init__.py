"""Device code to machine code, by Numba and numba-cuda, and its launches. The only folder that registers with them.

In the order in which a launch meets them:

- `bytecode.py`: what a function's code says; functions as bytes. No compiler.
- `virtual.py`: copies of functions that take their block from a worker. No compiler.
- `code_cache.py`: where compiled code is kept on disk, and what tells one function's from others'. No compiler.
- `hooks.py`: `seam_for`, which imports a target's compiler when the target is first used.
- `seam.py`: structs, device functions and primitives as a Numba target's own types and functions.
- `cpu_bodies.py`, `cuda_bodies.py`: what each primitive is on a target, as LLVM code and as PTX.
- `checked_arrays.py`: arrays with bounds checks.
- `checksum.py`: CRC-32C as compiled host code.
- `compiling.py`: what users are told of a compilation that takes long or fails.
- `compiled.py`: host code by Numba, kept on disk.
- `machine_code.py`: host code that is loaded from disk without Numba.
- `run_cpu.py`, `run_cuda.py`: a launch on the CPU's threads, and on a GPU.
"""
