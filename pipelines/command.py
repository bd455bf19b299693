"""What the scripts of this folder share as commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from dbksvd_dask.cli.translate import in_options
from dbksvd_dask.errors import DBKSVDError


def exit_code(run: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> int:
    """Run a script; print an error of the package as one line. Return the exit code."""
    try:
        run(options)
    except DBKSVDError as error:
        print(f"error: {in_options(str(error))}", file=sys.stderr)
        return 1
    return 0
