"""What a fit keeps of itself: which checkpoint to go on from, and word of it when the fit stops early."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dbksvd_dask import events
from dbksvd_dask.errors import BusyError, ClusterError, MismatchError, StoreError
from dbksvd_dask.store.dictionary import (
    KEEP,
    Dictionary,
    checkpoints,
    latest_checkpoint,
    readable_checkpoint,
    remove_old_checkpoints,
)
from dbksvd_dask.store.lock import FIT_LOCK, hold

logger = logging.getLogger(__name__)

# A fit may be made longer, and may go on on another device; everything else decides which dictionary it gives.
MAY_CHANGE = frozenset({"n_iter", "device"})


def newest_readable(run: str) -> Dictionary:
    """Newest checkpoint of a run that can be read; those that a failing disk has damaged are passed over."""
    _, dictionary, damaged = readable_checkpoint(run)
    for error in damaged:
        logger.warning("%s; trying the checkpoint before", error)
    return dictionary


def newest_iteration(run: str) -> int:
    """Iterations done by the newest checkpoint of a run, as its name tells; 0 without one."""
    newest = latest_checkpoint(run)
    return int(Path(newest).stem.rpartition("-")[2]) if newest else 0


def tidy(run: str) -> None:
    """Remove what a fit that was killed at its very end left; a run that is read-only or in use stays as it is."""
    if os.path.exists(os.path.join(run, FIT_LOCK)) or len(checkpoints(run)) > KEEP:
        with suppress(StoreError), hold(run, "a fit", inside=True):
            remove_old_checkpoints(run)


def require_same_fit(run: str, stored: Dictionary, params: dict[str, Any], source: str) -> None:
    """Refuse to go on from a checkpoint of another fit.

    Parameters
    ----------
    params : parameters of the fit that wants to go on, as `FitParams.to_json` gives them
    source : identity of what it reads
    """
    for name, value in params.items():
        if name not in MAY_CHANGE and stored.params.get(name) != value:
            raise MismatchError(
                f"the checkpoint in {run} was made with {name}={stored.params.get(name)!r}, this fit has "
                f"{name}={value!r}; use the same value, or another folder for a new fit"
            )
    if stored.source != source:
        raise MismatchError(
            f"the checkpoint in {run} was fitted on {stored.source}, this fit reads {source}; "
            "give the same store, or another folder for a new fit"
        )


def _intact(run: str) -> str:
    """Newest checkpoint of a run that can be read; empty if there is none."""
    try:
        return readable_checkpoint(run)[0] if latest_checkpoint(run) else ""
    except (StoreError, MismatchError):
        return ""


@contextmanager
def telling_what_is_safe(run: str, emit: Callable[[events.Event], None]) -> Iterator[None]:
    """Let an interruption, a lost cluster or a failing store end a fit with word of the newest checkpoint."""
    try:
        yield
    except BusyError:  # the fit in that folder is another's
        raise
    except (KeyboardInterrupt, ClusterError, StoreError) as error:
        newest = _intact(run)
        done = int(Path(newest).stem.rpartition("-")[2]) if newest else 0  # which may not be the newest of all
        safe = f"{newest} is intact; go on with resume=True (--resume)" if newest else "there is no checkpoint yet"
        message = f"{' '.join(str(error).split()) or 'interrupted'}; {safe}"
        logger.info("the fit stopped: %s", message)  # whoever catches the error shows it
        emit(events.FitStopped(done, newest, message))
        raise type(error)(message) from error
