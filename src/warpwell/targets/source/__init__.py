"""Kernels in CUDA C++, that schedulers preempt as they do kernels in Python.

- `cuda_source.py`: `CudaSource`, what users make; its launches, whole and block by block.
- `text.py`: what the program's text says: where the kernel is, whether its blocks can be claimed one by one.
- `parameters.py`: the kernel's parameters, and arguments converted to them.
- `program.py`: the program around the kernel (`workers.cu`) that makes workers and slices, and its compilation.
- `forms.py`: the compiled kernel, workers and slices on a GPU, and their launches.
"""
