"""`reason_of`: why a kernel does not compile, in the words of Python, from an error of Numba.

Numba reports a tree of attempts with the types of its compiler. The user needs the innermost error, its line of source
and what to write instead.
"""

from __future__ import annotations

import dis
import linecache
import os
import re
from collections.abc import Callable
from typing import Any

from .bytecode import functions_of, instructions_of, is_primitive, line_of

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_HEADS = ("Failed in ", "Rejected as the implementation raised")
_MISSING = "No implementation of function"

type_names: dict[str, str] = {}
"""The words for types of structs in messages, by the compiler's name of the type."""

_Location = tuple[str, int]
"""A file and a line."""


def reason_of(error: BaseException, function: Any) -> str:
    """Return why a kernel's function does not compile: what is wrong, what to write instead, and the line of source."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    message, location = _innermost(text)
    location = _location_in(text) or location
    message = _readable(message)
    for pattern, wording in _WORDINGS.items():
        if (found := re.search(pattern, message)) is not None:
            message = found.expand(wording) if isinstance(wording, str) else wording(found)
            break
    location = location or _search(function, text) or (function.__code__.co_filename, function.__code__.co_firstlineno)
    return f"{message} ({_source(*location)})"


def _innermost(text: str) -> tuple[str, _Location | None]:
    """Return the innermost message of an error of Numba, with its location in the user's code."""
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    messages: list[str] = []
    open_calls: list[str] = []
    missing: str | None = None
    location: _Location | None = None
    is_head = True  # the first line may be the whole message
    for k, row in enumerate(rows):
        content = re.sub(r"^\w*Error: (?=Failed in )", "", row)
        if content.startswith(_HEADS):
            is_head = True
            continue
        if content.startswith(_MISSING) and k + 1 < len(rows):
            open_calls.append(rows[k + 1].removeprefix(">>>").strip())
        elif is_head:
            messages.append(re.sub(r"^(TypingError|NumbaTypeError|UnsupportedError): ", "", content))
        is_head = False
        during = re.match(r"During: typing of .* at (.*) \((\d+)\)$", content)
        if during is not None:
            call = open_calls.pop() if open_calls else None
            if location is None and not during[1].startswith((_PACKAGE, "<")):
                location, missing = (during[1], int(during[2])), call
    if messages:
        return messages[-1], location
    missing = missing or (open_calls[-1] if open_calls else None)
    return (f"there is no {missing}" if missing else rows[0] if rows else "no reason is given"), location


def _location_in(text: str) -> _Location | None:
    """Return the first location in the user's code that a message names."""
    for path, line in re.findall(r'(?:File "|Raised from )(.+?)(?:", line | \()(\d+)', text):
        path = os.path.abspath(path)
        if not path.startswith(_PACKAGE) and os.path.exists(path):
            return path, int(line)
    return None


def _search(function: Any, text: str) -> _Location | None:
    """Return the location of a statement for which Numba names none."""
    name = re.search(r"name '(\w+)' is not defined|has no attribute '(\w+)'", text)
    if name is not None:
        return _find(function, lambda instruction: instruction.argval in name.groups())
    operations = ("BUILD_SLICE", "BINARY_SLICE", "STORE_SLICE") if "slice" in text else ("BEFORE_WITH", "LOAD_SPECIAL")
    return _find(function, lambda instruction: instruction.opname in operations)


def _find(function: Any, is_wanted: Callable[[dis.Instruction], bool]) -> _Location | None:
    for each in functions_of(function):
        if not is_primitive(each):
            for instruction, _, _ in instructions_of(each):
                if is_wanted(instruction) and (line := line_of(instruction)) is not None:
                    return each.__code__.co_filename, line
    return None


def _source(path: str, line: int) -> str:
    """Return a location with its line of source."""
    text = linecache.getline(path, line).strip()
    return f"{path}, line {line}" + (f": `{text}`" if text else "")


def _readable(message: str) -> str:
    """Return a message that names types as Python does."""
    for name in sorted(type_names, key=len, reverse=True):
        message = message.replace(name, type_names[name])
    message = re.sub(r"Literal\[str\]\((.*?)\)", r"'\1'", message)
    message = re.sub(r"Literal\[\w+\]\((.*?)\)", r"\1", message)
    message = re.sub(r"slice<a:b(:c)?>", "slice", message)
    message = re.sub(r"\bTuple\(", "(", message)
    message = re.sub(r"UniTuple\((\w+) x (\d+)\)", lambda m: f"({', '.join([m[1]] * int(m[2]))})", message)
    message = message.replace("unicode_type", "str").replace("reflected list", "list").replace("<iv=None>", "")
    return re.sub(r": i\d+ %\S+$", "", message)


