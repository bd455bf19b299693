"""The same work on a CUDA device: CuPy arrays, kernels by numba-cuda. Nothing here is imported without a device."""
