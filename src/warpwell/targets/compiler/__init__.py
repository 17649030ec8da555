"""Device code as Numba compiles it, for the CPU and for NVIDIA GPUs."""
