"""`FeatureStore` and `NeighborSampler`: features and graphs on storage for loaders of PyTorch Geometric.

Without PyTorch Geometric the classes exist, so that the module can be inspected, and creating an object raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..kv import rows_of
from .neighbors import Neighbors
from .sources import Source, source_of
from .tensors import not_installed, tensor_of

_import_error: BaseException | None = None
try:
    import torch
    from torch_geometric.data import FeatureStore as _FeatureStore
    from torch_geometric.data import TensorAttr
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput
except (ImportError, OSError) as error:  # OSError: a shared library of PyTorch cannot be loaded.
    _import_error = error
    _FeatureStore = BaseSampler = object


def _require_pyg() -> None:
    """Raise ArgumentError if PyTorch Geometric could not be imported."""
    if _import_error is not None:
        raise not_installed("torch_geometric") from _import_error


class FeatureStore(_FeatureStore):  # type: ignore[misc, unused-ignore]
    """Features on storage for PyTorch Geometric's loaders; read-only.

    ``store[group, name, index]`` returns a tensor; `index` is a tensor, an array, a slice or a row number.

    Parameters
    ----------
    features : dict
        Keys are names, or (group, name) for graphs with several types of nodes. Values are as for a field of
        `warpwell.train.Dataset`.

    Raises
    ------
    ArgumentError
        PyTorch Geometric is not installed, or as for `warpwell.train.Dataset`.
    DTypeError, MissingFileError, FormatError
        As for `warpwell.train.Dataset`.

    Notes
    -----
    Row numbers are checked; negative ones count from the end. A store is pickled as paths, and each process opens the
    files again.
    """

    def __init__(self, features: Mapping[str | tuple[str, str], Any]) -> None:
        _require_pyg()
        super().__init__()
        named = {key if isinstance(key, tuple) else (None, key): value for key, value in features.items()}
        self._sources = {key: source_of(value, str(key[1])) for key, value in named.items()}

    def close(self) -> None:
        """Close the files that this process has open (idempotent). A read opens them again."""
        for source in self._sources.values():
            source.close()

    def __repr__(self) -> str:
        return f"<FeatureStore of {', '.join(str(name) for _, name in self._sources)}>"

    def _source(self, attribute: Any) -> Source:
        key = attribute.group_name, attribute.attr_name
        if key not in self._sources:
            features = ", ".join(map(repr, self._sources))
            raise errors.ArgumentError(f"unknown feature {key!r}: expected one of {features}", name="attr_name")
        return self._sources[key]

    def _start_read(self, attribute: Any) -> Callable[[], Any]:
        source, index = self._source(attribute), attribute.index
        is_number = isinstance(index, int | np.integer)
        rows = _row_numbers([int(index)] if is_number else index, source.rows, attribute.attr_name)
        result = source.start_read(rows)

        def wait() -> Any:
            tensor = tensor_of(result(), source.dtype)
            return tensor[0] if is_number else tensor

        return wait

    def _get_tensor(self, attribute: Any) -> Any:
        return self._start_read(attribute)()

    def _multi_get_tensor(self, attributes: list[Any]) -> list[Any]:
        return [wait() for wait in [self._start_read(attribute) for attribute in attributes]]

    def _get_tensor_size(self, attribute: Any) -> tuple[int, ...]:
        source = self._source(attribute)
        return source.rows, *source.shape

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the names of all features."""
        return [TensorAttr(group, name) for group, name in self._sources]

    def _put_tensor(self, tensor: Any, attribute: Any) -> NoReturn:
        raise errors.ReadOnlyError("features on storage are read-only: write the file, and open the store again")

    def _remove_tensor(self, attribute: Any) -> NoReturn:
        self._put_tensor(None, attribute)


def _row_numbers(index: Any, size: int, name: str) -> NDArray[np.int64]:
    if index is None or isinstance(index, slice):
        return np.arange(size)[index or slice(None)]
    numbers = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if numbers.dtype == np.bool_:
        if numbers.shape != (size,):
            raise errors.ArgumentError(f"a mask of shape {numbers.shape} for {size} rows of {name!r}", name="index")
        return np.flatnonzero(numbers)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
        raise errors.ArgumentError(f"index of {name!r}: give row numbers, of one dimension", name="index")
    return rows_of(numbers, size, name)


class NeighborSampler(BaseSampler):  # type: ignore[misc, unused-ignore]
    """A sampler of PyTorch Geometric whose input is the number of a batch of `Neighbors`.

    ``sampler.loader(features, batches)`` returns a loader. Its items are numbers of batches and not vertices, so they
    are the same for any number of workers, and a run that was stopped resumes with the next number.

    Parameters
    ----------
    neighbors : Neighbors

    Raises
    ------
    ArgumentError
        PyTorch Geometric is not installed.
    """

    def __init__(self, neighbors: Neighbors) -> None:
        _require_pyg()
        super().__init__()
        self.neighbors = neighbors

    def sample_from_nodes(self, index: Any, **_: Any) -> Any:
        """Return the neighborhood of the batch whose number is the only input, as a `SamplerOutput`."""
        numbers = index.node.tolist()
        if len(numbers) != 1:
            raise errors.ArgumentError(
                f"expected the number of a batch as the only input, got {len(numbers)} inputs: create the loader with "
                "sampler.loader(features, batches)",
                name="batch_size",
            )
        batch = self.neighbors[numbers[0]]
        arrays = (batch.nodes, batch.sources, batch.targets, batch.edges)
        nodes, sources, targets, edges = map(torch.from_numpy, arrays)
        return SamplerOutput(
            nodes,
            sources,
            targets,
            edges,
            num_sampled_nodes=batch.node_counts,
            num_sampled_edges=batch.edge_counts,
            metadata=(nodes[: batch.batch_size], None),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> NoReturn:
        """Raise: only neighborhoods of vertices are sampled."""
        raise errors.ArgumentError("neighborhoods of edges are not sampled: give vertices")

    def loader(self, features: FeatureStore, batches: Iterable[int] | None = None, **options: Any) -> Any:
        """Return PyTorch Geometric's ``NodeLoader`` of some batches, in the given order.

        An item is a `Data` with the features of its nodes, ``edge_index``, ``n_id`` (vertices), ``e_id`` (positions in
        the file of edges), ``input_id`` (the vertices of the batch) and ``batch_size`` (their number).

        Parameters
        ----------
        features : FeatureStore
        batches : iterable of int, optional
            Numbers of batches. Default: the first epoch.
        **options
            Options of PyTorch's ``DataLoader``, such as ``num_workers`` and ``persistent_workers``, but not those that
            define a batch: ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler``, ``drop_last``.
        """
        refused = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "input_nodes"} & {*options})
        if refused:
            raise errors.ArgumentError(
                f"{refused[0]}= is decided by Neighbors: pass the numbers of batches as batches=", name=refused[0]
            )
        numbers = torch.tensor([*(range(len(self.neighbors)) if batches is None else batches)], dtype=torch.long)
        return NodeLoader((features, None), self, input_nodes=numbers, batch_size=1, **options)
