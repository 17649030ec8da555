"""Training from storage: rows of arrays, tables and graphs for training programs and their libraries.

A batch is a function of its number. So it is the same for any number of workers, and a killed run resumes with the next
number.

Files, in the order in which a row meets them:

- sources.py    rows of one array or column, opened by path in each process
- dataset.py    `Dataset`: rows of several sources, for `warpwell.kv.DataLoader` and PyTorch's ``DataLoader``
- tensors.py    `collate`: rows as tensors of PyTorch
- neighbors.py  `Neighbors`: sampled neighborhoods in a graph on storage, by the number of the batch
"""

from .dataset import Dataset
from .neighbors import Neighbors
from .tensors import collate

__all__ = ["Dataset", "Neighbors", "collate"]
