"""Training from storage: rows of arrays, tables and graphs, and records of stores, for training programs.

A batch is a function of its number. So it is the same for any number of workers, and a killed run resumes with the next
number.

Files, in the order in which a row meets them:

- sources.py    rows of one array or column, opened by path in each process
- records.py    readers of records by their keys: rows of sources, and records of a store
- dataset.py    `Dataset`: records by position, decoded, for `DataLoader` and PyTorch's ``DataLoader``
- sampler.py    `Sampler`: epochs in shuffled batches of positions, ranks, resuming
- loader.py     `DataLoader`: the records of these batches, fetched ahead
- tensors.py    columns of decoded records, and columns as tensors of PyTorch
- neighbors.py  `Neighbors`: sampled neighborhoods in a graph on storage, by the number of the batch
"""

from .dataset import Dataset
from .loader import DataLoader
from .neighbors import Neighbors
from .sampler import Sampler

__all__ = ["DataLoader", "Dataset", "Neighbors", "Sampler"]
