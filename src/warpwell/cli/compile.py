"""``warpwell compile``: compiles Warpwell's own code beforehand; otherwise, each feature compiles it at first use."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from ._common import Commands, add_command, json_option, output_of


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``compile``."""
    text = "compile the code of arrays, key-value stores, graphs and tables before their first use"
    json_option(add_command(commands, "compile", compile_code, text))


def compile_code(arguments: argparse.Namespace) -> int:
    """Use each feature on little data and the default device, and print the folder of the compiled code."""
    import tempfile

    from ..targets.compiler import cache_folder

    output, started = output_of(arguments), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, output.progress() as report:
        for done, feature in enumerate(_used_features(Path(folder))):
            report("compile", done, 7, feature)
    output.result("Compiled code", {"seconds": time.perf_counter() - started, "folder": str(cache_folder())})
    return 0


def _used_features(folder: Path) -> Iterator[str]:
    """Yield the name of each of seven steps, then run the step. Without their extra, tables are skipped."""
    import importlib.util

    import numpy as np

    from .. import array, graph, kv, table
    from ..array.gather import gather

    yield "arrays"
    np.save(folder / "array.npy", np.zeros((1024, 2)))
    with array.open_array(folder / "array.npy", mode="r+", cache="64KiB") as rows:
        rows[:2] = rows[2:4]
        gather(rows, [0, 9]).result()
    yield "key-value stores"
    with kv.create(folder / "records.kv", schema={"number": "int64", "name": "str"}) as records:
        records.put_many([1, 2], {"number": [2, 3], "name": ["two", "three"]})
        records.commit()
        records.get_many([1, 2])
    with kv.create(folder / "bytes.kv") as store:
        store["key"] = b"value"
        store.put_many([1, 2], np.zeros((2, 8), np.uint8))
    with kv.open(folder / "bytes.kv") as store:
        store["key"], store.get_many([1, 2])
    edges = graph.generate("kron", 10, folder / "kron.ww", weights="int32")
    # in memory, and with a cache of some or all edges: each of these uses other kernels
    for cache, stats in ((None, None), ("64KiB", None), ("1MiB", None), ("64KiB", "full")):
        yield "graphs"
        with graph.LoadedGraph(edges, cache=cache, stats=stats) as loaded:
            graph.bfs(loaded, 0), graph.sssp(loaded, 0)
            graph.connected_components(loaded), graph.pagerank(loaded), graph.triangles(loaded)
    yield "tables"
    if importlib.util.find_spec("pyarrow") is not None:
        import pyarrow as pa

        table.convert(pa.table({"number": np.arange(10_000)}), folder / "table.ww").close()
        with table.open(folder / "table.ww") as numbers:
            numbers.where([("number", "<", 9)]).take()
