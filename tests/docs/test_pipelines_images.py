"""Patches of photographs: the plan, the cutting, the way back, and the script that writes them to a store."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dbksvd_dask.demo.photographs import assemble_photo, load_photos, photo_patches, plan_patches
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.store.activations import open_activations
from pipelines import image_patches
from pipelines.image_patches import ImageFolder, check_memory, main, parse_stride


def small_images(seed=0, shapes=((11, 13, 3), (9, 8, 3))):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def naive_patch(image, row, col, side):
    """One patch by plain loops: pixel row, pixel column, channel."""
    out = []
    for i in range(side):
        for j in range(side):
            for channel in range(3):
                out.append(np.float32(image[row + i, col + j, channel]) / np.float32(255))
    return np.array(out, np.float32)


def naive_assemble(patches, rows, cols, shape):
    side = round((patches.shape[1] / 3) ** 0.5)
    out = np.zeros(shape, np.uint8)
    for y in range(shape[0]):
        for x in range(shape[1]):
            seen = [
                p.reshape(side, side, 3)[y - r, x - c]
                for p, r, c in zip(patches, rows, cols, strict=True)
                if r <= y < r + side and c <= x < c + side
            ]
            if seen:
                out[y, x] = np.rint(np.clip(np.mean(np.array(seen, float), axis=0), 0, 1) * 255)
    return out


def gather(**options):
    pieces = list(photo_patches(**options))
    rows = np.concatenate([rows for rows, _ in pieces])
    return rows, {name: np.concatenate([beside[name] for _, beside in pieces]) for name in pieces[0][1]}


def write_images(folder: Path, images):
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.png")


def tree(store: Path):
    return {
        str(f.relative_to(store)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(store.rglob("*"))
        if f.is_file()
    }


# -- patches ---------------------------------------------------------------------------------------------


def test_the_two_photographs_give_at_least_150000_patches_of_768_features():
    plan = plan_patches([photo.shape for photo in load_photos()])
    assert plan.n_samples == 172_216
    assert plan.n_features == 768
    assert np.bincount(plan.image).tolist() == [86_108, 86_108]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("stride", [1, 2, (1, 3), (5, 4)])
def test_patches_equal_plain_loops(stride, seed):
    images = small_images()
    rows, beside = gather(patch=4, stride=stride, images=images, seed=seed, chunk_rows=7)
    assert rows.dtype == np.float32
    assert [str(beside[name].dtype) for name in ("image", "row", "col")] == ["int16", "int32", "int32"]
    for i in range(len(rows)):
        image = images[beside["image"][i]]
        np.testing.assert_array_equal(rows[i], naive_patch(image, beside["row"][i], beside["col"][i], 4))


def test_every_pixel_is_in_a_patch_even_when_the_steps_do_not_fit():
    plan = plan_patches([(11, 13, 3)], patch=4, stride=(3, 4), seed=None)
    seen = np.zeros((11, 13), bool)
    for row, col in zip(plan.row, plan.col, strict=True):
        seen[row : row + 4, col : col + 4] = True
    assert seen.all()
    assert sorted(set(plan.row.tolist())) == [0, 3, 6, 7]


def test_no_patch_is_cut_twice_and_a_seed_only_changes_the_order():
    shapes = [(11, 13, 3), (9, 8, 3)]
    plain, mixed, other = (plan_patches(shapes, 4, 2, seed=seed) for seed in (None, 0, 1))
    places = [set(map(tuple, np.stack([p.image, p.row, p.col], axis=1).tolist())) for p in (plain, mixed, other)]
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == plain.n_samples
    assert (np.diff(plain.image) >= 0).all()
    assert not (np.diff(mixed.image) >= 0).all()
    assert not np.array_equal(mixed.row, other.row)


def test_patches_do_not_depend_on_the_size_of_the_chunks():
    images = small_images()
    whole, beside = gather(patch=4, stride=2, images=images, chunk_rows=10_000)
    pieces, beside_pieces = gather(patch=4, stride=2, images=images, chunk_rows=3)
    np.testing.assert_array_equal(whole, pieces)
    for name, array in beside.items():
        np.testing.assert_array_equal(array, beside_pieces[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 0}, "patch=0, stride=2: each must be at least 1"),
        ({"patch": 10}, r"image 1 of 9 x 8 pixels is smaller than patch=10; leave it out or use patch <= 8"),
        (
            {"images": [np.zeros((8, 8), np.uint8)]},
            r"image 0 has shape \(8, 8\); \(height, width, 3\) is needed",
        ),
        ({"images": []}, "no images were given"),
        ({"chunk_rows": 0}, "chunk_rows=0; use at least 1"),
    ],
)
def test_patches_that_cannot_be_cut_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        gather(**{"patch": 4, "stride": 2, "images": small_images(), **options})


# -- the way back ----------------------------------------------------------------------------------------


def test_a_photograph_comes_back_exactly_from_its_patches():
    photo = load_photos()[1]
    rows, beside = gather(images=[photo], stride=8)
    np.testing.assert_array_equal(assemble_photo(rows, beside["row"], beside["col"], photo.shape), photo)


def test_assembling_equals_plain_loops_with_overlaps_gaps_and_values_out_of_range():
    rng = np.random.default_rng(5)
    patches = rng.normal(0.5, 0.6, (6, 3 * 3 * 3)).astype(np.float32)
    rows, cols = rng.integers(0, 5, 6), rng.integers(0, 6, 6)
    result = assemble_photo(patches, rows, cols, (8, 9, 3))
    expected = naive_assemble(patches, rows, cols, (8, 9, 3))
    np.testing.assert_array_equal(result, expected)
    assert (expected == 0).all(axis=2).any()  # a gap is in the test


@pytest.mark.parametrize(
    ("n_features", "row", "message"),
    [
        (26, 0, r"patches of shape \(1, 26\); \(n, side \* side \* 3\) is needed"),
        (27, 6, r"patches of side 3 reach outside an image of shape \(8, 8, 3\)"),
        (27, -1, "reach outside"),
    ],
)
def test_patches_that_do_not_fit_the_image_are_refused(n_features, row, message):
    with pytest.raises(InputError, match=message):
        assemble_photo(np.zeros((1, n_features)), np.array([row]), np.array([0]), (8, 8, 3))
    with pytest.raises(InputError, match="1 patches, 2 rows, 1 cols"):
        assemble_photo(np.zeros((1, 27)), np.array([0, 0]), np.array([0]), (8, 8, 3))


# -- the script ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[], ["--keep-order"]])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_script_writes_the_patches_of_a_folder(tmp_path, dtype, order):
    images = small_images()
    write_images(tmp_path / "images", images)
    store = tmp_path / "patches.zarr"
    arguments = [str(store), "--images", str(tmp_path / "images"), "--patch", "4", "--stride", "2,3"]
    assert main([*arguments, "--chunk-rows", "16", "--dtype", dtype, *order]) == 0
    data = open_activations(store)
    rows, beside = gather(patch=4, stride=(2, 3), images=images, seed=None if order else 0)
    np.testing.assert_array_equal(data["activations"].values, rows.astype(dtype))
    for name, array in beside.items():
        np.testing.assert_array_equal(data[name].values, array)


def test_script_goes_on_where_it_was_interrupted_and_gives_the_same_bytes(tmp_path, monkeypatch):
    write_images(tmp_path / "images", small_images())
    options = ["--images", str(tmp_path / "images"), "--patch", "4", "--stride", "2", "--chunk-rows", "8"]
    assert main([str(tmp_path / "whole.zarr"), *options]) == 0
    cut, calls = image_patches.PatchPlan.cut, []

    def failing(self, images, start, stop):
        calls.append(start)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return cut(self, images, start, stop)

    monkeypatch.setattr(image_patches.PatchPlan, "cut", failing)
    with pytest.raises(KeyboardInterrupt):
        main([str(tmp_path / "broken.zarr"), *options])
    assert not (tmp_path / "broken.zarr").exists()
    assert main([str(tmp_path / "broken.zarr"), *options]) == 0
    assert sorted(calls) == sorted([*range(0, 42, 8), 16])  # only the interrupted chunk was begun twice
    assert tree(tmp_path / "broken.zarr") == tree(tmp_path / "whole.zarr")
    assert main([str(tmp_path / "broken.zarr"), *options]) == 0  # complete: nothing is cut
    assert len(calls) == 7


def test_script_keeps_a_store_of_other_options_unless_forced(tmp_path, capsys):
    write_images(tmp_path / "images", small_images())
    arguments = [str(tmp_path / "p.zarr"), "--images", str(tmp_path / "images"), "--patch", "4"]
    assert main([*arguments, "--stride", "2"]) == 0
    before = tree(tmp_path / "p.zarr")
    assert main([*arguments, "--stride", "3"]) == 1
    assert "already exists; choose another name, or replace it with --force" in capsys.readouterr().err
    assert tree(tmp_path / "p.zarr") == before
    assert main([*arguments, "--stride", "3", "--force"]) == 0
    assert open_activations(tmp_path / "p.zarr").sizes["sample"] == 4 * 4 + 3 * 3


def test_folder_reads_grey_images_as_colour_and_names_them_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    grey = np.arange(30, dtype=np.uint8).reshape(5, 6)
    Image.fromarray(grey).save(tmp_path / "sub" / "b.png")
    Image.fromarray(np.zeros((7, 4, 3), np.uint8)).save(tmp_path / "a.PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    folder = ImageFolder(tmp_path)
    assert folder.names == ["a.PNG", str(Path("sub") / "b.png")]
    assert folder.shapes() == [(7, 4, 3), (5, 6, 3)]
    np.testing.assert_array_equal(folder[1], np.repeat(grey[:, :, None], 3, axis=2))
    assert [image.shape for image in folder[:2]] == folder.shapes()


def test_folder_without_images_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no images in .*; files ending in \.jpg"):
        ImageFolder(tmp_path)


def test_mixing_more_images_than_memory_holds_is_refused():
    check_memory([(1000, 1000, 3)] * 3, max_memory=0.01)
    with pytest.raises(InputError, match=r"mixing patches of 4 images needs 0\.012 GB; --max-memory: 0\.01; give"):
        check_memory([(1000, 1000, 3)] * 4, max_memory=0.01)


def test_stride_is_one_number_or_two():
    assert parse_stride("2") == (2, 2)
    assert parse_stride("1,3") == (1, 3)
    with pytest.raises(Exception, match="use one number or two, such as 2 or 1,3"):
        parse_stride("1,2,3")
