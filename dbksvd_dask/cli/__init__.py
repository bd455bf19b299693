"""The command line: each command sets up logging and progress, then makes one library call.

May know everything; nothing knows it.
"""

from __future__ import annotations

from dbksvd_dask.cli.main import main

__all__ = ["main"]
