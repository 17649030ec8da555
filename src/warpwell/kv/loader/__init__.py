"""Records in shuffled batches for training."""
