"""Integers in, integers out: parameters, batches, rounds, groups, memory.

Knows errors and numpy integers; no data, no Dask, no files.
"""
