"""benchmarks/vision.py at its tiny size, on features of made-up pictures."""

import numpy as np
import pytest

from benchmarks import network_table, vision
from pipelines.image_features import write_store
from tests.docs.test_pipelines_features import made_up_pictures, tiny_network

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[False, True], ids=["pooled", "tokens"])
def store(request, tmp_path):
    path = tmp_path / "features.zarr"
    write_store(str(path), made_up_pictures(300), tiny_network, request.param, {})
    return path


def test_held_out_images_are_the_last_sixth_and_stay_whole(store):
    data = vision.Features(store.parent, "features", store)
    cells = 4 if len(data.label) > 50 else 1
    assert len(data.held_out) == 50 * cells
    assert len(data.train()) == 250 * cells
    np.testing.assert_array_equal(data.label, np.repeat(np.arange(250, 300) % 3, cells))


@pytest.mark.slow
def test_every_method_is_measured_with_the_same_pursuit_and_nothing_twice(store, tmp_path):
    out = tmp_path / "vision.jsonl"
    methods = ["DB-KSVD", "DB-KSVD Matryoshka", "ITDA", "random"]
    options = [str(store), "--size", "tiny", "--k", "5", "--methods", *methods, "--out", str(out)]
    lines = vision.main(options)
    rows = {key[5]: cell for key, cell in network_table.merged(lines).items()}
    assert set(rows) == {*methods, "raw"}
    for name in methods:
        assert rows[name]["l0"] <= 5
        assert rows[name]["variance_explained"] > 0
        assert 0 <= rows[name]["accuracy_5"] <= 1
    assert rows["raw"]["accuracy_5"] > 0.9
    before = out.read_text()
    vision.main(options)
    assert out.read_text() == before


@pytest.mark.interop
@pytest.mark.slow
def test_autoencoders_have_a_column_of_their_own_encoder(store, tmp_path):
    pytest.importorskip("torch")
    options = [str(store), "--size", "tiny", "--k", "5", "--methods", "TopK SAE", "--parts", "variance"]
    lines = vision.main([*options, "--out", str(tmp_path / "v.jsonl")])
    (cell,) = [c for key, c in network_table.merged(lines).items() if key[5] == "TopK SAE" and "l0" in c]
    assert cell["own_variance"] != cell["variance_explained"]
