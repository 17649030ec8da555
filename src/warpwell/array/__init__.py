"""Arrays on storage that kernels subscript."""

from .array import Array
from .device_array import DeviceArray
from .opening import create, open_array
from .view import ArrayView, atomic_add

__all__ = ["Array", "ArrayView", "DeviceArray", "atomic_add", "create", "open_array"]
