"""Bounds checks for the `cpu` target."""

from numba import extending
from numba.np import arrayobj

from ._bounds import install
from ._cpu import seam

install(seam, extending, extending.register_model, arrayobj)
