"""Draw the figures of benchmarks: each rate, and that of BaM's protocol, as a share of the ceiling."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from warpwell.cli.arguments import new_file
from warpwell.errors import ArgumentError
from warpwell.errors.general import extra
from warpwell.study.bench import Report


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
    from matplotlib.patches import Patch

    columns = min(3, len(reports))
    lines = -(-len(reports) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis, report in zip(axes.flat, reports, strict=False):
        axis.axvline(1, color="black", linewidth=1)
        for place, row in enumerate(report.rows):
            for shift, color, rate in ((-0.2, "tab:blue", row.rate), (0.2, "tab:orange", row.bam)):
                if rate is not None and row.ceiling:
                    axis.barh(place + shift, rate / row.ceiling, height=0.38, color=color)
                    label = axis.text(rate / row.ceiling, place + shift, f" {rate:.3g}", va="center", fontsize=7)
                    label.set_in_layout(False)  # a label far beyond the ceiling would leave no room for the axes
        axis.set_yticks(range(len(report.rows)), [row.what for row in report.rows])
        axis.invert_yaxis()
        axis.set_xlim(0, max(1.2, *(1.2 * row.rate / row.ceiling for row in report.rows if row.ceiling)))
        axis.set_xlabel(f"share of the ceiling; figures: {report.unit}{' (emulated)' if report.emulated else ''}")
        axis.set_title(report.name)
    for axis in axes.flat[len(reports) :]:
        axis.set_visible(False)
    known = [Patch(color="tab:blue", label="Warpwell"), Patch(color="tab:orange", label="BaM's protocol")]
    figure.legend(handles=known, loc="outside lower center", ncols=2)
    figure.savefig(path)
    pyplot.close(figure)
