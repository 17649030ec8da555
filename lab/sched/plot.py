"""A picture of when each task occupied the device."""

from __future__ import annotations

import importlib
import os

from warpwell import errors
from warpwell._check import extra
from warpwell.scheduler.extend import Log
from warpwell.scheduler.report.timeline import residency_intervals

MAX_BARS = 5000
"""Maximum number of launches in a picture, because more bars would be too narrow."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's "bright" scheme."""


def require_matplotlib() -> None:
    """Import matplotlib; raise ArgumentError if it is not installed."""
    try:
        importlib.import_module("matplotlib.figure")  # optional, and slow
    except ImportError:
        message = f"a picture needs matplotlib; install {extra('demo')}"
        raise errors.ArgumentError(message, name="picture") from None


def draw(log: Log, path: str | os.PathLike[str]) -> None:
    """Plot when each task occupied the device, colored by tenant, or by kernel if there is only one tenant.

    The suffix of the path is the format: .png, .svg or .pdf. Raise ArgumentError if matplotlib is not installed, or
    the log has no launches, or too many.
    """
    listed = residency_intervals(log)
    if not 0 < len(listed) <= MAX_BARS:
        raise errors.ArgumentError(
            f"the log has {len(listed)} launches: a picture shows 1 to {MAX_BARS}. Take a part of it, or --trace-out, "
            "which has no limit",
            name="picture",
        )
    require_matplotlib()
    from matplotlib.figure import Figure

    by_tenant = len({interval.tenant for interval in listed}) > 1
    groups = list(dict.fromkeys(interval.tenant if by_tenant else interval.name for interval in listed))
    colors = {group: COLORS[k % len(COLORS)] for k, group in enumerate(groups)}
    lanes = max(interval.lane for interval in listed) + 1
    begin, end = min(s.start for s in listed), max(s.end for s in listed)
    unit, scale = ("s", 1.0) if end - begin >= 1 else ("ms", 1e3)

    figure = Figure(figsize=(12, 1.4 + 0.6 * lanes), layout="constrained")
    axes = figure.add_subplot()
    for group in groups:
        bars = [s for s in listed if (s.tenant if by_tenant else s.name) == group]
        axes.barh(
            [s.lane for s in bars],
            [(s.end - s.start) * scale for s in bars],
            left=[(s.start - begin) * scale for s in bars],
            height=0.8,
            color=colors[group],
            label=group,
            edgecolor="white",
            linewidth=0.3,
        )
    leaving = [(s, s.preempt_time) for s in listed if s.preempt_time is not None]
    if leaving:
        axes.barh(
            [s.lane for s, _ in leaving],
            [(s.end - preempt_time) * scale for s, preempt_time in leaving],
            left=[(preempt_time - begin) * scale for _, preempt_time in leaving],
            height=0.8,
            color="none",
            edgecolor="black",
            hatch="////",
            linewidth=0.3,
            label="leaving",
        )
    for interval in listed:
        if (interval.end - interval.start) > 0.04 * (end - begin):
            axes.text(
                (interval.start + interval.end - 2 * begin) / 2 * scale,
                interval.lane,
                f"{interval.name} {interval.task}",
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )
    axes.set_yticks(range(lanes), [f"place {k}" for k in range(lanes)])
    axes.set_xlabel(unit)
    axes.set_title(", ".join(f"{k} {v}" for k, v in log.about.items() if k in ("policy", "device", "seed")))
    if len(groups) <= 20:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise errors.ArgumentError(f"{path}: {error}: name it .png, .svg or .pdf", name="picture") from None
