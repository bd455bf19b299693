"""Build and run Dask graphs; no other layer does.

May import stores, evaluate, kernels and gpu; not fit or jobs.
"""
