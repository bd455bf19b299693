"""Writing a linked activation store: what is aligned is copied, the rows stay in their files.

The array `activations` has metadata and no chunks; `links.json` says where the rows are. Zarr itself shows NaN for
them, and versions of this package that do not know links refuse the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dbksvd_dask.store import atomic
from dbksvd_dask.store.arrays import put_array
from dbksvd_dask.store.checksums import CHECKSUMS
from dbksvd_dask.store.chunk_file import Rows, Watch, read_through
from dbksvd_dask.store.dtypes import BFLOAT16, stored_dtype
from dbksvd_dask.store.layout import Aligned, StorePlan, array_specs, attributes_of, make_plan
from dbksvd_dask.store.links import LINKS, Links
from dbksvd_dask.store.partial import Partial, content_id
from dbksvd_dask.store.paths import PathLike, join, normalise
from dbksvd_dask.store.reader import LINKED, LINKED_VERSION, ROWS
from dbksvd_dask.store.spans import Span
from dbksvd_dask.store.writer import ActivationWriter, begin_or_resume, plan_of

BFLOAT16_NAN = 0x7FC0


class LinkWriter(ActivationWriter):
    """Writes a linked store; made by `create_links`.

    Parameters
    ----------
    path, plan, overwrite
        As of `ActivationWriter`.
    links : Links
        Where the rows are.
    checksums : bool
        Whether `write_chunk` reads the rows and records their checksums.
    """

    def __init__(self, path: str, plan: StorePlan, overwrite: bool, links: Links, checksums: bool) -> None:
        super().__init__(path, plan, overwrite)
        self._links, self._checksums = links, checksums

    @staticmethod
    def _partial_of(path: PathLike, plan: StorePlan, durable: bool = True) -> Partial:
        # durable: what is copied is small, and a resumed run need not read the rows again
        return Partial(
            path,
            array_specs(plan)[1:],
            plan.n_samples,
            plan.chunk_rows,
            part="chunk",
            durable=True,
        )

    @property
    def names(self) -> list[str]:
        """Return the arrays that have checksums."""
        return [ROWS] * self._checksums + list(self._partial.arrays)

    def missing(self) -> list[int]:
        """Return the chunks that are still to be written, or read for their checksums."""
        return super().missing() if self.names else []

    def _all_done(self) -> list[int]:
        return super()._all_done() if self.names else list(range(self.n_chunks or 0))

    def recheck(self, chunks: Iterable[int] | None = None) -> list[int]:
        """Return nothing: chunks are durable before they count as done."""
        return []

    def write_chunk(
        self,
        i: int,
        rows: Rows,
        aligned: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        verify: bool = True,
        on_rows: Watch | None = None,
        before_done: Callable[[], None] | None = None,
    ) -> None:
        """Write what is aligned to one chunk; read its rows if checksums are recorded."""
        found = [read_through(rows, on_rows)] if self._checksums else []
        beside = dict(aligned or {})
        found += [self._partial.write_block(name, i, beside[name], verify=verify) for name in self._partial.arrays]
        if before_done is not None:
            before_done()
        self._partial.mark(i, len(rows), [found])

    def _complete(self, verify: bool, attributes: dict[str, Any]) -> None:
        done, group = self._all_done(), self._partial.group()
        table = self._partial.checksums(done) if self.names else np.zeros((len(done), 0), np.uint32)
        if self.names:
            put_array(group, CHECKSUMS, table, ("chunk", "array"), {"arrays": self.names})
        if ROWS not in group:
            fill = BFLOAT16_NAN if self._plan.dtype == BFLOAT16 else math.nan
            array_specs(self._plan)[0].create(group, self.n_samples or 0, self.chunk_rows, None, fill)
        atomic.write_sealed(join(self.work, LINKS), self._links.to_json())
        known = {**attributes_of(self._plan), **attributes, "content_id": self._content_id(table)}
        linked = {"files": len(self._links.files), "checksums": self._checksums}
        self._partial.seal(group, {**known, "format_version": LINKED_VERSION, LINKED: linked})

    def _content_id(self, table: npt.NDArray[np.uint32]) -> str:
        """Identify the content: with checksums as of a copy of it, otherwise by the files."""
        head = [self.n_samples, self.n_features, self._plan.dtype, self.chunk_rows, self.names]
        return content_id(head if self._checksums else [*head, self._links.to_json()], table)


def create_links(
    path: PathLike,
    spans: Sequence[Span],
    n_samples: int,
    n_features: int,
    dtype: str,
    *,
    chunk_rows: int,
    attributes: Mapping[str, Any],
    aligned: Mapping[str, Aligned],
    checksums: bool,
    overwrite: bool,
    resume: bool,
    shared: bool,
    job: Mapping[str, Any],
) -> LinkWriter:
    """Begin or resume a linked store.

    Parameters
    ----------
    path : path
        A local store.
    spans : sequence of Span
        Where all rows are, in order.
    n_samples, n_features, dtype, chunk_rows, attributes, aligned, overwrite, resume, shared, job
        As of `create_activations`.
    checksums : bool
        Whether the rows are read to record checksums.
    """
    text = normalise(path)
    plan = make_plan(n_samples, n_features, dtype, chunk_rows, None, attributes, aligned, job)
    links = Links.to(spans, n_features * stored_dtype(dtype).itemsize)
    begin_or_resume(LinkWriter, text, plan, overwrite, resume, shared)
    return LinkWriter(text, plan, overwrite, links, checksums)


def open_links(path: PathLike, spans: Sequence[Span], *, checksums: bool) -> LinkWriter:
    """Open an unfinished linked store for writing, in a further process; parameters as of `create_links`."""
    text = normalise(path)
    plan = plan_of(text)
    links = Links.to(spans, plan.n_features * stored_dtype(plan.dtype).itemsize)
    return LinkWriter(text, plan, False, links, checksums)
