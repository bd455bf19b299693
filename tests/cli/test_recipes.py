"""`dbksvd fit --recipe`: its parameters, changes that win, the stored name, resume without it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.base import clone

from dbksvd_dask import DBKSVD, open_dictionary
from dbksvd_dask.plan.recipes import RECIPES, recipe_params
from tests.helpers import jobs

SMALL = ("--n-atoms", 36, "--k", 4, "--chunk-size", 128, "--batch-size", 256)
SAME = {"chunk_size": 128, "batch_size": 256}


@pytest.fixture
def store(tmp_path):
    return jobs.write_store(tmp_path / "store.zarr", jobs.made_up(600, 16), 100)


def test_a_recipe_gives_the_dictionary_of_the_library_and_is_stored(tmp_path, store):
    code, _, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--recipe", "read", "--n-iter", 2)
    assert code == 0, err
    model = DBKSVD.recipe("read", 36, 4, n_iter=2, **SAME).fit(store)
    found = open_dictionary(tmp_path / "run")
    np.testing.assert_array_equal(found.atoms, model.components_)
    assert found.recipe == model.to_dictionary().recipe == "read"
    assert (found.params["nonneg"], found.params["encode"], found.params["groups"]) == (True, "staged", [9, 27])
    assert "recipe 'read'" in repr(found)
    assert "read" in found._repr_html_()
    code, out, _ = jobs.command("info", tmp_path / "run", "--json")
    assert json.loads(out)["extra"]["recipe"] == "read"


def test_resume_keeps_the_recipe_and_its_parameters(tmp_path, store):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert jobs.command("fit", store, run, *SMALL, "--recipe", "read", "--n-iter", 2)[0] == 0
    for again in (("--n-iter", 3), ("--n-iter", 4, "--recipe", "read")):
        code, _, err = jobs.command("fit", store, run, "--resume", *again)
        assert code == 0, err
    assert jobs.command("fit", store, whole, *SMALL, "--recipe", "read", "--n-iter", 4)[0] == 0
    assert open_dictionary(run).recipe == "read"
    np.testing.assert_array_equal(open_dictionary(run).atoms, open_dictionary(whole).atoms)
    code, _, err = jobs.command("fit", store, run, "--resume", "--recipe", "reconstruct")
    assert code == 1
    assert "was made with --no-refit, this fit has --refit" in err


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_shows_every_parameter_and_given_ones_win(tmp_path, store, name):
    options = ("--recipe", name, "--no-refit", "--seed", 7, "--plan", "--json")
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL, *options)
    assert code == 0, err
    plan = json.loads(out)
    expected = recipe_params(name, 36, 4) | {"refit": False, "seed": 7, "batch_size": 256}
    expected = json.loads(json.dumps(expected))
    assert plan["recipe"] == name
    assert {parameter: plan["parameters"][parameter] for parameter in expected} == expected


def test_an_unknown_recipe_is_one_clear_message(tmp_path, store):
    code, out, err = jobs.command("fit", store, tmp_path / "run", *SMALL, "--recipe", "reed")
    assert (code, out) == (2, "")
    assert "Invalid value for '--recipe': 'reed' is not known; did you mean 'read'? Recipes are 'rec" in err


def test_help_lists_the_recipes_with_their_purposes():
    _, out, _ = jobs.command("fit", "--help")
    for name, recipe in RECIPES.items():
        assert f"  {name:<12} {recipe.purpose}\n" in out


def test_the_name_survives_clone_save_and_load(tmp_path):
    Y = jobs.made_up(200, 16)
    model = DBKSVD.recipe("paper", 24, 3, n_iter=1, batch_size=100)
    assert clone(model)._recipe == "paper"
    assert clone(model).get_params() == model.get_params()
    path = model.fit(Y).save(tmp_path / "dictionary")
    again = DBKSVD.load(path)
    assert repr(again).endswith("# recipe 'paper'")
    np.testing.assert_array_equal(again.components_, model.components_)
    assert repr(DBKSVD(24, 3)) == "DBKSVD(k=3, n_atoms=24)"
