"""Records for kernels: requests, engine, cache on the device."""
