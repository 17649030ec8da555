"""Kernels in CUDA C++, which schedulers preempt if the source includes ``warpwell.cuh``.

- `cuda_source.py`: `CudaSource`, the user's interface; its launches, whole and block by block.
- `parameters.py`: declared parameters, and the conversion of arguments to them.
- `program.py`: compilation of the kernel alone, and of workers that run its blocks (``warpwell.cuh``).
- `forms.py`: the compiled kernel and its workers on a GPU, and their launches.
"""
