"""Recipes: one word for each purpose of a dictionary, and the parameters that it stands for.

The figures behind every recipe are in docs/settings.md. A recipe is a starting point, not a mode: it sets ordinary
parameters, and any of them can be given another value.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.groups import group_budgets

# Fewest atoms of the first group of a dictionary for reading, and how many times as many atoms there are with the
# next group as without it. Twice as many, in more groups with fewer nonzeros each, probed 1 point worse and had
# 2.5 points less explained variance; a first group of 8 or 16 atoms made no difference.
FIRST_GROUP, TIMES = 8, 4
# Exponent of the whitening of a dictionary for reading: 0.3 and 0.7 probed alike or worse, none 1 point worse.
WHITEN_TO_READ = 0.5
# The same of one that reconstructs: on activations and photographs, 0.25 explained more of the total variance and
# of that of each feature than 0 did; 0.5 favours features of small variance at the cost of the total.
WHITEN_A_LITTLE = 0.25


class Recipe(NamedTuple):
    """The parameters for one purpose.

    Attributes
    ----------
    purpose : what it is best at, in one line
    values : parameter -> value, whatever the size of the dictionary
    sized : function of (n_atoms, k) that gives further values, or None
    """

    purpose: str
    values: Mapping[str, Any]
    sized: Callable[[int, int], dict[str, Any]] | None = None


def nested_groups(n_atoms: int, k: int) -> tuple[int, ...]:
    """Sizes of groups that hold, together with those before, four times as many atoms each, and a part of k.

    The first one has at least `FIRST_GROUP` atoms.

    >>> nested_groups(1024, 16)
    (16, 48, 192, 768)
    >>> nested_groups(1024, 3)
    (64, 192, 768)
    >>> nested_groups(70, 8)
    (17, 53)
    >>> nested_groups(24, 8)
    (24,)
    """
    sizes = [n_atoms]
    while True:
        first = sizes[0] // TIMES
        split = [first, sizes[0] - first, *sizes[1:]]
        if first < FIRST_GROUP or not _fits(split, k):
            return tuple(sizes)
        sizes = split


def _fits(sizes: list[int], k: int) -> bool:
    """Whether every group gets a share of k, and none more than it has atoms."""
    return len(sizes) <= k and all(a <= b for a, b in zip(group_budgets(k, len(sizes)), sizes, strict=True))


RECIPES = {
    "reconstruct": Recipe(
        purpose="least error for a given number of nonzeros",
        values={"init": "data", "refit": True, "whiten": WHITEN_A_LITTLE},
    ),
    "recover": Recipe(
        purpose="find the features that generated the data, and codes that say when each is present",
        values={
            "nonneg": True,
            "growth": 1.5,
            "sparsity": "mean",
            "frequency_prior": True,
            "refit": True,
            "init": "uniform",
        },
    ),
    "read": Recipe(
        purpose="atoms to look at, label and probe with; general ones first",
        values={"nonneg": True, "encode": "staged", "whiten": WHITEN_TO_READ},
        sized=lambda n_atoms, k: {"groups": nested_groups(n_atoms, k)},
    ),
    "paper": Recipe(
        purpose="the published method, unchanged: random start, no momentum, full batches",
        values={
            "init": "uniform",
            "momentum": 0.0,
            "warm_up": False,
            "n_iter": 40,
            "batch_size": 65536,
            "n_rounds": 8,
            "lanczos_steps": 2,
        },
    ),
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name; raises `InputError` with all names and the nearest one."""
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    raise InputError(f"recipe={name!r} {unknown_recipe(name)}")


def unknown_recipe(name: Any) -> str:
    """Say that a recipe is not known, and which are."""
    near = difflib.get_close_matches(str(name), RECIPES, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return f"is not known{meant} Recipes are {', '.join(map(repr, RECIPES))}"


def recipe_params(name: str, n_atoms: int, k: int) -> dict[str, Any]:
    """Return the parameters that a recipe stands for.

    Parameters
    ----------
    n_atoms, k : checked sizes of the dictionary

    >>> recipe_params("read", 64, 8)
    {'nonneg': True, 'encode': 'staged', 'whiten': 0.5, 'groups': (16, 48)}
    """
    recipe = find_recipe(name)
    return {**recipe.values, **(recipe.sized(n_atoms, k) if recipe.sized else {})}
