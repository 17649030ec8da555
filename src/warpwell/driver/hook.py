"""Replaces functions of `cuda.bindings.runtime` at the start of Python programs whose CUDA calls go to the pool.

`environment` puts a folder on their PYTHONPATH in which this file is ``sitecustomize``. `cuda.bindings.runtime` is
linked with NVIDIA's runtime, which requests private tables of the driver, so it does not work with the layer.
`cuda.core` needs two functions of this runtime, and programs often need three more. This file replaces these five by
functions of the driver, then runs the program's own ``sitecustomize`` and removes the folder from `sys.path`. Any
Python 3 may run this file, so it imports nothing of Warpwell.
"""

import os
import sys

NAME = "cuda.bindings.runtime"


def _replace(runtime):  # type: ignore[no-untyped-def]
    """Replace functions of the loaded module. A version without these names is not changed."""
    from importlib import import_module

    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError:
        return
    if not hasattr(runtime, "cudaError_t"):
        return

    def error(code):  # type: ignore[no-untyped-def]
        """Return a driver's error code as a runtime's error code, which has the same number."""
        try:
            return runtime.cudaError_t(int(code))
        except ValueError:
            return runtime.cudaError_t.cudaErrorUnknown

    def call(function, *arguments):  # type: ignore[no-untyped-def]
        """Call the driver; return the code and the result as the runtime would, even if the driver cannot start."""
        code, *results = driver.cuInit(0)
        if not int(code):
            code, *results = function(*arguments)
        return error(code), None if int(code) or not results else results[0]

    def in_context(function, otherwise):  # type: ignore[no-untyped-def]
        """Call the driver in the current context. Without a context, return `otherwise`; do not create one."""
        found, context = call(driver.cuCtxGetCurrent)
        if int(found) or not int(context or 0):
            return found, None if int(found) else otherwise
        return call(function)

    def device():  # type: ignore[no-untyped-def]
        found, value = in_context(driver.cuCtxGetDevice, 0)
        return found, None if value is None else int(value)

    def attribute(which, ordinal):  # type: ignore[no-untyped-def]
        return call(driver.cuDeviceGetAttribute, driver.CUdevice_attribute(int(which)), ordinal)

    answered = {
        "cudaDeviceSynchronize": lambda: in_context(driver.cuCtxSynchronize, None)[:1],
        "cudaDeviceGetPCIBusId": lambda room, ordinal: call(driver.cuDeviceGetPCIBusId, room, ordinal),
        "cudaDeviceGetAttribute": attribute,
        "cudaGetDeviceCount": lambda: call(driver.cuDeviceGetCount),
        "cudaGetDevice": device,
    }
    for name, function in answered.items():
        if hasattr(runtime, name):
            setattr(runtime, name, function)


class _Finder:
    """Finds `cuda.bindings.runtime` with the other finders, and replaces its functions after it is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the module's specification with a wrapped loader (called by the import system)."""
        if name != NAME:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        from importlib.util import find_spec

        spec = find_spec(name)
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        load = loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            _replace(module)

        loader.exec_module = exec_module
        return spec


def _own_sitecustomize(folder):  # type: ignore[no-untyped-def]
    """Run the program's own ``sitecustomize``, which this file hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None or os.path.dirname(os.path.abspath(spec.origin or "")) == folder:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _begin():  # type: ignore[no-untyped-def]
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    if os.environ.get("WARPWELL_CUDA"):
        if NAME in sys.modules:  # a file that ran before this one has imported it
            _replace(sys.modules[NAME])
        else:
            sys.meta_path.insert(0, _Finder)
    _own_sitecustomize(folder)


if __name__ == "sitecustomize":
    _begin()
