"""Recipes: legal at every size, a change wins, and the documentation lists them as they are."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask import DBKSVD
from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.recipes import RECIPES, nested_groups, recipe_params

SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize("name", RECIPES)
@given(n_atoms=st.integers(1, 5000), k=st.integers(1, 80))
def test_every_recipe_is_legal_at_every_size(name, n_atoms, k):
    k = min(k, n_atoms)
    params = FitParams.checked(n_atoms=n_atoms, k=k, **recipe_params(name, n_atoms, k))
    assert params.slots >= k


@given(n_atoms=st.integers(1, 20_000), k=st.integers(1, 100))
def test_nested_groups_are_all_atoms_and_never_shrink(n_atoms, k):
    sizes = nested_groups(n_atoms, k)
    assert sum(sizes) == n_atoms
    assert len(sizes) <= k
    assert all(b >= a - 1 for a, b in pairwise(sizes))


@pytest.mark.parametrize("name", RECIPES)
def test_an_estimator_of_a_recipe_has_its_parameters_and_changes_win(name):
    model = DBKSVD.recipe(name, n_atoms=1024, k=16, seed=5, refit=False)
    expected = {**recipe_params(name, 1024, 16), "n_atoms": 1024, "k": 16, "seed": 5, "refit": False}
    found = model.get_params()
    assert {parameter: found[parameter] for parameter in expected} == expected
    others = DBKSVD(1024, 16).get_params()
    assert {p: v for p, v in found.items() if p not in expected} == {
        p: v for p, v in others.items() if p not in expected
    }
    assert repr(model).endswith(f"  # recipe {name!r}")


def test_the_documentation_lists_the_recipes_as_they_are():
    text = SETTINGS.read_text()
    for name, recipe in RECIPES.items():
        values = ", ".join(f"{p}={v!r}" for p, v in recipe_params(name, 1024, 16).items())
        assert f'| `"{name}"` | {recipe.purpose} | `{values}` |' in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "recvoer",
            r"recipe='recvoer' is not known; did you mean 'recover'\? Recipes are 'reconstruct'",
        ),
        ("", r"recipe='' is not known\. Recipes are 'reconstruct', 'recover', 'read', 'paper'"),
        (None, r"recipe=None is not known\. Recipes are"),
        (["read"], r"recipe=\['read'\] is not known"),
    ],
)
def test_an_unknown_recipe_is_refused_with_all_names(name, text):
    with pytest.raises(InputError, match=text):
        DBKSVD.recipe(name, 64, 4)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((0, 4), "n_atoms=0 is too small"), ((64, 65), "k=65 exceeds n_atoms=64"), ((64.5, 4), "not a whole number")],
)
def test_a_recipe_needs_legal_sizes(sizes, text):
    with pytest.raises(InputError, match=text):
        DBKSVD.recipe("read", *sizes)
