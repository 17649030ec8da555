"""Set-up of tests that use or compile for a GPU."""

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 touches it at the first compile; NumPy 2.5 lacks it
    np.row_stack = np.vstack  # noqa: NPY201 - the old name is the point
