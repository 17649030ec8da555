"""Graphs whose edges are stored on a drive that QEMU emulates: kernels and SciPy agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csgraph, csr_array
from tests.harness.drives import needs_qemu

import warpwell as ww
from lab.drives.qemu import QemuDrive, QemuNamespace
from warpwell import errors
from warpwell.drives import Drive, DriveMedium
from warpwell.graph import Graph, LoadedGraph, bfs, connected_components, generate

pytestmark = needs_qemu
SHAPES = {"interp": (6, 4), "cpu": (18, 16)}
"""Scale and degree of the graph for a device."""


PAGE_BYTES = {"medium": 4096, "rings": 4096, "rings, 8 KiB": 8192, "rings, 64 KiB": 65536}
"""Bytes of a page by configuration: Warpwell's controller ("medium") or the drive ("rings") executes the commands."""


@pytest.fixture(scope="module", params=list(SHAPES))
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    scale, degree = SHAPES[request.param]
    return generate("kron", scale, tmp_path_factory.mktemp("kron") / "kron.ww", degree=degree)


@pytest.fixture
def drive(graph: Graph, tmp_path: Path) -> Iterator[Drive]:
    """A drive whose namespace holds the graph's destinations."""
    edges = graph.map(graph.edges_path)
    image = tmp_path / "edges.raw"
    image.write_bytes(edges.tobytes() + bytes(-edges.nbytes % (64 << 10)))
    with QemuDrive([QemuNamespace(path=image, block=4096)]) as qemu, qemu.open() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("configuration", PAGE_BYTES)
def test_traversals_find_what_scipy_finds(graph: Graph, drive: Drive, configuration: str) -> None:
    offsets, edges = graph.load()
    device = "interp" if graph.vertices < 100 else "cpu"
    if device == "interp" and configuration != "medium":
        pytest.skip("the interpreter does not see what a drive writes to memory")
    page = PAGE_BYTES[configuration]
    links = csr_array((np.ones(graph.edges, np.int8), edges, offsets), shape=(graph.vertices,) * 2)
    source = int(np.diff(offsets).argmax())
    levels = csgraph.shortest_path(links, unweighted=True, indices=source)
    levels = np.where(np.isinf(levels), -1, levels)
    count, labels = csgraph.connected_components(links, directed=False)
    options = {"dtype": graph.destinations, "shape": graph.edges, "device": device, "page_size": page}
    space = drive.namespace(1)
    with (
        DriveMedium(space) if configuration == "medium" else contextlib.nullcontext(space) as opened,
        ww.open(opened, **options, cache=max(page, edges.nbytes // 16 // page * page)) as array,
        LoadedGraph(graph, edges=array) as loaded,
    ):
        found = bfs(loaded, source)
        assert np.array_equal(np.asarray(found.values), levels)
        parts = connected_components(loaded)
        assert parts.count == count
        pairs = np.unique(np.stack([np.asarray(parts.values), labels]), axis=1)
        assert pairs.shape[1] == count  # one label of Warpwell for each label of SciPy
        assert array.stats.bytes_read > 0
        loaded.close()
        assert array[0] == graph.map(graph.edges_path)[0]  # closing the graph has not closed the caller's array


def test_edges_of_another_graph_are_refused(tmp_path: Path) -> None:
    graph = generate("kron", 4, tmp_path / "kron.ww", degree=4)
    with ww.open(ww.storage.RamMedium(4096), dtype="int64", device="cpu") as array:
        with pytest.raises(errors.ArgumentError, match="destinations of"):
            LoadedGraph(graph, edges=array)
        assert array[0] == 0
    edges = graph.load()[1]
    with ww.open(ww.storage.RamMedium(edges), dtype=edges.dtype, device="cpu") as array:
        with pytest.raises(errors.ArgumentError, match="device is 'interp'"):
            LoadedGraph(graph, edges=array, device="interp")
