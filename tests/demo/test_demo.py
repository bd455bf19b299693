"""The demo at tiny size, on made-up photographs; at full size it runs as `make demo`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dbksvd_dask import events
from dbksvd_dask.cli import demo as demo_command
from dbksvd_dask.codes import open_codes
from dbksvd_dask.demo import run
from dbksvd_dask.demo.photographs import load_photos, plan_patches
from dbksvd_dask.errors import StoreError
from dbksvd_dask.store.activations import open_activations
from tests.helpers import jobs

pytestmark = pytest.mark.slow  # one run of the demo, which most tests look at

TINY = run.DemoSettings(patch=8, stride=(2, 3), n_atoms=48, k=4, batch_size=1024, n_iter=3)


@pytest.fixture(scope="module")
def photos():
    """Corners of the real photographs, of different sizes."""
    first, second = load_photos()
    return [first[150:220, 120:200], second[180:240, 250:350]]


@pytest.fixture(scope="module")
def result(photos, tmp_path_factory):
    heard = []
    folder = tmp_path_factory.mktemp("demo") / "out"
    return run.run_demo(folder, settings=TINY, images=photos, callbacks=[heard.append]), heard


def test_patches_of_both_photographs_are_in_the_store_with_their_places(result, photos):
    store = open_activations(result[0].files["store"])
    assert store.sizes["sample"] == result[0].n_samples == 32 * 25 + 27 * 32
    rows = store["activations"].compute().to_numpy()
    for i in (0, 17, 901):
        image, row, col = (int(store[name][i]) for name in ("image", "row", "col"))
        patch = photos[image][row : row + 8, col : col + 8].reshape(-1) / np.float32(255)
        np.testing.assert_array_equal(rows[i], patch.astype(np.float16))


def test_the_photograph_comes_back_from_its_codes(result, photos):
    found = result[0]
    codes = open_codes(found.files["codes"])
    assert codes.sizes["sample"] == found.n_samples
    assert int((codes.atom >= 0).sum(dim="slot").max()) <= TINY.k
    assert found.psnr > run.peak_signal_to_noise(photos[0], np.full_like(photos[0], photos[0].mean()))
    assert 0 < found.metrics["mean_relative_error"] < 0.5


def test_pictures_and_page_are_written(result):
    from PIL import Image

    for name in ("atoms", "photograph", "error"):
        with Image.open(result[0].files[name]) as picture:
            assert min(picture.size) > 50
            assert len(np.unique(np.asarray(picture.convert("L")))) > 20
    with open(result[0].files["report"], encoding="utf-8") as page:
        assert "<html" in page.read(2000).lower()


def test_progress_is_told_for_every_step(result):
    heard = result[1]
    assert {event.job for event in heard if isinstance(event, events.JobProgress)} >= {"patches", "encode"}
    assert sum(isinstance(event, events.BatchFinished) for event in heard) == TINY.n_iter
    assert set(result[0].seconds) == {"patches", "fit", "encode", "reconstruct", "pictures", "report"}


def test_an_earlier_demo_is_kept_unless_forced_and_nothing_else_is_touched(result, photos, tmp_path):
    folder = tmp_path / "out"
    (folder / "run").mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(StoreError, match=r"holds an earlier demo \(.*run\); choose another folder, or replace it"):
        run.run_demo(folder, settings=TINY, images=photos)
    assert run._prepare(folder, force=True) == str(folder)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(StoreError, match="is a file; give the name of a folder"):
        run._prepare(folder / "notes.txt", force=True)


def test_the_full_demo_has_enough_patches():
    shapes = [photo.shape for photo in load_photos()]
    plan = plan_patches(shapes, run.DemoSettings().patch, run.DemoSettings().stride)
    assert (plan.n_samples, plan.n_features) == (172_216, 768)


def test_command_prints_a_table_and_where_things_are(result, monkeypatch, tmp_path):
    def quick(folder, *, settings, force, callbacks):
        assert (settings, force) == (None, True)
        return result[0]

    monkeypatch.setattr(run, "run_demo", quick)
    code, out, err = jobs.command("demo", tmp_path / "out", "--force")
    assert code == 0, err
    assert "1,664 x 192" in out
    assert "variance explained, all patches" in out
    for path in result[0].files.values():
        assert path in out
    code, out, _ = jobs.command("demo", tmp_path / "out", "--force", "--json")
    assert json.loads(out)["psnr"] == result[0].psnr


def test_rows_of_the_table_speak_of_what_was_measured(result):
    rows = dict(demo_command._rows(result[0]))
    assert rows["photograph from its codes"] == f"{result[0].psnr:.1f} dB"
    assert rows["atoms, of which each patch uses"] == "48, 4"
