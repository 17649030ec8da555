"""One device for several processes."""
