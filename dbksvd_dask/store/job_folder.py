"""A folder beside an unfinished store in which a job keeps its findings, and the job that they belong to."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

from dbksvd_dask.errors import MismatchError, StoreError
from dbksvd_dask.store import atomic, paths

JOB = "job.json"


class JobFolder:
    """The findings of one job; the folder appears together with the description of the job.

    Parameters
    ----------
    path : path or fsspec URL
        The folder.
    mismatch : str
        What to say when it belongs to another job.
    """

    def __init__(self, path: str, mismatch: str) -> None:
        self.path, self._mismatch = path, mismatch

    @property
    def _job(self) -> str:
        return paths.join(self.path, JOB)

    def settle(self, job: Mapping[str, Any], force: bool) -> bool:
        """Return whether the folder is there and belongs to this job.

        Parameters
        ----------
        job : dict
            Description of the job.
        force : bool
            Remove the folder of another job instead of refusing it.
        """
        if not paths.exists(self._job):
            return False
        try:
            if atomic.read_sealed(self._job) == job:
                return True
        except StoreError:
            if not force:
                raise
        if not force:
            raise MismatchError(self._mismatch)
        self.remove()
        return False

    def begin(self, job: Mapping[str, Any]) -> None:
        """Make the folder, once, however many processes begin it at the same time; call `settle` first."""
        if paths.is_remote(self.path):
            atomic.write_sealed(self._job, job)
            return
        scratch = self._aside("begun")
        paths.remove(scratch)
        os.makedirs(scratch)
        try:
            atomic.write_sealed(os.path.join(scratch, JOB), job)
            # a folder that is not empty cannot be replaced: the first one stays
            with contextlib.suppress(OSError):
                os.rename(scratch, self.path)
        finally:
            paths.remove(scratch)
        if not self.settle(job, force=False):
            raise StoreError(f"{self.path} is in the way and does not say which job it belongs to; remove it")

    def remove(self) -> None:
        """Remove the folder; a remove that is interrupted leaves no half of it under its name."""
        if paths.is_remote(self.path):
            paths.remove(self.path)
            return
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, self._aside("discarded"))
        home, name = os.path.split(os.path.abspath(self.path))
        ours = re.compile(re.escape(name) + r"\..*-\d+-(begun|discarded)\.tmp")  # also of killed processes
        for other in filter(ours.fullmatch, paths.list_names(home)):
            paths.remove(os.path.join(home, other))

    def _aside(self, what: str) -> str:
        return f"{self.path}.{platform.node()}-{os.getpid()}-{what}.tmp"
