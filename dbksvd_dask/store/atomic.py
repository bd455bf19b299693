"""Files that appear whole or not at all, and the ledger of a restartable job.

Every job of this package follows one pattern: work is written aside, each finished part leaves a marker, written
last, and one rename publishes the result. A killed run leaves markers of the finished parts; the next run does the
others.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dbksvd_dask._words import format_bytes
from dbksvd_dask.errors import StoreError, brief
from dbksvd_dask.store import paths
from dbksvd_dask.store._system import NO_ROOM, start_writeback
from dbksvd_dask.store.paths import PathLike

PARTIAL_SUFFIX, REPLACED_SUFFIX = ".partial", ".replaced"
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
SEAL = "seal"  # the checksum in a JSON file that a job depends on
_COUNTER = itertools.count()


def fsync_path(path: PathLike) -> None:
    """Force a file or folder to the disk; ignore filesystems that cannot do it for folders."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def staged(target: PathLike, folder: PathLike | None = None, *, durable: bool = True) -> Iterator[Path]:
    """Yield a scratch path that becomes the local file `target` when the block succeeds.

    Parameters
    ----------
    target : path
        The file to publish.
    folder : path, optional
        Where the scratch file is, on the same filesystem; default: beside the target.
    durable : bool
        Force it to the disk first, so that not even a power failure leaves an empty file of that name.
    """
    final = Path(target)
    home = final.parent if folder is None else Path(folder)
    scratch = home / f"{final.name}.{os.getpid()}-{next(_COUNTER)}.tmp"
    try:
        yield scratch
        if durable:
            fsync_path(scratch)
        os.replace(scratch, final)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            raise StoreError(f"{final} is a folder, in the place of a file; remove it") from error
        raise


def write_all(file: io.FileIO, view: memoryview) -> None:
    """Write all of a buffer to a raw file, which may accept only part of it at a time."""
    while view:
        view = view[file.write(view) :]


def write_bytes(path: PathLike, *pieces: Any, folder: PathLike | None = None, durable: bool = True) -> None:
    """Write one file, whole or not at all.

    Parameters
    ----------
    path : path or fsspec URL
        The file; its folder must exist (on a remote there are no folders).
    *pieces : bytes-like
        The content, in order.
    folder : path, optional
        Where the scratch file of a local write is, on the same filesystem.
    durable : bool
        Force it to the disk before it gets its name; otherwise only start writing it.
    """
    if paths.is_remote(path):
        paths.write_object(path, b"".join(bytes(p) for p in pieces))
        return
    with staged(paths.normalise(path), folder, durable=durable) as scratch:
        with open(scratch, "wb", buffering=0) as file:
            for piece in pieces:
                write_all(file, memoryview(piece).cast("B"))
            if not durable:
                start_writeback(file.fileno())


def write_json(path: PathLike, content: Any, *, durable: bool = True) -> None:
    """Write a JSON file, whole or not at all."""
    write_bytes(path, json.dumps(content, indent=1, sort_keys=True).encode(), durable=durable)


def read_json(path: PathLike) -> Any:
    """Read a JSON file.

    Raises
    ------
    StoreError
        When it is missing or is not JSON.
    """
    try:
        return json.loads(paths.read_bytes(path))
    except FileNotFoundError as error:
        raise StoreError(f"no file at {path}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or brief(error)}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: it is not JSON ({brief(error)})") from error


