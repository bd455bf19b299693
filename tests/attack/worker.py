"""A process that runs cases, one after the other, and may die of one.

``python -m tests.attack.worker FOLDER [KIND ...]``

It reads "SEED CASE" from standard input and answers each with one line of JSON.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import matplotlib.pyplot as plt
import numpy as np

from dbksvd_dask.errors import DBKSVDError
from dbksvd_dask.plan import units
from dbksvd_dask.report import figures
from dbksvd_dask.store import atomic
from tests.attack import actions
from tests.attack.crafted import CRAFTED
from tests.attack.kinds import KINDS, Kind
from tests.attack.mutations import mutate_target

# A case that asks for more is a failure, and not the end of the machine.
ADDRESS_SPACE = 12 << 30
# Seconds, below the patience of the driver.
STACKS_AFTER = 300.0


class Attack:
    """Runs cases in a folder of its own; originals and references are made once and kept."""

    def __init__(self, home: Path, names: Sequence[str] = ()) -> None:
        self.home = home
        self.kinds = [kind for kind in KINDS if not names or kind.name in names]
        self.references: dict[str, Any] = {}

    def original(self, kind: Kind) -> Path:
        """Make the originals of a kind, once."""
        place = self.home / "originals" / kind.name
        if not (place / ".whole").exists():
            shutil.rmtree(place, ignore_errors=True)
            made = self._empty_case()
            kind.build()  # where cases are run: unfinished work remembers its paths
            (made / ".whole").touch()
            os.chdir(self.home)
            shutil.copytree(made, place)
        return place

    def fresh(self, kind: Kind) -> Path:
        """Copy the originals to the folder of a case, always of the same name."""
        original, place = self.original(kind), self._empty_case()
        shutil.copytree(original, place, dirs_exist_ok=True)
        return place

    def _empty_case(self) -> Path:
        place = self.home / "case"
        os.chdir(self.home)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.chdir(place)
        return place

    def reference(self, kind: Kind, action: str) -> dict[str, Any]:
        """What an action gives on the originals."""
        key = f"{kind.name}/{action}"
        if key not in self.references:
            self.fresh(kind)
            self.references[key] = outcome(kind.actions[action])
        return self.references[key]

    def case(self, seed: int, number: int) -> dict[str, Any]:
        """Run one case; say what was done, how it ended, and whether that is a failure."""
        rng = np.random.default_rng([seed, number])
        kind = self.kinds[int(rng.integers(len(self.kinds)))]
        action = choose(kind, rng)
        reference = self.reference(kind, action)
        place = self.fresh(kind)
        if kind.craft is not None and rng.random() < 0.3:
            remove(place / kind.target)
            CRAFTED[kind.craft](place / kind.target, rng)
            how = "crafted"
        else:
            how = mutate_target(place / kind.target, rng)
        found = outcome(kind.actions[action])
        found["verdict"] = self.judge(kind, action, reference, found)
        return {"kind": kind.name, "action": action, "how": how, **found}

    def judge(self, kind: Kind, action: str, reference: dict[str, Any], found: dict[str, Any]) -> str:
        """Name the end of a case; "failure" is the only bad one."""
        if found["end"] != "result":
            return "refused" if found["end"] == "ours" else "failure"
        if not kind.actions[action].exact:
            return "described"
        if reference.items() <= found.items():
            return "same"
        if kind.verify is None:
            return "other values"
        return "found by --verify" if outcome_of_verify(kind.verify) == "ours" else "failure"


def choose(kind: Kind, rng: np.random.Generator) -> str:
    """Choose an action; three times in four one whose result is compared, where there is one."""
    exact = sorted(name for name, action in kind.actions.items() if action.exact)
    names = exact if exact and rng.random() < 0.75 else sorted(kind.actions)
    return names[int(rng.integers(len(names)))]


def remove(path: Path) -> None:
    """Delete a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def outcome(action: actions.Action) -> dict[str, Any]:
    """Run an action; tell a result from an error of ours and from anything else."""
    try:
        return {"end": "result", "text": action.run()}
    except DBKSVDError as error:
        text = str(error)
        one_line = bool(text) and len(text.splitlines()) == 1 and len(text) < 8000
        return {"end": "ours" if one_line else "not one line", "text": text[:2000], "class": type(error).__name__}
    except BaseException as error:  # whatever it is, it was not foreseen
        return {
            "end": "unforeseen",
            "text": f"{type(error).__name__}: {error}"[:500],
            "trace": traceback.format_exc(),
        }


def outcome_of_verify(path: str) -> str:
    """How `dbksvd info --verify` ends."""
    return str(outcome(actions.Action(lambda: str(actions.verify(path))))["end"])


def quiet() -> None:
    """Keep the disk, the terminal and the memory of the machine out of it, and skip the drawing of curves."""
    atomic.fsync_path = lambda path: None
    atomic.fsync_path = lambda path: None
    units.MIN_CHUNK_ROWS = 20
    figures.themed_svg = lambda figure, *args: str(plt.close(figure))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    dask.config.set(scheduler="threads", num_workers=2)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer cases until standard input ends."""
    faulthandler.enable()  # a crash shows where it happened
    quiet()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    attack = Attack(Path(sys.argv[1]).resolve(), sys.argv[2:])
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        seed, number = map(int, line.split())
        faulthandler.dump_traceback_later(STACKS_AFTER)  # says where it hangs, before the driver gives up
        answers.write(json.dumps(attack.case(seed, number)) + "\n")
        faulthandler.cancel_dump_traceback_later()
        answers.flush()


if __name__ == "__main__":
    main()
