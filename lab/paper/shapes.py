"""Shapes of curves as checks that can fail: monotonic, linear, saturating, crossing, ordered, within a factor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes
    ----------
    claim : str
        The document's statement, as text.
    agrees : bool
    found : str
        The measured values that decided it.
    """

    claim: str
    agrees: bool
    found: str


def rises(claim: str, values: Sequence[float], tolerance: float = 0.05) -> Check:
    """Check that no value is below the largest earlier value by more than `tolerance` (relative)."""
    largest, agrees = -math.inf, len(values) > 1 and _finite(values)
    for value in values:
        agrees = agrees and value >= largest * (1 - tolerance)
        largest = max(largest, value)
    return Check(claim, agrees and values[-1] > values[0], numbers(values))


def falls(claim: str, values: Sequence[float], tolerance: float = 0.05) -> Check:
    """Check that no value is above the smallest earlier value by more than `tolerance` (relative)."""
    smallest, agrees = math.inf, len(values) > 1 and _finite(values)
    for value in values:
        agrees = agrees and value <= smallest * (1 + tolerance)
        smallest = min(smallest, value)
    return Check(claim, agrees and values[-1] < values[0], numbers(values))


def linear(claim: str, xs: Sequence[float], ys: Sequence[float], efficiency: float) -> Check:
    """Check that every y, over a line through the first point and the origin, is from `efficiency` to its inverse."""
    parts = [y * xs[0] / (x * ys[0]) if ys[0] > 0 else math.nan for x, y in zip(xs, ys, strict=True)]
    agrees = len(parts) > 1 and all(efficiency <= part <= 1 / efficiency for part in parts)
    return Check(claim, agrees, f"of linear: {numbers(parts)}")


def saturation(xs: Sequence[float], ys: Sequence[float], flat: float = 0.1) -> float:
    """Return the first x at which y has reached all but `flat` of the largest y."""
    limit = (1 - flat) * max(ys)
    return next(x for x, y in zip(xs, ys, strict=True) if y >= limit)


def saturates(
    claim: str, xs: Sequence[float], ys: Sequence[float], *, at: float, factor: float, flat: float = 0.1
) -> Check:
    """Check that y rises up to a point within `factor` of `at`, and is constant from there on, up to twice `flat`."""
    if not _finite(ys):
        return Check(claim, False, numbers(ys))
    point = saturation(xs, ys, flat)
    after = [y for x, y in zip(xs, ys, strict=True) if x >= point]
    agrees = xs[0] < point and at / factor <= point <= at * factor and len(after) > 1
    agrees = agrees and min(after) >= (1 - 2 * flat) * max(after)
    return Check(claim, agrees, f"flat from {point:g} on (document {at:g}): {numbers(ys)}")


def ratio(claim: str, value: float, document: float, factor: float) -> Check:
    """Check that a value is within a factor of the document's."""
    agrees = math.isfinite(value) and document / factor <= value <= document * factor
    return Check(claim, agrees, f"{value:.3g}, document {document:.3g}, allowed factor {factor:g}")


def between(claim: str, value: float, low: float = -math.inf, high: float = math.inf) -> Check:
    """Check that a value is in a range."""
    bounds = [f"at least {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []
    return Check(claim, low <= value <= high, f"{value:.3g} ({', '.join(bounds)})")


def crosses(claim: str, xs: Sequence[float], first: Sequence[float], second: Sequence[float], by: float) -> Check:
    """Check that `first` is below `second` at some x of at most `by` and at every larger x."""
    below = [a < b for a, b in zip(first, second, strict=True)]
    point = next((x for k, x in enumerate(xs) if all(below[k:])), math.inf)
    return Check(claim, point <= by, f"from {point:g} on (at most {by:g})")


def ordered(claim: str, values: Mapping[str, float], order: Sequence[str], tolerance: float = 0.0) -> Check:
    """Check that values descend in an order of names, up to `tolerance` (relative)."""
    found = [values[name] for name in order]
    agrees = _finite(found) and all(a >= b * (1 - tolerance) for a, b in itertools.pairwise(found))
    return Check(claim, agrees, ", ".join(f"{name} {values[name]:.3g}" for name in order))


def equal(claim: str, value: object, document: object) -> Check:
    """Check that two values are equal."""
    return Check(claim, value == document, f"{value}" if value == document else f"{value}, document {document}")


def numbers(values: Sequence[float]) -> str:
    """Return values in short form, separated by spaces."""
    return " ".join(f"{value:.3g}" for value in values)


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)
