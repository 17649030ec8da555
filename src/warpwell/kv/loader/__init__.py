"""Records in shuffled batches for training.

loader.py       `DataLoader`: epochs, ranks, resuming, batches fetched ahead
permutation.py  the order of an epoch, computed position by position
dataset.py      `Dataset`: a store as a sequence, for other libraries' loaders
"""
