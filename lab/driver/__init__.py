"""The fake CUDA driver: the driver's interface without a GPU, for tests.

``fake.h`` is the map of its C sources; `build` compiles them with the headers of `warpwell.driver`. ``kernels.ptx`` has
the kernels of the test programs.
"""
