"""The `interp` target: device code as plain Python under a seeded scheduler and weak memory.

- `interpreter.py`: `Interpreter`, which runs a launch; its methods are the primitives of device code.
- `threads.py`: the threads, logical time, and who runs next.
- `weak_memory.py`: what a load may return where happens-before permits several values.
- `checked_numpy.py`: NumPy arrays that tell which argument was subscripted wrongly.
"""
