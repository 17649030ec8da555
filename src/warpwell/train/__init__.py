"""Training from storage: rows of arrays and tables as training programs and their libraries ask for them.

The idea: what a batch needs is known from its number. So a batch is the same whatever the number of workers, and a run
that was killed goes on with the next number. Nothing here but `source.py` reads, by `warpwell.gather`.

Files, in the order in which a row meets them:

- source.py     rows of one array or column, opened by path in each process
- dataset.py    `Dataset`: rows of several, for PyTorch's ``DataLoader`` and for `warpwell.kv.DataLoader`
- neighbors.py  `Neighbors`: sampled neighbourhoods in a graph on storage, by the number of the batch
- tensors.py    `collate`, and NumPy arrays as tensors (PyTorch)
- pyg.py        `FeatureStore` and `NeighborSampler`, for PyTorch Geometric
"""

from typing import TYPE_CHECKING

from .. import registry
from .dataset import Dataset, Records
from .neighbors import Neighborhood, Neighbors

if TYPE_CHECKING:
    from .pyg import FeatureStore, NeighborSampler
    from .tensors import collate

__all__ = ["Dataset", "FeatureStore", "Neighborhood", "NeighborSampler", "Neighbors", "Records", "collate"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = registry.on_first_use(  # what needs PyTorch
        __name__, {"FeatureStore": "pyg:", "NeighborSampler": "pyg:", "collate": "tensors:"}
    )
