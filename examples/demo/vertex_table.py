"""The query and the training of the demo: both read rows of a table that has a row for each vertex."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell import table, train
from warpwell.errors import WarpwellError
from warpwell.graph import Graph

WIDTH, CLASSES, BATCH, STEPS, SEED = 32, 3, 256, 60, 7


def write(folder: Path, graph: Graph, levels: NDArray[np.int64]) -> tuple[Path, dict[str, NDArray[Any]]]:
    """Write the table; return its path, and its columns in memory.

    Features depend weakly on the label, which is the level of the search: 0 and 1, 2, or later and never.
    """
    import pyarrow as pa

    rng = np.random.default_rng(SEED)
    label = np.where(levels < 0, CLASSES - 1, np.clip(levels - 1, 0, CLASSES - 1)).astype(np.int8)
    features = rng.standard_normal((graph.vertices, WIDTH), np.float32)
    features += np.eye(CLASSES, WIDTH, dtype=np.float32)[label]
    columns: dict[str, NDArray[Any]] = {
        "level": levels.astype(np.int16),
        "degree": np.diff(graph.load()[0]).astype(np.int32),
        "label": label,
        "features": features,
    }
    lists = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), WIDTH)
    frame = pa.table({**columns, "features": lists})
    table.convert(frame, folder / "vertices.ww").close()
    return folder / "vertices.ww", columns


def query(path: Path, columns: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Take the features of the vertices of one level that have the most edges; compare them with NumPy's."""
    at_level = columns["level"] == 2
    degrees = np.sort(columns["degree"][at_level])
    min_degree = int(degrees[-min(100, len(degrees))])
    filters = [("level", "==", 2), ("degree", ">=", min_degree)]
    with table.open(path, device="cpu") as vertices:
        began = time.perf_counter()
        found = vertices.where(filters)
        features = found.take(["features"]).numpy()["features"]
        seconds = time.perf_counter() - began
        reads = found.explain()
    expected = np.flatnonzero(at_level & (columns["degree"] >= min_degree))
    if not (np.array_equal(found.numpy(), expected) and np.array_equal(features, columns["features"][expected])):
        raise WarpwellError("the query's rows differ from NumPy's: please report this with `warpwell info`")
    return {
        "filters": filters,
        "rows": len(found),
        "seconds": seconds,
        "table_bytes": sum(column.nbytes for column in columns.values()),
        "bytes_wanted": sum(read.wanted for read in reads),
        "bytes_read": sum(read.read for read in reads),
    }


def learn(path: Path, graph: Graph, columns: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Train on sampled neighbors, from storage and from memory: the losses have to be equal, bit for bit."""
    neighbors = train.Neighbors(graph, fanouts=[8], batch_size=BATCH, seed=SEED)
    names = ["features", "label"]
    steps = min(STEPS, len(neighbors))
    began = time.perf_counter()
    stored = train.Dataset(str(path), columns=names)
    try:
        losses = _losses(neighbors, stored, steps)
    finally:
        stored.close()
    seconds = time.perf_counter() - began
    if losses != _losses(neighbors, train.Dataset({name: columns[name] for name in names}), steps):
        raise WarpwellError("losses from storage and memory differ: please report this with `warpwell info`")
    return {"steps": steps, "batch_size": BATCH, "seconds": seconds, "losses": losses}


def _losses(neighbors: train.Neighbors, data: train.Dataset, steps: int) -> list[float]:
    """Return the loss of each step of a linear model that sees a vertex and the mean of its sampled neighbors."""
    weights, losses = np.zeros((2 * WIDTH, CLASSES)), []
    for number in range(steps):
        batch = neighbors[number]
        rows = data.take(batch.nodes)
        total, count = np.zeros((batch.batch_size, WIDTH)), np.bincount(batch.targets, minlength=batch.batch_size)
        np.add.at(total, batch.targets, rows["features"][batch.sources])
        inputs = np.hstack([rows["features"][: batch.batch_size], total / np.maximum(count, 1)[:, None]])
        labels = rows["label"][: batch.batch_size]
        raw = inputs @ weights
        share = np.exp(raw - raw.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        losses.append(float(-np.log(share[np.arange(len(labels)), labels]).mean()))
        weights -= 0.5 / len(labels) * inputs.T @ (share - np.eye(CLASSES)[labels])
    return losses
