"""Talking to an object store: ranges in parallel, retries with back-off, and errors that say what to set.

The libraries behind fsspec retry as well, but give up within seconds; a job of hours has to outlive a restarting
proxy. What no retry can mend, such as missing credentials, is an error at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dbksvd_dask.errors import DBKSVDError, StoreError, brief

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A range longer than this is read in several requests at once: one connection to an object store delivers some
# tens of megabytes a second, whatever the network can do.
PART_BYTES = 8 << 20
# attempts of a request, and seconds to wait after the first and at most: 30 seconds in all
ATTEMPTS, FIRST_WAIT, LONGEST_WAIT = 7, 0.5, 16.0

# what passes: by the number of the system, or by the name of a class of one of the libraries
_PASSING = {
    errno.EBUSY,
    errno.EIO,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ECONNABORTED,
    errno.EAGAIN,
}
_PASSING_NAMES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ConnectionClosedError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "TimeoutError",
}
_FINAL_NAMES = {"FileNotFoundError", "PermissionError", "NoCredentialsError", "PartialCredentialsError"}
_UNREACHABLE = {"EndpointConnectionError", "ClientConnectorError", "ConnectTimeoutError", "gaierror"}

# what to set for the credentials of a protocol, and for the address of a server
VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)", "FSSPEC_S3_ENDPOINT_URL"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_GS_ENDPOINT_URL"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
}
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}


def _names(error: BaseException) -> set[str]:
    """Return the names of the classes of an error and of what caused it."""
    found, seen = set(), set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found |= {kind.__name__ for kind in type(current).__mro__}
        current = current.__cause__ or current.__context__
    return found


def is_passing(error: BaseException) -> bool:
    """Return whether a request that failed so may succeed later."""
    names = _names(error)
    if names & _FINAL_NAMES or isinstance(error, DBKSVDError):
        return False
    return bool(names & (_PASSING_NAMES | _UNREACHABLE)) or getattr(error, "errno", None) in _PASSING


def waits() -> Iterator[float]:
    """Yield the seconds to wait after each failed attempt but the last: twice as long each time, and some chance.

    Many workers that failed together do not come back together.
    """
    for i in range(ATTEMPTS - 1):
        yield min(LONGEST_WAIT, FIRST_WAIT * 2**i) * random.uniform(0.5, 1.0)


def retrying(request: Callable[[], T], what: str, sleep: Callable[[float], None] | None = None) -> T:
    """Send a request, and again after a failure that may pass.

    Parameters
    ----------
    request : callable
        Must be safe to repeat.
    what : str
        Name for the log.
    sleep : callable, optional
        Waits; default `time.sleep`.
    """
    for wait in waits():
        try:
            return request()
        except Exception as error:
            if not is_passing(error):
                raise
            logger.info("%s: %s; trying again in %.1f s", what, brief(error), wait)
        (sleep or time.sleep)(wait)
    return request()


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn what a library raises over credentials or an address into one error that says what to set.

    Anything else, FileNotFoundError among it, passes unchanged.
    """
    try:
        yield
    except DBKSVDError:
        raise
    except Exception as error:
        said = explain(path, error)
        if said is None:
            raise
        raise StoreError(said) from error


def explain(path: str, error: BaseException) -> str | None:
    """Say what to set where credentials or the address of a server are missing or wrong; else None."""
    protocol = path.partition("://")[0].rpartition("::")[2]
    credentials, address = VARIABLES.get(_SAME.get(protocol, protocol), ("", ""))
    names = _names(error)
    if not credentials:
        return None
    if names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}:
        return f"cannot open {path}: no credentials; set {credentials}"
    if names & _UNREACHABLE:
        return f"cannot open {path}: the server cannot be reached ({brief(error)}); set {address} to its address"
    if "PermissionError" in names:
        return f"cannot open {path}: access denied ({brief(error)}); are these the right {credentials}?"
    if "bucket does not exist" in str(error):
        return f"cannot open {path}: there is no such bucket; on a server that is not the provider's set {address}"
    return None


def read_ranges(
    fs: Any, files: Sequence[str], starts: Sequence[int], stops: Sequence[int], what: str
) -> list[bytes | Exception]:
    """Read byte ranges of files, all at once and long ones in parts; again those whose failure may pass.

    Returns
    -------
    list of bytes or Exception
        One item per range.
    """
    parts = [
        (i, low, min(low + PART_BYTES, stops[i]))
        for i in range(len(files))
        for low in range(starts[i], max(stops[i], starts[i] + 1), PART_BYTES)
    ]
    found: list[Any] = [None] * len(parts)
    left = list(range(len(parts)))
    for wait in itertools.chain(waits(), [None]):
        wanted = [parts[j] for j in left]
        low, high = [a for _, a, _ in wanted], [b for _, _, b in wanted]
        contents = fs.cat_ranges([files[i] for i, _, _ in wanted], low, high, on_error="return")
        for j, content in zip(left, contents, strict=True):
            found[j] = content
        left = [j for j in left if isinstance(found[j], Exception) and is_passing(found[j])]
        if not left or wait is None:
            break
        logger.info("%s: %d of %d ranges failed (%s); trying again", what, len(left), len(parts), found[left[0]])
        time.sleep(wait)
    return [_joined([found[j] for j in range(len(parts)) if parts[j][0] == i]) for i in range(len(files))]


def _joined(parts: list[Any]) -> bytes | Exception:
    failed = next((part for part in parts if isinstance(part, Exception)), None)
    if failed is not None:
        return failed
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
