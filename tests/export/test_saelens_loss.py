"""SAELens' own evaluation of an exported dictionary gives the loss that we give."""

import numpy as np
import pytest

from tests.helpers.language_models import make_model, sentences

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    ("family", "refit"), [("llama", False), ("llama", True), ("gemma3", False), ("gpt2", False)]
)
def test_loss_agrees_with_saelens_on_the_same_tokens(family, refit, tmp_path):
    pytest.importorskip("sae_lens")
    pytest.importorskip("transformers")
    from benchmarks.check_saelens_loss import compare
    from dbksvd_dask import DBKSVD, lm

    model, texts = make_model(family), lm.read_texts(sentences(60))
    rows = np.concatenate(
        [lm.text_activations(model, t, "resid:0", context=32).rows for t in sentences(40, seed=1)]
    )
    fitted = DBKSVD(n_atoms=64, k=4, n_iter=3, refit=refit).fit(rows)
    found = compare(model, texts, "resid:0", fitted, context=32, n_tokens=400, form="plugin")
    assert found["n_tokens"] == found["n_tokens_saelens"] > 300
    assert found["largest_difference"] < 1e-4
    assert abs(found["ours"]["reconstructed"] - found["ours"]["intact"]) > 1e-3  # a loss there is
