"""Training from storage: rows of arrays, tables and graphs, and records of stores, for training programs.

The content of a batch depends only on its number. So batches are the same for any number of workers, and a run that was
killed can resume with the number of its next batch.

Files, in the order in which a row meets them:

- records.py    records by their keys: rows of arrays and columns, which each process opens, and records of a store
- dataset.py    `Dataset`: records by position, decoded, for `DataLoader` and PyTorch's ``DataLoader``
- loader.py     `Sampler`: epochs in shuffled batches, ranks, resuming; `DataLoader`: their records, fetched ahead
- tensors.py    columns of decoded records, and columns as tensors of PyTorch
- neighbors.py  `Neighbors`: sampled neighborhoods in a graph on storage, by the number of the batch
"""

from .dataset import Dataset
from .loader import DataLoader, Sampler
from .neighbors import Neighbors

__all__ = ["DataLoader", "Dataset", "Neighbors", "Sampler"]