def write_sealed(path: PathLike, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write the state of a job as JSON with a checksum: a changed number still looks like a number."""
    write_json(path, {**content, SEAL: _seal(content)}, durable=durable)


def read_sealed(path: PathLike) -> dict[str, Any]:
    """Read what `write_sealed` wrote.

    Raises
    ------
    StoreError
        When it is missing, is not JSON or is not what was written.
    """
    try:
        found = read_json(path)
    except StoreError as error:
        if isinstance(error.__cause__, OSError):
            raise
        found = None  # it exists and is not JSON
    content = {name: value for name, value in found.items() if name != SEAL} if isinstance(found, dict) else {}
    if not isinstance(found, dict) or found.get(SEAL) != _seal(content):
        raise StoreError(
            f"{path} is damaged: it is not what was written; remove it to do this part again, or begin again "
            "with force=True"
        )
    return content


def _seal(content: Mapping[str, Any]) -> int:
    plain = json.loads(json.dumps(content))  # as it will be read: keys become strings, tuples become lists
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def aside(path: PathLike) -> str:
    """Return where work towards `path` is kept until it is published.

    A remote has no rename: there the work is at its final place, and an attribute says when it is complete.
    """
    return paths.normalise(path) + ("" if paths.is_remote(path) else PARTIAL_SUFFIX)


def publish(work: PathLike, target: PathLike, *, overwrite: bool = False) -> None:
    """Rename finished local work to its final place; the previous content stays until then.

    Also remove previous content that a killed call left behind.

    Raises
    ------
    StoreError
        When `target` exists and `overwrite` is not set.
    """
    source, final = Path(work), Path(target)
    previous = final.with_name(f"{final.name}.{os.getpid()}-{next(_COUNTER)}{REPLACED_SUFFIX}")
    if os.path.lexists(final):
        if not overwrite:
            raise StoreError(f"{final} already exists; choose another name, or replace it with overwrite=True")
        if source.is_dir() or final.is_dir():  # a folder can only be renamed to a name that is free
            os.rename(final, previous)
    try:
        os.replace(source, final)
    except FileNotFoundError as error:
        raise StoreError(f"{source} is gone: another process has published or removed it") from error
    fsync_path(final.parent)
    for left in replaced(final):
        paths.remove(left)


def replaced(target: PathLike) -> list[str]:
    """Return leftovers of content that `publish` replaced at `target`; none while `target` does not exist.

    A process killed between the two renames leaves the new content aside and the previous content under such a
    name, which is then the only copy.
    """
    final = Path(paths.normalise(target))
    if not os.path.lexists(final):
        return []
    pattern = re.compile(re.escape(final.name) + r"\.\d+-\d+" + re.escape(REPLACED_SUFFIX))
    return [str(final.parent / name) for name in paths.list_names(final.parent) if pattern.fullmatch(name)]


def cannot_write(target: PathLike, error: OSError) -> StoreError:
    """Return the error for a target that cannot be written, with the reason."""
    full = error.errno in NO_ROOM
    what = "make room, or choose another place" if full else "choose a place where this user may write"
    return StoreError(f"{target} cannot be written ({error.strerror or error}); {what}")


@contextlib.contextmanager
def explain_full_disk(work: PathLike) -> Iterator[None]:
    """Turn a refusal of the disk into an error that says where the work is and what to do.

    Covers a full disk, quota or size limit anywhere, and a `work` folder that is not writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreError(
                f"no space left while writing {work} ({error.strerror}); what is done is kept there: make room "
                f"and run the same command again, or delete {work}"
            ) from error
        if error.errno in REFUSED and str(error.filename or "").startswith(str(work)):
            raise StoreError(
                f"{work} cannot be written ({error.strerror}); choose a place where this user may write"
            ) from error
        raise


def require_outside(path: PathLike, source: PathLike) -> None:
    """Refuse to write into the store that is read.

    Parameters
    ----------
    path : path
        What is to be written.
    source : path
        The store that is read; not checked on a remote.

    Raises
    ------
    StoreError
        When `path` is inside `source`, under any name.
    """
    if paths.is_remote(path) or paths.is_remote(source):
        return
    inner, outer = (os.path.realpath(paths.normalise(p)) for p in (path, source))
    if inner != outer and os.path.commonpath([inner, outer]) == outer:
        raise StoreError(
            f"{path} lies inside the store {source}, which is only read; choose a place outside of it"
        )


def require_space(path: PathLike, needed: int) -> None:
    """Refuse to begin work that cannot fit on the disk of `path`.

    Parameters
    ----------
    path : path
        Where the work will be; not checked on a remote.
    needed : int
        Bytes still to be written.
    """
    if paths.is_remote(path):
        return
    folder = Path(path).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"{path} needs {format_bytes(needed)} more and {folder} has {format_bytes(free)} free; "
            "make room or choose another place"
        )


def describe_parts(parts: Iterable[int], limit: int = 12) -> str:
    """Write part numbers as ranges, shortened when there are many.

    >>> describe_parts([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for part in sorted(parts):
        if runs and part == runs[-1][1] + 1:
            runs[-1][1] = part
        else:
            runs.append([part, part])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more ranges" if len(texts) > limit else "")


class Ledger:
    """The markers of finished parts of a job: one small JSON file each, written after the part itself.

    Parameters
    ----------
    folder : path or fsspec URL
        Where the markers are.
    prefix : str
        Distinguishes several kinds of parts in one folder.
    durable : bool
        Force each marker to the disk. Without it, a job must check its parts when it resumes after a power
        failure; a killed process loses nothing either way.
    """

    def __init__(self, folder: PathLike, prefix: str = "part", *, durable: bool = True) -> None:
        self.folder = paths.normalise(folder)
        self.prefix = prefix
        self.durable = durable

    def file(self, part: int) -> str:
        """Return the path of the marker of a part."""
        return paths.join(self.folder, f"{self.prefix}-{part:08d}.json")

    def mark(self, part: int, content: dict[str, Any]) -> None:
        """Record that a part is done, with `content`; the folder must exist.

        It is not made here: a task that ends after its work was published or discarded must leave nothing behind.
        """
        write_sealed(self.file(part), content, durable=self.durable)

    def parts(self) -> list[int]:
        """Return the numbers of the parts that are done, ascending."""
        start, end = f"{self.prefix}-", ".json"
        names = [n for n in paths.list_names(self.folder) if n.startswith(start) and n.endswith(end)]
        middles = (n[len(start) : -len(end)] for n in names)
        return sorted(int(m) for m in middles if m.isdigit())

    def read(self, part: int) -> dict[str, Any]:
        """Return the content recorded with a part."""
        return read_sealed(self.file(part))

    def unmark(self, part: int) -> None:
        """Remove the marker of a part."""
        paths.remove(self.file(part))

    def missing(self, n_parts: int) -> list[int]:
        """Return the parts of 0..n_parts-1 that are not done."""
        done = set(self.parts())
        return [part for part in range(n_parts) if part not in done]
