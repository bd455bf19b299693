"""Which collections can be linked: their rows are plain bytes of local files, and all of them are kept."""

from __future__ import annotations

from dbksvd_dask.errors import InputError
from dbksvd_dask.importers.collection import Collection
from dbksvd_dask.importers.selection import Rules
from dbksvd_dask.store import paths
from dbksvd_dask.store.spans import Span

_COPY = "leave out link=True to write a copy"


def linkable_spans(rows: Collection, rules: Rules, path: str, compressor: str | None) -> list[Span]:
    """Return where the rows of a collection are, in order.

    Parameters
    ----------
    rows : Collection
    rules : Rules
        What to leave out; must be nothing.
    path : str
        The store to write.
    compressor : str or None
        Must be None.

    Raises
    ------
    InputError
        When rows have to be decoded, left out or compressed, or the store is on a remote.
    """
    if paths.is_remote(path):
        raise InputError(f"{path} is a URL; a linked store is a local folder beside its files: {_COPY}")
    if compressor is not None:
        raise InputError(f"compressor={compressor!r}: rows that are linked stay as they are; {_COPY}")
    if not rules.keep_all:
        raise InputError(f"rows are to be left out, and a linked store has all rows of its files; {_COPY}")
    spans: list[Span] = []
    for member, found in rows.member_spans():
        if found is None:
            raise InputError(
                f"{member.path} ({member.format}) cannot be linked: its rows are not plain bytes of local files "
                f"in the order of a store (compressed, encoded, in columns or byte-swapped); {_COPY}"
            )
        spans += found
    return spans
