"""Runs: the folder of a fit and its checkpoints.

A run holds one dictionary per checkpoint, ``checkpoint-000040.zarr``: written aside, then renamed; the
previous one is kept. A run can be given in place of a dictionary; its newest checkpoint is used. A remote has no
rename: there, a small object ``checkpoint-000040.done`` is written last and removed first, and without it a
checkpoint does not count.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store import atomic, paths
from dbksvd_dask.store.atomic import REPLACED_SUFFIX
from dbksvd_dask.store.dictionary import (
    is_zarr,
    publish_dictionary,
    read_dictionary,
)
from dbksvd_dask.store.paths import PathLike

KEEP = 2  # checkpoints of a run that are kept: the newest and the one before

_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.zarr")
# what a fit that was killed while it deleted or replaced a checkpoint leaves
_REPLACED = re.compile(rf"{_CHECKPOINT.pattern}(\.\d+-\d+)?{re.escape(REPLACED_SUFFIX)}")


def open_dictionary(path: PathLike) -> Dictionary:
    """Read a dictionary, or the newest checkpoint of a run.

    Parameters
    ----------
    path : folder written by `save_dictionary`, or the folder of a fit

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD, open_dictionary
    >>> _ = DBKSVD(n_atoms=12, k=2, n_iter=2, checkpoint="run").fit(np.load("activations.npy"))
    >>> open_dictionary("run").atoms.shape
    (12, 8)
    """
    where = paths.normalise(path)
    if not paths.exists(where):
        raise StoreError(f"{where} does not exist; give a dictionary or the folder of a fit")
    if is_zarr(where):
        return read_dictionary(where)
    if not checkpoints(where):
        raise StoreError(f"{where} holds no dictionary and no checkpoint; give the folder of a fit")
    readable, dictionary, damaged = readable_checkpoint(where)
    if damaged:
        raise StoreError(
            f"{damaged[0]}; {readable} can be read: give that one, or continue from it with resume=True"
        )
    return dictionary


def as_dictionary(given: Any) -> Dictionary:
    """Return the dictionary of any object that has one.

    Parameters
    ----------
    given : Dictionary, fitted estimator, or path of a dictionary or of the folder of a fit
    """
    if isinstance(given, Dictionary):
        return given
    if isinstance(given, str | os.PathLike):
        return open_dictionary(given)
    if not hasattr(given, "to_dictionary"):
        raise InputError(
            f"{type(given).__name__} is not a dictionary; pass the folder of a fit, what open_dictionary "
            "returned, or a fitted DBKSVD"
        )
    fitted: Dictionary = given.to_dictionary()
    return fitted


def verify_dictionary(path: PathLike) -> int:
    """Compare every array of a dictionary, or of all checkpoints of a run, with its checksum.

    Returns
    -------
    int
        The number of arrays that were compared.

    Raises
    ------
    StoreError
        If an array is missing or differs, or there are no checksums.
    """
    where = paths.normalise(path)
    count = 0
    for one in [where] if is_zarr(where) else checkpoints(where):
        read_dictionary(one)  # compares them
        checksums = paths.open_group(one).attrs.get("crc32")
        if not isinstance(checksums, dict) or not checksums:
            raise StoreError(f"{one} has no checksums to verify; it was not written by this package")
        count += len(checksums)
    return count


def run_folder(path: PathLike) -> str:
    """Return the path of a folder that holds a fit or may hold one; other content, logs or notes, is left alone.

    Raises
    ------
    StoreError
        When it is a file or a store.
    """
    run = paths.normalise(path)
    if not paths.exists(run):
        return run
    if not paths.is_remote(run) and not os.path.isdir(run):
        raise StoreError(f"{run} is a file, and a run is a folder; choose another name for the run")
    if is_zarr(run):
        raise StoreError(f"{run} is a Zarr store, not the folder of a fit; choose another folder for the run")
    return run


def checkpoints(run: PathLike) -> list[str]:
    """Return the checkpoints of a run, oldest first."""
    names = set(paths.list_names(run))
    found = [(int(m[1]), name) for name in names if (m := _CHECKPOINT.fullmatch(name))]
    if paths.is_remote(run):
        found = [(number, name) for number, name in found if _marker(name) in names]
    return [paths.join(run, name) for _, name in sorted(found)]


def _marker(name: str) -> str:
    """Return what says on a remote that a checkpoint is complete."""
    return name.removesuffix(".zarr") + ".done"


def latest_checkpoint(run: PathLike) -> str | None:
    """Return the newest checkpoint of a run, or None."""
    found = checkpoints(run)
    return found[-1] if found else None


def readable_checkpoint(run: PathLike) -> tuple[str, Dictionary, list[StoreError]]:
    """Return the newest readable checkpoint of a run, and what is wrong with those after it.

    Raises
    ------
    StoreError
        When none can be read: what is wrong with the newest.
    """
    damaged: list[StoreError] = []
    for path in reversed(checkpoints(run)):
        try:
            return path, _open_checkpoint(path), damaged
        except StoreError as error:
            damaged.append(error)
    raise damaged[0]


def remove_checkpoints(run: PathLike) -> None:
    """Delete the fit in a folder; rename each checkpoint first: a partly deleted one is never taken for one."""
    if paths.is_remote(run):
        _remove_remote(run, [name for name in paths.list_names(run) if _CHECKPOINT.fullmatch(name)])
        return
    for path in checkpoints(run):
        doomed = path + REPLACED_SUFFIX
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise StoreError(
                f"could not delete {path}: {error.strerror or error}; make it writable or choose another folder"
            ) from error


def _remove_remote(run: PathLike, names: list[str]) -> None:
    for name in names:
        paths.remove(paths.join(run, _marker(name)))
        paths.remove(paths.join(run, name))


def write_checkpoint(run: PathLike, dictionary: Dictionary) -> str:
    """Publish a checkpoint, then remove all but the newest `KEEP`."""
    name = _checkpoint_name(dictionary.iteration)
    path, marker = paths.join(run, name), paths.join(run, _marker(name))
    if paths.is_remote(run):
        paths.remove(marker)
    publish_dictionary(path, dictionary)  # also in place of a damaged one
    if paths.is_remote(run):
        atomic.write_json(marker, {"iteration": dictionary.iteration})
    remove_old_checkpoints(run)
    return path


def _open_checkpoint(path: str) -> Dictionary:
    """Read a checkpoint; refuse one whose name gives another iteration."""
    dictionary = read_dictionary(path)
    if paths.base_name(path) != _checkpoint_name(dictionary.iteration):
        raise StoreError(f"{path} is damaged: it holds iteration {dictionary.iteration}")
    return dictionary


def _checkpoint_name(iteration: int) -> str:
    return f"checkpoint-{iteration:06d}.zarr"


def remove_old_checkpoints(run: PathLike) -> None:
    """Remove all but the newest `KEEP` checkpoints, and what a killed fit left of deleted ones."""
    if paths.is_remote(run):
        kept = {paths.base_name(path) for path in checkpoints(run)[-KEEP:]}
        names = [name for name in paths.list_names(run) if _CHECKPOINT.fullmatch(name)]
        # what an upload that was cut short has left comes before the newest, or is overwritten by it
        _remove_remote(run, [name for name in names if name not in kept and name < max(kept, default="")])
        return
    left = [os.path.join(os.fspath(run), name) for name in paths.list_names(run) if _REPLACED.fullmatch(name)]
    for old in [*checkpoints(run)[:-KEEP], *left]:
        shutil.rmtree(old, ignore_errors=True)
