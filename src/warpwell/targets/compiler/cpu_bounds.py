"""Bounds checks for the `cpu` target."""

from numba import extending
from numba.np import arrayobj

from .checked_arrays import install
from .cpu_bodies import seam

install(seam, extending, extending.register_model, arrayobj)