def index_problem(types_of_index: str) -> str:
    """Return why an index is refused, from the names of its types."""
    if "slice" in types_of_index:
        return (
            "a kernel subscripts one item of an array on storage, and a slice is not an index; loop over a[i, j], or "
            "use gpu.fold for a run of items"
        )
    got = f"an index must be an integer, got {_readable(types_of_index)}"
    return f"{got}; divide with //, or convert with int(...)" if "float" in types_of_index else got


_GPU_NAMES = {
    "threadIdx": "thread_index",
    "blockIdx": "block_index",
    "blockDim": "block_threads",
    "syncthreads": "barrier",
    "laneid": "lane_id",
    "warpsize": "warp_size",
    "shared": "shared_array",
    "atomic": "atomic_add",
}
"""Names of `numba.cuda`, and those of `warpwell.gpu` for the same."""

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "eq": "=="}

_NAMED = r"Untyped \w+ name '(\w+)'.*<class '(?:\w+\.)*"
_OPCODE = r"unsupported opcode \("

_WORDINGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    _NAMED + "function'>": r"'\1' is a Python function and not device code; put @gpu.function above its def",
    _NAMED + "Kernel'>": r"'\1' is a kernel, and a kernel calls device functions only; "
    "write the common part with @gpu.function",
    _NAMED + "builtin_function_or_method'>": r"'\1' is not available in kernels",
    _NAMED + "type'>": r"'\1' is a class, which kernels cannot read; assign its values to global variables",
    _NAMED + r"(\w+)'>": r"'\1' is a \2, which kernels cannot read; pass its values as arguments, or as a NumPy array",
    r"The use of a .*? type, assigned to variable '(\w+)'": r"'\1' is a list, which kernels cannot read; "
    "make it a tuple, or pass it as a NumPy array",
    r"name '(\w+)' is not defined": r"name '\1' is not defined; define or import it before the launch",
    rf"module '([\w.]+\.gpu)' has no attribute '({'|'.join(_GPU_NAMES)})'": lambda m: (
        f"{m[0]}; use gpu.{_GPU_NAMES[m[2]]}, or gpu.grid for the index of a launch"
    ),
    r"module '([\w.]+)' has no attribute '(\w+)'": r"\g<0>",
    _OPCODE + "IMPORT_NAME": "a kernel cannot import; move the import to the top of the file",
    _OPCODE + "STORE_GLOBAL": "a kernel cannot assign a global variable; write to an array that is an argument",
    _OPCODE + "DELETE_GLOBAL": "a kernel cannot delete a global variable",
    _OPCODE + "LOAD_BUILD_CLASS": "a kernel cannot define a class; define it at the top of the file",
    _OPCODE + r"(\w+)\)": r"kernels cannot use this statement (\1); see the Python that Numba compiles",
    "The 'with ": "a kernel cannot use a with statement; open files and locks on the host",
    "Exception matching is limited": "a kernel cannot catch exceptions of a class; device code never raises, "
    "so test with if",
    r"Unsupported array index type (.*) in \[": lambda m: index_problem("str" if "str" in m[1] else m[1]),
    r"cannot index (array\(.*?\)) with (\d+) indices": r"\2 indices for an \1: pass one integer for each dimension",
    r"Unknown attribute '(\w+)' of type Module\(<module '([\w.]+)'": r"module '\2' has no '\1' that kernels can use",
    r"^(.*Unknown attribute '\w+' of type storage array.*)$": r"\1; kernels use a[i, j], len(a), a.shape, a.size "
    "and gpu.fold",
    r"Invalid use of getiter with parameters \((.*)\)$": r"a kernel cannot iterate over \1; "
    "loop over range(...) and subscript it",
    r"Cannot unify (.*) and (.*) for '(\w+?)(?:\.\d+)?', defined at": r"variable '\3' is \1 or \2; "
    "a variable of a kernel has one type",
    r"Cannot resolve setattr: \((.*)\)\.(\w+) = ": r"a kernel cannot assign attribute '\2' of \1",
    r"Cannot bind 'args=.*' to signature '(\(.*\)).*' due to \"TypeError: (.*)\"": lambda m: (
        f"{m[2]} for a function with the parameters " + re.sub(": '.*?'", "", m[1])
    ),
    r"Variable '(\w+?)(?:\.\d+)?' is not defined": r"variable '\1' is read before it has a value",
    rf"there is no ({'|'.join(_SYMBOLS)})\((.*)\)$": lambda m: f"{_SYMBOLS[m[1]]} does not take ({m[2]})",
    r"there is no setitem\((.*)\)$": r"an item cannot be stored: no assignment takes (array, index, value) of (\1)",
    r"there is no (\w+)\((.*)\)$": r"there is no \1(\2); see the Python and NumPy functions that Numba compiles",
}
"""Replacements for messages of Numba, by pattern; the first pattern that is found counts."""
