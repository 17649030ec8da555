"""Training from storage: rows of arrays, tables and graphs for training programs and their libraries.

A batch is a function of its number. So it is the same for any number of workers, and a killed run resumes with the next
number.

Files, in the order in which a row meets them:

- sources.py    rows of one array or column, opened by path in each process
- dataset.py    `Dataset`: rows of several sources, for `warpwell.kv.DataLoader` and PyTorch's ``DataLoader``
- tensors.py    `collate`: rows as tensors of PyTorch
- neighbors.py  `Neighbors`: sampled neighborhoods in a graph on storage, by the number of the batch
- pyg.py        `FeatureStore` and `NeighborSampler`, for PyTorch Geometric
"""

from typing import TYPE_CHECKING

from .. import registry
from .dataset import Dataset
from .neighbors import Neighbors
from .tensors import collate

if TYPE_CHECKING:
    from .pyg import FeatureStore, NeighborSampler

__all__ = ["Dataset", "FeatureStore", "NeighborSampler", "Neighbors", "collate"]

if not TYPE_CHECKING:  # PyTorch takes seconds to import.
    __getattr__, __dir__ = registry.on_first_use(__name__, {"FeatureStore": "pyg:", "NeighborSampler": "pyg:"})
