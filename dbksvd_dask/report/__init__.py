"""A page that shows what a dictionary has found: overview, atoms, samples.

May know everything but the demo and the command line.
"""

from dbksvd_dask.report.page import write_report

__all__ = ["write_report"]
