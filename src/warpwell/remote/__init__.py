"""Arrays, stores and schedulers on the devices of a pool."""
