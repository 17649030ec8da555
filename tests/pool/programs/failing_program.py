"""Raises out of a function that a device's result went to."""

import warpwell as ww

print(len(ww.to_device([1.0, 2.0]).copy_to_host()))


def outer(value):
    return inner(value) + 1


def inner(value):
    raise ValueError(value)


try:
    outer("first")
except ValueError as error:
    raise RuntimeError("second") from error
