"""`Code`: a serialized kernel or function, which is sent to each agent once, and identified by a hash."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ... import errors
from ...targets import CudaSource, Kernel, is_device
from ...targets import device as mark_device
from ...targets.compiler import cloudpickle, names_of

_lock = threading.RLock()  # reentrant, because pickling an object may call a device, which pickles, too
_made: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()
_PACKAGE = Path(__file__).parents[2]

MAX_BYTES = (1 << 31) - 1
"""Maximum size of a pickled value, and of a message, in bytes."""


class Code:
    """A kernel or a function as bytes.

    It contains modules that are not installed packages, so agents on other hosts do not need the user's files.

    Attributes
    ----------
    key : str
        Hash of the content: helper functions, globals and options.
    name : str
    data : bytes
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data
        self.key = hashlib.sha256(data).hexdigest()[:32]

    @classmethod
    def of(cls, value: Any) -> Code:
        """Return the code of a kernel, a CUDA source or a function.

        A kernel is serialized again when a variable that it names has changed. A function is serialized once.

        Raises
        ------
        CodeError
            An object in the code cannot be serialized; the message names the object.
        """
        if isinstance(value, Kernel):
            compiled = value.current().compiled
            code: Code | None = compiled.get("code")
            if code is None:
                code = compiled["code"] = cls(_name(value), _serialize(value.original))
            return code
        try:
            made = _made.get(value)
        except TypeError:  # the object has no weak references
            made = None
        if made is None:
            made = cls(_name(value), _serialize(value))
            with contextlib.suppress(TypeError):
                _made[value] = made
        return made


class LoadedCode:
    """Code on an agent. The first lane that uses it deserializes it, so that slow imports do not delay other lanes."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self._data = data
        self._lock = threading.Lock()
        self._made = False
        self._value: Any = None
        self._launches: dict[Any, Any] = {}
        self._globals: dict[str, Any] = {}

    @property
    def value(self) -> Any:
        """The kernel or function."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._value = deserialize(self._data, self._globals)
                    self._made = True
        return self._value

    def launch(self, configuration: Any) -> Any:
        """Return ``kernel[configuration]``, which is cached."""
        launches = self._launches  # before the value, because `set_global` changes both
        made = launches.get(configuration)
        if made is None:
            made = launches[configuration] = self.value[configuration]
        return made

    def set_global(self, name: str, value: Any) -> None:
        """Set a global variable of the kernel, which is then compiled again."""
        function = getattr(self.value, "function", self.value)
        if not isinstance(function, types.FunctionType) or name not in function.__globals__:
            raise errors.ArgumentError(f"{self.name!r} does not use {name!r}: name a global that it uses", name="name")
        with self._lock:
            self._globals[name] = value
            self._made = False
            self._launches = {}


# -- pickling --------------------------------------------------------------------------------------------------


def dumps(value: Any, handle_of: Callable[[Any], Any] | None = None) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle a value without the objects that have a handle; return the bytes, and these handles.

    Raises
    ------
    ArgumentError
        The bytes exceed the maximum size of a message.
    """
    handles: list[Any] = []

    def persistent_id(value: Any) -> Any:
        handle = None if handle_of is None else handle_of(value)
        if handle is None:
            return None
        handles.append(handle)
        return len(handles) - 1

    out = io.BytesIO()
    # Most arguments and results are plain: searching for modules of the user would take a hundred times as long.
    is_plain = _is_plain(value, handle_of)
    pickler: Any = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL) if is_plain else _code_pickler()(out)
    pickler.persistent_id = persistent_id  # set, not overridden, because each call has another function
    with contextlib.nullcontext() if is_plain else _by_value():
        pickler.dump(value)
    if (nbytes := out.tell()) > MAX_BYTES:
        raise errors.ArgumentError(
            f"arguments and results of a call must have at most {MAX_BYTES} bytes without large NumPy arrays, got "
            f"{nbytes}: convert large values to plain arrays (numpy.asarray), or write them to a file"
        )
    return out.getvalue(), tuple(handles)


_NO_FILE = "<dynamic-code>"


@functools.cache
def _code_pickler() -> type[Any]:
    """Return a pickler of cloudpickle that keeps the names of files.

    cloudpickle 3.1.3 replaces them. Messages about a kernel name its file, and code without one is compiled each time.
    """
    base: Any = cloudpickle().Pickler

    class CodePickler(base):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.CodeType) and value.co_filename != _NO_FILE:
                return _with_file, (value.replace(co_filename=_NO_FILE), value.co_filename)
            return super().reducer_override(value)

    return CodePickler


def _with_file(code: types.CodeType, filename: str) -> types.CodeType:
    return code.replace(co_filename=filename)


_PLAIN = (int, float, bool, complex, str, bytes, type(None))


def _is_plain(value: Any, handle_of: Callable[[Any], Any] | None) -> bool:
    """Return True if a value consists of numbers, strings, arrays and objects on the device."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind in (tuple, list):
        return all(_is_plain(v, handle_of) for v in value)
    if kind is dict:
        return all(type(k) in _PLAIN and _is_plain(v, handle_of) for k, v in value.items())
    if kind is np.ndarray or isinstance(value, np.generic):
        return not value.dtype.hasobject
    return handle_of is not None and handle_of(value) is not None


