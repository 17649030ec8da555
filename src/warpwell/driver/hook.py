"""Run at the start of Python programs whose CUDA calls go to the pool: a few functions of `cuda.bindings.runtime`.

`environment` puts a folder on their PYTHONPATH in which this file is ``sitecustomize``. NVIDIA's runtime, which is
linked into `cuda.bindings.runtime`, asks the driver for private tables, and so cannot work over the layer. `cuda.core`
needs two functions of it, and programs often three more: they are answered by the driver's own functions. All else
stays: the program's own ``sitecustomize`` runs, too, and the folder leaves `sys.path`. Any Python 3 reads this file: it
imports nothing of Warpwell.
"""

import os
import sys

NAME = "cuda.bindings.runtime"


def _replace(runtime):  # type: ignore[no-untyped-def]
    """Put the driver's functions into the loaded module; one of a version without these names stays as it is."""
    from importlib import import_module

    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError:
        return
    if not hasattr(runtime, "cudaError_t"):
        return

    def error(code):  # type: ignore[no-untyped-def]
        """Return a code of the driver as one of the runtime: the numbers are the same."""
        try:
            return runtime.cudaError_t(int(code))
        except ValueError:
            return runtime.cudaError_t.cudaErrorUnknown

    def call(function, *arguments):  # type: ignore[no-untyped-def]
        """Call the driver, and return the code and the result as the runtime would, even if it cannot start."""
        code, *results = driver.cuInit(0)
        if not int(code):
            code, *results = function(*arguments)
        return error(code), None if int(code) or not results else results[0]

    def in_context(function, otherwise):  # type: ignore[no-untyped-def]
        """The same in the current context. Without one the runtime takes the first device's: that is not made here."""
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
    """Finds the one module as the others do, and has its functions replaced when it is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Called by the import system."""
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
    """Run the program's own, which this file hides."""
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
        if NAME in sys.modules:  # by a file that ran before this one
            _replace(sys.modules[NAME])
        else:
            sys.meta_path.insert(0, _Finder)
    _own_sitecustomize(folder)


if __name__ == "sitecustomize":
    _begin()
