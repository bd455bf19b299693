"""Reading activations in common layouts: one small module per format, and a registry that picks one.

May know stores and file formats; no Dask, no fits.
"""

from __future__ import annotations

from dbksvd_dask.importers.base import ArrayInfo, Hints, SourceFile
from dbksvd_dask.importers.collection import Collection
from dbksvd_dask.importers.registry import FORMATS, find_files, open_file

__all__ = ["FORMATS", "ArrayInfo", "Collection", "Hints", "SourceFile", "find_files", "open_file"]
