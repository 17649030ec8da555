"""CUDA programs, unmodified, on the pool's GPUs: a layer under the driver's name, and workers that replay its calls.

- table: names, versions and roles of the driver's interface, and what becomes of each call
- generate: the C sources that follow from the table
- build: the native parts, built once into the cache folder
- environment: what makes a program find the layer in the place of the driver
- hook: what Python programs run at their start, for a few functions of NVIDIA's runtime
- clients: accepts clients of devices, up to where somebody serves them
- server: starts a worker for each client and device

The native sources (``native/``): ``cu.h`` the interface's types, ``wire.h`` and ``calls.h`` what layer and worker
share, ``layer.h`` the map of the layer, ``worker.h`` that of the worker, and ``relay.c`` stands between them where they
are on two hosts (``pool/cuda``).
"""
