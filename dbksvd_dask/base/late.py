"""Modules that load when they are first used, so that `from dbksvd_dask import DBKSVD` stays cheap.

A module that needs a heavy library in some of its functions binds it late, and keeps its types::

    if TYPE_CHECKING:
        import zarr
    else:
        zarr = late("zarr")
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class LateModule(ModuleType):
    """Stands for a module; the first attribute asked for loads it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def late(name: str) -> ModuleType:
    """Return a stand-in for the module `name`, which loads it when it is first used.

    >>> import sys
    >>> statistics = late("statistics")
    >>> statistics.mean([1, 2, 6])
    3
    """
    return LateModule(name)


def is_instance(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of the class `name` of `module`, without loading it: unloaded, it has no objects.

    >>> from fractions import Fraction
    >>> is_instance(Fraction(1, 2), "fractions", "Fraction"), is_instance(2, "fractions", "Fraction")
    (True, False)
    """
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


@contextlib.contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Let a foreign module be imported in this block without the modules that it imports but does not use at once.

    Those loaded already stay as they are. Whoever imports one of the others in the block gets a stand-in that
    loads it when used; after the block nothing of it is left in `sys.modules`.

    Parameters
    ----------
    *names : full names of modules
    """
    stand_ins = {name: LateModule(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