def loads(data: bytes, objects: Any = ()) -> Any:
    """Return the value that `dumps` pickled, with ``objects[k]`` for the k-th handle."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = objects.__getitem__  # type: ignore[method-assign]  # as above
    return unpickler.load()


def _serialize(value: Any) -> bytes:
    if isinstance(value, CudaSource):
        content: Any = ("cuda", value)
    elif isinstance(value, Kernel):
        content = ("kernel", value.function, value.max_registers, value.block, _device_functions(value.function))
    elif callable(value):
        content = ("function", value, _device_functions(value))
    else:
        raise errors.CodeError(f"expected a kernel or a function, got {value!r:.60}")
    try:
        return dumps(content)[0]
    except errors.WarpwellError:
        raise
    except Exception as error:  # pickling may raise any exception
        culprit = _culprit(getattr(value, "function", value))
        raise errors.CodeError(
            f"{_name(value)!r} cannot be sent to a device: {culprit or error}. Pass the object as an argument, or "
            f"create it in the function"
        ) from error


def deserialize(data: bytes, variables: dict[str, Any] | None = None) -> Any:
    """Return the kernel or function of a `Code`, with values for its global variables."""
    kind, *content = loads(data)
    if kind == "cuda":
        return content[0]
    *content, marked = content
    if variables:
        content[0] = _with_globals(content[0], variables)
    for function in marked:
        if not is_device(function):
            mark_device(function)
    if kind == "function":
        return content[0]
    function, max_registers, block = content
    return Kernel(function, max_registers=max_registers, block=block)


def _with_globals(function: Any, variables: dict[str, Any]) -> Any:
    module = sys.modules.get(str(function.__module__))
    if module is None or function.__globals__ is not vars(module):
        # the globals arrived with the code, so only the code and its helpers use them
        function.__globals__.update(variables)
        return function
    scope = {**function.__globals__, **variables}
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def _device_functions(function: Any) -> list[Any]:
    """Return the device functions that a function calls. The agent must mark them as such, too."""
    found: dict[int, Any] = {}
    visited: set[int] = set()

    def visit(value: Any) -> None:
        value = getattr(value, "py_func", value)
        if not isinstance(value, types.FunctionType) or id(value) in visited:
            return
        visited.add(id(value))
        if str(value.__module__).partition(".")[0] == __package__.partition(".")[0]:
            return
        if is_device(value):
            found[id(value)] = value
        for name in names_of(value.__code__):
            visit(value.__globals__.get(name))
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                visit(cell.cell_contents)

    visit(function)
    return list(found.values())


def _culprit(function: Any) -> str | None:
    """Return the object that cannot be pickled, as text."""
    if not isinstance(function, types.FunctionType):
        return None
    scope = function.__globals__
    named = {name: scope[name] for name in sorted(names_of(function.__code__)) if name in scope}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            named[name] = cell.cell_contents
    for name, value in named.items():
        try:
            dumps(value)
        except Exception as error:
            return _culprit(value) or f"{name!r} ({type(value).__name__}) cannot be serialized: {error}"
    return None


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Pickle modules that are not installed packages by value, within a block."""
    pickling = cloudpickle()
    with _lock:
        added = []
        registered = pickling.list_registry_pickle_by_value()
        for name, module in sys.modules.copy().items():  # a copy, because a finalizer or a thread may import
            if name not in registered and _is_users(name, module):
                pickling.register_pickle_by_value(module)
                added.append(module)
        try:
            yield
        finally:
            for module in added:
                pickling.unregister_pickle_by_value(module)


_users: dict[str, bool] = {}


def _is_users(name: str, module: Any) -> bool:
    is_users = _users.get(name)
    if is_users is None:
        file = getattr(module, "__file__", None)
        # cloudpickle always sends __main__ by value, and identifies modules by their own names
        own = name == "__main__" or getattr(module, "__name__", None) != name
        path = Path(str(file)).absolute()
        is_users = bool(file) and not own and not any(path.is_relative_to(f) for f in (str(_PACKAGE), *_installed()))
        _users[name] = is_users
    return is_users


@functools.cache
def _installed() -> list[str]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    with contextlib.suppress(AttributeError):
        folders |= {*site.getsitepackages(), site.getusersitepackages()}
    # other folders with packages, such as from pip --target or of a second environment
    folders |= {path for path in sys.path if path and next(Path(path).glob("*.dist-info"), None) is not None}
    return sorted(folders)


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", None) or getattr(value, "__qualname__", None) or type(value).__name__)
