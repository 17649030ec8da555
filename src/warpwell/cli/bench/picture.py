"""Draw the figures of benchmarks: each rate beside its ceiling and BaM's protocol."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...errors import ArgumentError
from ...errors.general import extra
from ...study.bench import Report
from ..arguments import new_file


def has_matplotlib() -> bool:
    """Tell whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def checked_picture(name: str) -> Path:
    """Return the path of a picture, checked before anything is measured."""
    picture = new_file(name, "--out")
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"--out {picture}: give a name that ends in .png, .svg or .pdf")
    if not has_matplotlib():
        raise ArgumentError(f"pictures need matplotlib: install {extra('demo')}")
    return picture


def draw(path: Path, reports: Sequence[Report]) -> None:
    """Draw a panel for each benchmark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(reports))
    lines = -(-len(reports) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis, report in zip(axes.flat, reports, strict=False):
        places = range(len(report.rows))
        for shift, label, values in (
            (-0.27, "ceiling", [row.ceiling for row in report.rows]),
            (0.0, "Warpwell", [row.rate for row in report.rows]),
            (0.27, "BaM's protocol", [row.bam for row in report.rows]),
        ):
            known = [(k + shift, value) for k, value in zip(places, values, strict=True) if value is not None]
            axis.barh([k for k, _ in known], [value for _, value in known], height=0.25, label=label)
        axis.set_yticks(list(places), [row.what for row in report.rows])
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel(f"{report.unit}{' (emulated)' if report.emulated else ''}")
        axis.set_title(report.name)
    for axis in axes.flat[len(reports) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path)
    pyplot.close(figure)
