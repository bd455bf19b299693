"""The errors a user can meet.

Every message says what was received, what is needed and, where there is one, what to type.
"""

from typing import Any

from dbksvd_dask.base.safe_text import redacted

REASON_LENGTH = 200  # a library may quote a whole file in its error


def brief(error: BaseException) -> str:
    """Summarise an error of another library in one line of limited length, to be quoted in a message."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH]}..."


class DBKSVDError(Exception):
    """Base class of every error this package raises on purpose; credentials of URLs are left out of messages."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(redacted(a) if isinstance(a, str) else a for a in args))


class InputError(DBKSVDError, ValueError):
    """Data or parameters that cannot be used: wrong shape, dtype, value or combination."""


class StoreError(DBKSVDError, OSError):
    """A store on disk or on a remote that is missing, empty, truncated or of another format."""


class BusyError(StoreError):
    """Another process is working on the same target."""


class MismatchError(DBKSVDError, ValueError):
    """Two artefacts that do not belong together, such as a checkpoint of other parameters."""


class MemoryPlanError(DBKSVDError, MemoryError):
    """The planned peak memory exceeds the given limit."""


class JobError(DBKSVDError, RuntimeError):
    """A restartable job that cannot continue: parts are missing, or failed after bounded retries."""


class DeviceError(DBKSVDError, RuntimeError):
    """The requested device is not available."""


class ClusterError(DBKSVDError, RuntimeError):
    """The scheduler cannot be reached or was lost, or its workers failed more often than is retried."""


class MixedArithmeticWarning(UserWarning):
    """Workers of one cluster round differently, so the last bits depend on which of them got which task."""
