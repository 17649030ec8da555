"""Reads and writes: the benchmarks `readwrite` and `vectoradd`. Times include the flush that makes writes durable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from . import kernels
from .ceilings import medium_rate, numpy_rate
from .figures import Report, Row, require_same, seconds
from .reads import Items, Sources, rows_of, run_of, sources
from .setting import Setting


@contextlib.contextmanager
def target(setting: Setting) -> Iterator[Sources]:
    """Yield a writable array of zeros, with the memory that BaM's protocol and raw stores write to."""
    data = np.zeros(setting.items, np.int64)
    with setting.opened(data, mode="r+") as array:
        yield Sources(setting, array, data, setting.cache)


def written(setting: Setting, launch: Callable[[], None], arrays: Sequence[Sources], means: str) -> float:
    """Return the launches a second, each with empty caches at its start and all written at its end."""

    def call() -> None:
        launch()
        for source in arrays:
            if means == "BaM" and source.bam is not None:
                source.bam.flush()
            elif means != "raw" and source.array.writable:
                source.array.flush()

    def before() -> None:
        for source in arrays:
            source.forget()

    times = seconds(call, setting.runs, before)
    for source in arrays:
        if source.bam is not None:
            source.bam.check()
    return 1 / times


def check(setting: Setting, name: str, means: str, into: Sources, expected: Items) -> None:
    """Raise unless the target holds the items; then clear it for the next means."""
    if means == "raw":
        found = into.copy.read(0, expected.nbytes).view(np.int64)
    elif setting.cached:
        found = into.array.medium.read(0, expected.nbytes).view(np.int64)
    else:
        found = np.asarray(into.array[:])
    require_same(f"{name} by {means}", found, expected)
    if means != "raw" and setting.cached:
        into.array.medium.write(0, np.zeros_like(expected))
        into.forget()
    elif means != "raw":
        into.array[:] = 0


def vectoradd(setting: Setting) -> Report:
    """Store the sums of two arrays in a third."""
    with sources(setting, resident=False) as a, sources(setting, resident=False) as b, target(setting) as c:
        amount = 3 * setting.nbytes / 1e9
        rates = _rates("vectoradd", setting, c, [a, b], a.data + b.data)
        memory = 3 * numpy_rate(lambda: np.add(a.data, b.data), setting.nbytes, setting.runs) / 1e9
        rows = rows_of("c = a + b", rates, amount, _medium(setting, a.data, 2, 1), numpy_in_memory=memory)
    return Report("vectoradd", "GB/s", setting.where(), rows, setting.emulated)


def readwrite(setting: Setting) -> Report:
    """Copy an array to another, by kernels and by the host."""
    with sources(setting, resident=False) as a, target(setting) as c:
        amount = 2 * setting.nbytes / 1e9
        rates = _rates("readwrite", setting, c, [a], a.data)
        medium = _medium(setting, a.data, 1, 1)
        rows = rows_of("copy by a kernel", rates, amount, medium)

        def by_host() -> None:
            c.array[:] = a.array[:]
            c.array.flush()

        def forget() -> None:
            a.forget()
            c.forget()

        times = seconds(by_host, setting.runs, forget)
        check(setting, "readwrite", "host", c, a.data)
        rows.append(Row("copy by the host", amount / times, rows[0].ceiling, rows[0].by))
    return Report("readwrite", "GB/s", setting.where(), rows, setting.emulated)


def _rates(name: str, setting: Setting, into: Sources, operands: list[Sources], expected: Items) -> dict[str, float]:
    first, last = operands[0], operands[-1]
    rates = {}
    for means in into.means(spans=True):
        kernel = kernels.vectors(means, len(operands))

        def launch(kernel: object = kernel) -> None:
            kernel[setting.threads](  # type: ignore[index]
                *into.source_arguments,
                *first.source_arguments,
                *last.source_arguments,
                setting.items,
                run_of(setting),
                setting.threads,
                device=setting.device,
            )

        rates[means] = written(setting, launch, [into, *operands], means)
        check(setting, name, means, into, expected)
    return rates


def _medium(setting: Setting, data: Items, reads: int, writes: int) -> float | None:
    """Return the GB a second of media that do the given numbers of reads and writes of a page, and no other work."""
    if not setting.cached:
        return None
    order = np.arange(setting.pages)
    slow = reads / medium_rate(setting, data, order) + writes / medium_rate(setting, data, order, write=True)
    return (reads + writes) * setting.page_size / slow / 1e9
