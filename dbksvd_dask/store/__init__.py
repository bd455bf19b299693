"""Zarr and xarray: activations, codes, dictionaries, checkpoints.

May know files, Zarr, dictionaries and the sums it keeps beside codes; no Dask graphs, no fits.
"""
