"""Zarr and xarray: activations, codes, dictionaries, checkpoints."""
