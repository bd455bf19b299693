"""Dask graphs: what builds them and what runs them.

The only layer that builds or runs Dask graphs; may know stores, evaluate, kernels and gpu; no fits, no jobs.
"""
