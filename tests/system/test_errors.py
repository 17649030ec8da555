"""The exception tree: built-ins, messages, attributes, pickling, and the drawing in the docstring."""

import ast
import errno
import pickle
import re

import pytest
from tools import house

from warpwell import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]

BUILTIN = {
    "WarpwellError": Exception,
    "ArgumentError": ValueError,
    "DTypeError": TypeError,
    "FormatError": ValueError,
    "MissingFileError": FileNotFoundError,
    "ReadOnlyError": ValueError,
    "ClosedError": ValueError,
    "SharingError": ValueError,
    "DeviceNotFoundError": RuntimeError,
    "DriverBuildError": RuntimeError,
    "StorageFullError": OSError,
    "KernelError": RuntimeError,
    "IndexRangeError": IndexError,
    "MediumError": OSError,
    "StallError": TimeoutError,
    "ValueSizeError": ValueError,
    "SchemaError": TypeError,
    "CorruptionError": ValueError,
    "StoreVersionError": ValueError,
    "ForkError": ValueError,
    "KeyMissingError": KeyError,
    "StoreFailedError": OSError,
    "QuotaError": ValueError,
    "TransformError": ValueError,
    "SchedulerError": RuntimeError,
    "TaskLostError": RuntimeError,
    "TaskMemoryError": MemoryError,
    "TurnTimeoutError": TimeoutError,
    "ServiceError": ConnectionError,
    "MessageSizeError": ValueError,
    "PoolError": RuntimeError,
    "DeviceLostError": ConnectionError,
    "RemoteError": RuntimeError,
    "AgentError": RuntimeError,
    "PoolVersionError": RuntimeError,
    "CodeError": TypeError,
    "CompileError": TypeError,
    "DriveError": OSError,
    "DriveLostError": ConnectionError,
}

EXAMPLES = [
    errors.ArgumentError("m", name="page_size"),
    errors.FormatError("m", path="a.txt", row=3),
    errors.MissingFileError("m", path="a.npy"),
    errors.SharingError("m", path="a.npy"),
    errors.DeviceNotFoundError("m", device="cuda"),
    errors.DriveError("m", drive="0000:01:00.0", namespace=1, command="read", status=0x281, reasons=("swap",)),
    errors.StorageFullError("m", path="a.npy"),
    errors.KernelError("m", array="a", kernel="k"),
    errors.IndexRangeError("m", array="a", kernel="k", index=-1, size=0),
    errors.MediumError("m", array="a", kernel="k", page=1, lba=8, status=0x281),
    errors.StallError("m", array="a", kernel="k", seconds=2.5),
    errors.ValueSizeError("m", name="value", nbytes=1 << 25),
    errors.SchemaError("m", field="x"),
    errors.CorruptionError("m", path="a.kv", offset=64),
    errors.StoreVersionError("m", path="a.kv", version=9),
    errors.ForkError("m", path="a.kv"),
    errors.KeyMissingError("m", key=b"k"),
    errors.StoreFailedError("m", path="a.kv", code=28),
    errors.QuotaError("m", name="quota"),
    errors.TransformError("m", name="kernel", construct="barrier", line=3),
    errors.DriveLostError("m", drive="0000:04:00.0", namespace=1, command="read", status=0x371),
    errors.SchedulerError("m", task="t"),
    errors.TaskLostError("m", task="t"),
    errors.DeviceLostError("m", device=3),
    errors.RemoteError("m", call="launch of 'scale'", remote_traceback="Traceback"),
    errors.AgentError("m", agent="1 on node a"),
    errors.TaskMemoryError("m", task="t"),
    errors.TurnTimeoutError("m", device="gpu"),
    errors.ServiceError("m", task="t"),
    errors.MessageSizeError("m", task="t"),
]


def test_every_class_is_listed() -> None:
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)}
    assert defined == set(errors.__all__) == set(BUILTIN)


@pytest.mark.parametrize("cls", CLASSES)
def test_is_a_builtin_and_keeps_its_message(cls: type[Exception]) -> None:
    error = cls("what happened; what to do")
    assert isinstance(error, errors.WarpwellError)
    assert isinstance(error, BUILTIN[cls.__name__])
    assert str(error) == "what happened; what to do"
    assert error.args == ("what happened; what to do",)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_attributes_survive_pickling(error: Exception) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == "m"
    assert vars(back) == vars(error)
    assert all(value is not None for value in vars(error).values())
    assert getattr(back, "errno", None) == getattr(error, "errno", None)


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(TypeError, match=r"FormatError has no attributes \['line'\]"):
        errors.FormatError("m", line=3)


def test_the_package_sets_only_attributes_of_the_class() -> None:
    wrong = []
    for module in house.modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and (name := house.called_name(node)) in errors.__all__:
                keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
                unknown = keywords - getattr(errors, name)._attribute_names()
                wrong += [f"{module.path}:{node.lineno}: {name} has no {each}" for each in unknown]
    assert not wrong, "\n".join(wrong)


def test_system_errors_tell_their_number() -> None:
    assert errors.MissingFileError("m").errno == errno.ENOENT
    assert errors.StorageFullError("m").errno == errno.ENOSPC
    assert errors.MediumError("m").errno == errno.EIO
    assert errors.StallError("m").errno == errno.ETIMEDOUT


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│ ├└─]*)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            del stack[depth:]
            drawn[match[2]] = stack[-1] if stack else "Exception"
            stack.append(match[2])
    actual = {}
    for cls in CLASSES:
        actual[cls.__name__] = cls.__bases__[0].__name__
    assert drawn == actual
