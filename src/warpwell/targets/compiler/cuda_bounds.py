"""Bounds checks for the `cuda` target."""

from numba.cuda import extending
from numba.cuda.models import register_model
from numba.cuda.np import arrayobj

from .checked_arrays import install
from .cuda_bodies import seam

install(seam, extending, register_model, arrayobj)
