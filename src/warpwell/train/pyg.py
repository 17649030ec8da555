"""`FeatureStore` and `NeighborSampler`: features and graphs on storage for loaders of PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..kv import rows_of
from .neighbors import Neighbors
from .source import Source, source_of
from .tensors import needs, tensor_of

with needs("torch_geometric"):
    import torch
    from torch_geometric.data import FeatureStore as _FeatureStore
    from torch_geometric.data import TensorAttr
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput


class FeatureStore(_FeatureStore):
    """Features on storage, as PyTorch Geometric's loaders ask for them; it is read-only.

    Parameters
    ----------
    features : dict
        Names, or (group, name) for graphs with several kinds of nodes; each with what a field of
        `warpwell.train.Dataset` may be.

    Raises
    ------
    ArgumentError, DTypeError, MissingFileError, FormatError
        See `warpwell.train.Dataset`.

    Notes
    -----
    ``store[group, name, index]`` takes a tensor, an array, a slice or a number, and returns a tensor. Row numbers are
    checked; negative ones count from the end. It is pickled as paths, and opened again in each process.
    """

    def __init__(self, features: Mapping[str | tuple[str, str], Any]) -> None:
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
        try:
            found: Source = self._sources[key]
        except KeyError:
            known = ", ".join(map(repr, self._sources))
            raise errors.ArgumentError(f"there is no feature {key!r}: there are {known}", name="attr_name") from None
        return found

    def _get_tensor(self, attribute: Any) -> Any:
        source = self._source(attribute)
        index = attribute.index
        if isinstance(index, int | np.integer):
            return self._read(source, rows_of([int(index)], source.rows, attribute.attr_name))()[0]
        return self._read(source, _row_numbers(index, source.rows, attribute.attr_name))()

    def _multi_get_tensor(self, attributes: list[Any]) -> list[Any]:
        found = [(self._source(a), a) for a in attributes]
        begun = [self._read(source, _row_numbers(a.index, source.rows, a.attr_name)) for source, a in found]
        return [result() for result in begun]  # all of them are read at once

    @staticmethod
    def _read(source: Source, rows: NDArray[np.int64]) -> Callable[[], Any]:
        result = source.begin(rows)
        return lambda: tensor_of(result(), source.dtype)

    def _get_tensor_size(self, attribute: Any) -> tuple[int, ...]:
        source = self._source(attribute)
        return source.rows, *source.shape

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return the names of all features."""
        return [TensorAttr(group, name) for group, name in self._sources]

    def _put_tensor(self, tensor: Any, attribute: Any) -> NoReturn:
        raise errors.ReadOnlyError("features on storage are read-only here: write the file, and open the store again")

    def _remove_tensor(self, attribute: Any) -> NoReturn:
        self._put_tensor(None, attribute)


def _row_numbers(index: Any, size: int, name: str) -> NDArray[np.int64]:
    if index is None:
        return np.arange(size)
    if isinstance(index, slice):
        return np.arange(size)[index]
    given = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if given.dtype == np.bool_:
        if given.shape != (size,):
            raise errors.ArgumentError(f"a mask of shape {given.shape} for {size} rows of {name!r}", name="index")
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise errors.ArgumentError(f"index of {name!r}: give row numbers, of one dimension", name="index")
    return rows_of(given, size, name)


class NeighborSampler(BaseSampler):
    """A sampler whose input is the number of a batch, which decides everything: see `Neighbors`.

    ``sampler.loader(features, batches)`` returns a loader. Its items are numbers of batches and not vertices, so they
    are the same with any number of workers, and a run that was stopped goes on with the next number.

    Parameters
    ----------
    neighbors : Neighbors
    """

    def __init__(self, neighbors: Neighbors) -> None:
        super().__init__()
        self.neighbors = neighbors

    def sample_from_nodes(self, index: Any, **_: Any) -> Any:
        """Return the neighbourhood of the batch whose number the input has, as a `SamplerOutput`."""
        numbers = index.node.tolist()
        if len(numbers) != 1:
            raise errors.ArgumentError(
                f"a batch of {len(numbers)} inputs: an input is the number of a batch here, and not a vertex; make the "
                "loader with sampler.loader(features, batches)",
                name="batch_size",
            )
        found = self.neighbors[numbers[0]]
        nodes, sources, targets, edges = map(torch.from_numpy, (found.nodes, found.sources, found.targets, found.edges))
        return SamplerOutput(
            nodes,
            sources,
            targets,
            edges,
            num_sampled_nodes=found.node_counts,
            num_sampled_edges=found.edge_counts,
            metadata=(nodes[: found.batch_size], None),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> NoReturn:
        """Raise: neighbourhoods are those of vertices."""
        raise errors.ArgumentError("neighbourhoods of edges are not sampled: give vertices")

    def loader(self, features: FeatureStore, batches: Iterable[int] | None = None, **options: Any) -> Any:
        """Return PyTorch Geometric's ``NodeLoader`` of some batches, in this order.

        An item is a `Data` with the features of its nodes, ``edge_index``, ``n_id`` (vertices), ``e_id`` (places in the
        file of edges), ``input_id`` (the batch's vertices) and ``batch_size``, how many they are.

        Parameters
        ----------
        features : FeatureStore
        batches : iterable of int, optional
            Numbers of batches. Default: those of the first epoch.
        **options
            Of PyTorch's ``DataLoader``, such as ``num_workers`` and ``persistent_workers``; not ``batch_size``,
            ``shuffle``, ``sampler`` and others that choose what a batch is.
        """
        wrong = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "input_nodes"} & {*options})
        if wrong:
            raise errors.ArgumentError(
                f"{wrong[0]}= is decided by Neighbors, and which batches come by batches=", name=wrong[0]
            )
        numbers = torch.tensor([*(range(len(self.neighbors)) if batches is None else batches)], dtype=torch.long)
        return NodeLoader((features, None), self, input_nodes=numbers, batch_size=1, **options)
