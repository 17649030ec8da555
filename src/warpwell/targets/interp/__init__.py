"""The `interp` target: device code as plain Python under a seeded scheduler and weak memory.

- `interpreter.py`: `Interpreter`, which runs a launch; its methods are the primitives of device code.
- `threads.py`: the threads, logical time, and the choice of the next thread.
- `weak_memory.py`: the values that a load may return if happens-before permits several.
- `checked_numpy.py`: NumPy arrays that name the argument of an index out of range.
"""
