"""The kernels on a CUDA device, with CuPy arrays and numba-cuda; neither is imported without a device.

May import plan, kernels, CuPy and numba-cuda; not Dask, and it opens no files.
"""
