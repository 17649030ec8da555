"""Key-value stores whose records kernels fetch by key."""
