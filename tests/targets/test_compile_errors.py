"""What does not compile is reported in the words of Python, with the line of source and what to write instead."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors, gpu

TABLE = [1, 2]
NAMES = {"a": 1}


class Settings:
    FACTOR = 2


SETTINGS = Settings()


def helper(x):
    return x + 1


@gpu.function
def calls_helper(x):
    return helper(x) * 2


@ww.kernel
def another(a, out):
    out[0] = 1


CASES = {
    "out[0] = a[0, :].sum()": "a slice is not an index; loop over a",
    "out[0] = a[0:2, 0]": "a slice is not an index",
    "a[0, :] = 1": "a slice is not an index",
    "out[0] = a[gpu.grid(1) / 2, 0]": r"an index must be an integer, got \(float64, 0\); divide with //",
    "a[gpu.grid(1) / 2, 0] = 1": "an index must be an integer",
    "out[gpu.grid(1) / 2] = 1": "an index must be an integer, got float64; divide with //",
    "out[0] = out['x']": "an index must be an integer, got 'x'",
    "out[0] = a['x']": "no field 'x'",
    "out[0] = a[None, 0]": r"an index must be an integer, got \(none, 0\)",
    "out[0] = a[0]": r"1 index for an array of 2 dimensions.*; loop over a\[i, j\]",
    "out[0] = a[0, 0, 0]": "3 indices for an array of 2 dimensions",
    "out[0, 0] = 1": r"2 indices for an array\(float64, 1d, C\)",
    "out[0] = helper(a[0, 0])": "'helper' is a Python function and not device code; put @gpu.function above",
    "out[0] = calls_helper(a[0, 0])": "'helper' is a Python function",
    "another(a, out)": "'another' is a kernel",
    "import math": "a kernel cannot import; move the import to the top",
    "from math import sin": "a kernel cannot import",
    "global TABLE; TABLE = 3": "a kernel cannot assign a global variable",
    "out[0] = nowhere(1)": "name 'nowhere' is not defined",
    "out[0] = ww.nowhere(1)": "module 'warpwell' has no attribute 'nowhere'",
    "out[0] = gpu.threadIdx.x": "module 'warpwell.gpu' has no attribute 'threadIdx'; use gpu.thread_index, or gpu.grid",
    "out[0] = np.nowhere(1)": "module 'numpy' has no '?nowhere|has no attribute 'nowhere'",
    "out[0] = eval('1')": "'eval' is not available in kernels",
    "out[0] = TABLE[0]": "'TABLE' is a list, which kernels cannot read",
    "out[0] = NAMES['a']": "'NAMES' is a dict",
    "out[0] = SETTINGS.FACTOR": "'SETTINGS' is a Settings",
    "out[0] = Settings.FACTOR": "'Settings' is a class",
    "out[0] = a.mean()": r"Unknown attribute 'mean' of type storage array\(<f8, 2d\); kernels use",
    "out[0] = (a + 1)[0, 0]": r"\+ does not take \(storage array",
    "for x in a: out[0] = 1": "a kernel cannot iterate over storage array",
    "a.x = 3": "a kernel cannot assign attribute 'x' of storage array",
    "out[0] = calls_helper(1, 2)": r"too many positional arguments for a function with the parameters \(x\)",
    "out[0] = gpu.grid()": r"missing a required argument: 'ndim' for a function with the parameters \(ndim\)",
    "out[0] = gpu.grid(1, 2)": r"too many positional arguments for a function with the parameters \(ndim\)",
    "gpu.barrier(1)": r"too many positional arguments for a function with the parameters \(\)",
    "gpu.fill(out)": r"missing a required argument: 'target' for .* \(f, target, lo, hi, \*args\)",
    "gpu.fold(out)": r"missing a required argument: 'start' for .* \(f, start, source, lo, hi, \*args\)",
    "out[0] = gpu.failed(1)": r"too many positional arguments for a function with the parameters \(\) \(",
    "out[0] = gpu.reduce_warp(1)": r"missing a required argument: 'value' for .* parameters \(f, value\)",
    "out[0] = late; late = 1": "variable 'late' is read before it has a value",
    "with open('x') as f: out[0] = 1": "a kernel cannot use a with statement",
    "class Inner: pass": "a kernel cannot define a class",
    "try: out[0] = 1\n    except ValueError: pass": "a kernel cannot catch exceptions of a class",
}


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("errors") / "a.npy"
    np.save(path, np.ones((10, 4)))
    with ww.open(path, "r+", device="cpu", cache="64KiB") as a:
        yield a


def kernel_of(statement: str, folder: Path) -> Any:
    path = folder / "user_kernel.py"
    source = f"def user_kernel(a, out):\n    {statement}\n"
    path.write_text(source)
    scope = {name: value for name, value in globals().items() if name != "__name__"}
    exec(compile(source, str(path), "exec"), scope)
    return ww.kernel(scope["user_kernel"])


def reported(call: Any) -> str:
    with pytest.raises(errors.CompileError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and caught.value.__cause__ is None and caught.value.__context__ is not None
    internal = (
        r"ViewStatic|Literal\[|slice<|unicode_type|Untyped|opcode|typing|nopython|<class|reflected|getitem|\(step"
    )
    assert not re.search(internal, text), text
    return text


@pytest.mark.parametrize("statement", CASES)
def test_a_message_names_the_kernel_the_line_and_the_remedy(statement: str, array: Any, tmp_path: Path) -> None:
    kernel = kernel_of(statement, tmp_path)
    text = reported(lambda: kernel[10](array, np.zeros(10)))
    assert re.search(CASES[statement], text), text
    assert text.startswith("kernel 'user_kernel' does not compile for 'cpu': ")
    location = "calls_helper" if "'helper'" in text and "calls" in statement else "user_kernel.py, line "
    assert location in text or "test_compile_errors.py, line " in text, text


@pytest.mark.parametrize("device", ["cpu", "interp"])
@pytest.mark.parametrize(
    "statement", ["return a[0, 0]", "return 1", "return out", "out[0] = 1; return (1 if out[0] else 2)"]
)
def test_a_kernel_that_returns_a_value_is_refused(statement: str, device: str, array: Any, tmp_path: Path) -> None:
    kernel = kernel_of(statement, tmp_path)
    with pytest.raises(errors.ArgumentError, match=r"user_kernel.py, line 2\) returns a value, .* write it"):
        kernel[10](array, np.zeros(10), device=device)


@pytest.mark.parametrize("statement", ["return", "return None", "if out[0] == 2: return\n    out[1] = 5"])
def test_a_kernel_may_return_early(statement: str, array: Any, tmp_path: Path) -> None:
    kernel_of(statement, tmp_path)[10](array, np.zeros(10))


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_path_is_no_argument(device: str, tmp_path: Path) -> None:
    for path in (tmp_path / "x.npy", str(tmp_path / "x.npy")):
        with pytest.raises(errors.ArgumentError, match=r"'a' of kernel 'another' is a .*: open a file with ww.open"):
            another[10](path, np.zeros(10), device=device)


@pytest.mark.ptx
@pytest.mark.parametrize("statement", ["out[0] = a[0, :].sum()", "import math", "out[0] = helper(a[0, 0])"])
def test_messages_are_the_same_for_a_gpu(statement: str, array: Any, tmp_path: Path) -> None:
    from warpwell.targets.compiler.run_cuda import ptx

    kernel = kernel_of(statement, tmp_path)
    text = reported(lambda: ptx(kernel, (array.view(), np.zeros(10))))
    assert re.search(CASES[statement], text) and "for 'cuda'" in text and "user_kernel.py, line 2" in text, text


@pytest.mark.parametrize("device", ["cpu", "interp"])
def test_a_generator_is_no_kernel(device: str) -> None:
    @ww.kernel
    def generates(out):
        yield 1

    with pytest.raises(errors.ArgumentError, match=r"'generates' .*is a generator"):
        generates[1](np.zeros(1), device=device)
