"""Bounds checks for the `cuda` target."""

from numba.cuda import extending
from numba.cuda.models import register_model
from numba.cuda.np import arrayobj

from ._bounds import install
from ._cuda import seam

install(seam, extending, register_model, arrayobj)
