"""Numba kernels: they know numpy arrays and the jit module, nothing else."""
