"""`python -m dbksvd_dask`: the command line."""

from __future__ import annotations

from dbksvd_dask.cli import main

if __name__ == "__main__":
    main()
