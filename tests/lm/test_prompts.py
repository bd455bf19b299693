"""The activation at one token of each prompt."""

import numpy as np
import pytest

from dbksvd_dask.errors import InputError
from tests.helpers.language_models import make_model, sentences

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_model()


def naive_activation(model, prompt, hook, position, context):
    """One prompt alone, without padding; the end is kept."""
    import torch

    ids = model.tokenizer(prompt, add_special_tokens=False)["input_ids"][-(context - 1) :]
    ids = torch.tensor([[model.tokenizer.bos_token_id, *ids]])
    place = model.hook(hook)
    return model.activations(ids, torch.ones_like(ids), [place])[place][0, position].numpy()


@pytest.mark.parametrize(("position", "context"), [(-1, 64), (-3, 64), (-1, 9)])
def test_rows_are_those_of_each_prompt_alone(model, position, context):
    from dbksvd_dask.lm import prompt_activations

    prompts = sentences(12)
    found = prompt_activations(model, prompts, "resid:1", position=position, context=context, batch_tokens=100)
    expected = [naive_activation(model, prompt, "resid:1", position, context) for prompt in prompts]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "position", "message"),
    [
        (["the cat"], 0, "position=0 must lie between -15 and -1 for context=16"),
        (["the cat"], -16, "position=-16 must lie between"),
        (["the cat sat on the mat", ""], -1, "prompt 1 has 0 tokens, position=-1 asks for one before them"),
    ],
)
def test_prompts_that_are_too_short_are_named(model, prompts, position, message):
    from dbksvd_dask.lm import prompt_activations

    with pytest.raises(InputError, match=message):
        prompt_activations(model, prompts, "resid:1", position=position, context=16)
