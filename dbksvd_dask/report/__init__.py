"""A page that shows what a dictionary has found: overview, atoms, samples."""

from dbksvd_dask.report.page import write_report

__all__ = ["write_report"]
