"""What an atom does to the model: logits, steering, ablation."""

import json

import numpy as np
import pytest

from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.store.dictionary import save_dictionary
from tests.conftest import random_dictionary
from tests.helpers.cli import run
from tests.helpers.language_models import make_model, save_model
from tests.naive import lm as naive

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]


@pytest.fixture
def dictionary(rng):
    return Dictionary(
        random_dictionary(rng, 12, 32), rng.standard_normal(32), {"n_atoms": 12, "k": 3, "center": True}
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "neox"])
def test_logits_are_those_of_a_small_step_along_the_atom(rng, dictionary, family):
    from dbksvd_dask.lm import atom_logits

    model = make_model(family)
    with torch.no_grad():  # trained norms scale each feature differently
        model.last_norm.weight += torch.from_numpy(rng.uniform(-0.5, 0.5, 32)).float()
    found = atom_logits(model, dictionary, 5)
    for j, atom in enumerate(dictionary.atoms):
        expected = naive.logits_of(model, atom)
        order = np.argsort(-expected)
        np.testing.assert_array_equal(found.positive_token[j], order[:5])
        np.testing.assert_array_equal(found.negative_token[j], order[::-1][:5])
        np.testing.assert_allclose(found.positive[j], expected[order[:5]], rtol=2e-3)
        np.testing.assert_allclose(found.negative[j], expected[order[::-1][:5]], rtol=2e-3)


def test_tiles_change_nothing(dictionary, monkeypatch):
    from dbksvd_dask.lm import atom_logits, logits

    model = make_model()
    whole = atom_logits(model, dictionary)
    monkeypatch.setattr(logits, "TILE_NUMBERS", 1)
    tiled = atom_logits(model, dictionary)
    np.testing.assert_array_equal(whole.positive_token, tiled.positive_token)
    np.testing.assert_allclose(whole.negative, tiled.negative, rtol=1e-5)


def activation(model, hook, ids):
    """The activation of a call of the whole model at a hook, after whatever else is hooked in there."""
    seen = []
    module = model.module(model.hook(hook))
    handle = module.register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
    with torch.no_grad():
        model.model(ids)
    handle.remove()
    return seen[0][0].numpy()


IDS = torch.tensor([[0, 30, 40, 50, 60, 70]])


@pytest.mark.parametrize(("family", "hook"), [("llama", "resid:0"), ("gpt2", "mlp:1"), ("gemma3", "attn:0")])
def test_steering_adds_the_atom_to_every_token_but_the_first(dictionary, family, hook):
    from dbksvd_dask.lm import steer

    model = make_model(family)
    before = activation(model, hook, IDS)
    with steer(model, hook, dictionary, 7, 5.0):
        during = activation(model, hook, IDS)
    np.testing.assert_array_equal(during[0], before[0])
    np.testing.assert_allclose(during[1:] - before[1:], np.tile(5 * dictionary.atoms[7], (5, 1)), atol=1e-5)
    np.testing.assert_array_equal(activation(model, hook, IDS), before)


def test_ablation_takes_out_the_coefficient_or_the_projection(dictionary):
    from dbksvd_dask import encode
    from dbksvd_dask.lm import ablate

    model = make_model()
    before = activation(model, "resid:1", IDS)
    codes = encode(before[1:], dictionary)
    atom = int(codes["atom"][0, 0])
    own = np.where(codes["atom"].values == atom, codes["coefficient"].values, 0).sum(1)
    with ablate(model, "resid:1", dictionary, atom):
        during = activation(model, "resid:1", IDS)
    np.testing.assert_allclose(during[1:], before[1:] - own[:, None] * dictionary.atoms[atom], atol=1e-5)
    with ablate(model, "resid:1", dictionary, atom, how="projection"):
        during = activation(model, "resid:1", IDS)
    np.testing.assert_allclose((during[1:] - dictionary.mean) @ dictionary.atoms[atom], 0, atol=1e-5)
    np.testing.assert_array_equal(during[0], before[0])


def test_generation_with_a_cache_is_steered_as_without(dictionary):
    """While it generates, the model sees one token at a time: only the very first is left alone."""
    from dbksvd_dask.lm import steer

    model = make_model()
    plain = model.generate("the cat", 12)
    with steer(model, "resid:0", dictionary, 3, 40.0):
        steered = model.generate("the cat", 12)
        ids = [0, *model.tokenizer("the cat")["input_ids"]]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == 1:
                break
    assert steered != plain
    assert model.tokenizer.decode(ids[-12:], skip_special_tokens=True).endswith(steered)
    assert model.generate("the cat", 12) == plain


def test_drawn_continuations_follow_from_the_seed():
    model = make_model()
    drawn = [model.generate("a dog", 10, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_bad_input_is_refused(rng, dictionary):
    from dbksvd_dask.lm import ablate, atom_logits, steer

    model = make_model()
    narrow = Dictionary(random_dictionary(rng, 20, 16), None, {"n_atoms": 20, "k": 2})
    with pytest.raises(MismatchError, match="has 16 features"):
        atom_logits(model, narrow)
    with (
        pytest.raises(InputError, match="atom 12 does not exist; the dictionary has atoms 0 to 11"),
        steer(model, "resid:0", dictionary, 12, 1.0),
    ):
        pass
    with (
        pytest.raises(InputError, match="how='away' is not known"),
        ablate(model, "resid:0", dictionary, 1, how="away"),
    ):
        pass


def test_command_writes_logits(tmp_path, capsys, dictionary):
    model = save_model(tmp_path / "model")
    save_dictionary(tmp_path / "run", dictionary)
    code, _, err = run(capsys, "logits", model, tmp_path / "run", tmp_path / "logits.json", "--n", 4)
    assert code == 0, err
    found = json.loads((tmp_path / "logits.json").read_text())
    assert found["n_atoms"] == 12
    assert [len(found["atoms"][5][side]) for side in ("positive", "negative")] == [4, 4]
    values = [value for _, value in found["atoms"][5]["positive"]]
    assert values == sorted(values, reverse=True)
