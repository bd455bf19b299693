"""Numba kernels: they know numpy arrays and the jit module, nothing else.

May know plan, numpy and numba; no Dask, no Zarr, no files.
"""
