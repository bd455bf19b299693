"""The same work on a CUDA device: CuPy arrays, kernels by numba-cuda. Neither is imported without a device.

May know plan and kernels, CuPy and numba-cuda; no Dask, no files.
"""
