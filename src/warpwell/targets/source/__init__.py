"""Kernels in CUDA C++, that schedulers preempt as they do kernels in Python.

- `cuda_source.py`: `CudaSource`, the user's interface; its launches, whole and block by block.
- `text.py`: analysis of the source text: the kernel's place, and whether its blocks can be claimed one by one.
- `parameters.py`: the kernel's parameters, and arguments converted to them.
- `program.py`: the program around the kernel (`workers.cu`) that makes workers, and its compilation.
- `forms.py`: the compiled kernel, workers on a GPU, and their launches.
"""
