"""Launches that workers run block by block, so that they can be stopped between two blocks.

- `launch.py`: `BlockLaunch`, the launch with its arguments, and the control record from which blocks are claimed.
- `cpu.py`: workers that are host threads.
- `cuda.py`: workers and slices on a GPU (imports numba-cuda).
"""
