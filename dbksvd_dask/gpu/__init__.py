"""The same work on a CUDA device: CuPy arrays, kernels by numba-cuda. Neither is imported without a device."""
