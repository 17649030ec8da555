"""The GPU's driver: streams, memory, CUDA C++ source."""
