"""Folders as other tools write them: saev, BioNeMo, Llamascopium, several layers, several hooks of SAELens."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from dbksvd_dask import DBKSVD
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store.activations import open_activations, open_rows
from dbksvd_dask.store.reader import LinkedReader
from tests.helpers.cli import fails, run


def numbers(*shape, dtype="float32"):
    """Numbers that are all different, exact in float16."""
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def stored(path):
    reader = open_rows(path)
    return reader.read(0, reader.n_samples)


class Unpickled:
    """Notices when somebody unpickles it."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


# saev: `Metadata` and `ShardWriter` of src/saev/data/shards.py, protocol 2.1


def write_saev(folder, examples, per_shard=4, with_shards=True, **changed):
    """Write examples (n, layers, tokens, features) as saev does: shards of one size, the last not filled."""
    import base64
    import pickle

    folder.mkdir()
    n, n_layers, tokens, width = examples.shape
    metadata = {
        "family": "clip",
        "ckpt": "ViT-B-16/openai",
        "layers": [5, 11],
        "content_tokens_per_example": tokens - 1,
        "cls_token": True,
        "d_model": width,
        "n_examples": n,
        "max_tokens_per_shard": per_shard * n_layers * tokens,
        "data": base64.b64encode(pickle.dumps(Unpickled())).decode(),
        "dataset": "/data/images",
        "pixel_agg": None,
        "dtype": "float32",
        "protocol": "2.1",
    }
    metadata = {name: value for name, value in (metadata | changed).items() if value is not None}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    entries = []
    for i, start in enumerate(range(0, n, per_shard)):
        part = examples[start : start + per_shard]
        shard = np.zeros((per_shard, *examples.shape[1:]), np.float32)
        shard[: len(part)] = part
        shard.tofile(folder / f"acts{i:06}.bin")
        entries.append({"name": f"acts{i:06}.bin", "n_examples": len(part)})
    if with_shards:
        (folder / "shards.json").write_text(json.dumps(entries))
    np.zeros((n, tokens - 1), np.uint8).tofile(folder / "labels.bin")
    return folder


@pytest.mark.parametrize("with_shards", [True, False])
@pytest.mark.parametrize("link", [False, True])
def test_layer_of_saev_shards(link, with_shards, tmp_path):
    examples = numbers(10, 2, 5, 6)
    folder = write_saev(tmp_path / "shards", examples, with_shards=with_shards)
    result = import_activations(folder, tmp_path / "s", layer=11, link=link, chunk_rows=7)
    assert (result.n_samples, result.n_features, result.n_files) == (50, 6, 3)
    np.testing.assert_array_equal(stored(tmp_path / "s"), examples[:, 1].reshape(-1, 6))
    assert isinstance(open_rows(tmp_path / "s"), LinkedReader) == link
    assert open_activations(tmp_path / "s").attrs["provenance"]["layer"] == 11


def test_saev_of_one_layer_needs_no_choice_and_its_cls_tokens_can_be_left_out(tmp_path):
    examples = numbers(6, 1, 4, 3)
    folder = write_saev(tmp_path / "shards", examples, layers=[-2], per_shard=3)
    import_activations(folder, tmp_path / "s", drop_first_token=True)
    np.testing.assert_array_equal(stored(tmp_path / "s"), examples[:, 0, 1:].reshape(-1, 3))


def test_saev_metadata_of_the_first_protocol(tmp_path):
    """`n_imgs`, `n_patches_per_img` and `d_vit`, and no shards.json: src/saev/data/writers.py."""
    examples = numbers(7, 2, 5, 6)
    old = {"n_imgs": 7, "n_patches_per_img": 4, "d_vit": 6, "dtype": None, "protocol": None, "n_examples": None}
    old |= {"content_tokens_per_example": None, "d_model": None}
    folder = write_saev(tmp_path / "shards", examples, with_shards=False, **old)
    import_activations(folder, tmp_path / "s", layer=5)
    np.testing.assert_array_equal(stored(tmp_path / "s"), examples[:, 0].reshape(-1, 6))


def test_another_layer_is_another_import(tmp_path):
    folder = write_saev(tmp_path / "shards", numbers(4, 2, 5, 6))
    import_activations(folder, tmp_path / "s", layer=5)
    with pytest.raises(StoreError, match="already exists"):
        import_activations(folder, tmp_path / "s", layer=11)


def remove_shard(folder):
    (folder / "acts000001.bin").unlink()


def cut_shard(folder):
    (folder / "acts000001.bin").write_bytes(b"1234567")


def empty_metadata(folder):
    (folder / "metadata.json").write_text("[]")


def more_in_a_shard(folder):
    (folder / "shards.json").write_text('[{"name": "acts000000.bin", "n_examples": 9}]')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_shard, r"the 2 shards in .*shards hold 6 examples, its metadata.json says 10; copy the missing"),
        (cut_shard, r"acts000001.bin holds 7 bytes, not a whole number of examples of \[2, 5, 6\] float32 \(240"),
        (empty_metadata, r"metadata.json says n_examples None; need a whole number from 1 on"),
        (more_in_a_shard, r"shards.json says n_examples 9 of acts000000.bin, which has room for 4"),
    ],
)
def test_damaged_saev_shards_are_refused(damage, message, tmp_path):
    folder = write_saev(tmp_path / "shards", numbers(10, 2, 5, 6))
    damage(folder)
    with pytest.raises(StoreError, match=message):
        import_activations(folder, tmp_path / "s", layer=11)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ["all"]}, r"says layers \['all'\]; need a list of numbers such as \[13, 21\]"),
        ({"d_model": 2.5}, r"says d_model 2.5; need a whole number"),
        ({"dtype": "float16"}, r"says dtype 'float16'; shards of saev are float32"),
    ],
)
def test_wrong_saev_metadata_are_refused(changed, message, tmp_path):
    folder = write_saev(tmp_path / "shards", numbers(4, 2, 5, 6), **changed)
    with pytest.raises(StoreError, match=message):
        import_activations(folder, tmp_path / "s", layer=11)


def test_layers_are_named_where_one_has_to_be_chosen(tmp_path, capsys):
    folder = write_saev(tmp_path / "shards", numbers(4, 2, 5, 6))
    said = fails(capsys, "import", folder, tmp_path / "s")
    assert "(example, layer, token, feature); choose one with --layer N: 5, 11" in said
    said = fails(capsys, "import", folder, tmp_path / "s", "--layer", "1")
    assert "--layer 1 does not fit" in said
    assert "has the layers 5, 11" in said
    code, out, _ = run(capsys, "info", folder)
    assert code == 0
    assert "saev" in out


# four dimensions in other files


def test_layer_of_a_raw_file_with_a_description(tmp_path):
    examples = numbers(8, 3, 4, 5, dtype="float16")
    examples.tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text(
        json.dumps({"dtype": "float16", "shape": [8, 3, 4, 5], "layers": [6, 12, 18]})
    )
    import_activations(tmp_path / "a.bin", tmp_path / "s", layer=18)
    np.testing.assert_array_equal(stored(tmp_path / "s"), examples[:, 2].reshape(-1, 5))
    with pytest.raises(InputError, match=r"layer=2 does not fit: .* has the layers 6, 12, 18"):
        import_activations(tmp_path / "a.bin", tmp_path / "t", layer=2)


@pytest.mark.parametrize("kind", ["npy", "npz", "fortran"])
def test_layers_without_names_are_counted_from_zero(kind, tmp_path):
    examples = numbers(8, 3, 4, 5)
    if kind == "npz":
        np.savez_compressed(tmp_path / "a.npz", acts=examples, labels=np.arange(8))
    else:
        np.save(tmp_path / "a.npy", np.asfortranarray(examples) if kind == "fortran" else examples)
    aligned = ["labels"] if kind == "npz" else []
    import_activations(
        tmp_path / f"a.{'npz' if kind == 'npz' else 'npy'}", tmp_path / "s", layer=1, aligned=aligned
    )
    np.testing.assert_array_equal(stored(tmp_path / "s"), examples[:, 1].reshape(-1, 5))
    if aligned:
        np.testing.assert_array_equal(open_activations(tmp_path / "s").labels, np.repeat(np.arange(8), 4))


def test_wrong_layers_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", numbers(8, 3, 4, 5))
    with pytest.raises(InputError, match=r"choose one with layer=N: 0, 1, 2"):
        import_activations(tmp_path / "a.npy", tmp_path / "s")
    np.save(tmp_path / "b.npy", numbers(8, 5))
    with pytest.raises(InputError, match=r"layer=0 does not fit: .*b.npy has no array of shape \(example, layer"):
        import_activations(tmp_path / "b.npy", tmp_path / "s", layer=0)
    numbers(8, 3, 4, 5).tofile(tmp_path / "c.bin")
    for layers, message in [([1, 2], r"layers of .* are \[1, 2\]; its shape .* has 3"), ("x", "need a list")]:
        described = {"dtype": "float32", "shape": [8, 3, 4, 5], "layers": layers}
        (tmp_path / "c.bin.json").write_text(json.dumps(described))
        with pytest.raises(InputError, match=message):
            import_activations(tmp_path / "c.bin", tmp_path / "s", layer=1)


def test_fit_of_a_linked_layer_has_the_bits_of_a_copy(tmp_path, rng):
    np.save(tmp_path / "a.npy", rng.standard_normal((40, 2, 9, 8), dtype=np.float32))
    atoms = []
    for link in (False, True):
        store = str(tmp_path / f"{link}.zarr")
        import_activations(tmp_path / "a.npy", store, layer=1, link=link, chunk_rows=100)
        model = DBKSVD(n_atoms=12, k=2, n_iter=2, batch_size=128, seed=0).fit(store)
        atoms.append(model.dictionary_.values.tobytes())
    assert atoms[0] == atoms[1]


# BioNeMo: `ActivationStore` of sae/src/sae/activation_store.py


def write_bionemo(folder, rows, shard_size=40, row_group=None, **changed):
    folder.mkdir()
    starts = range(0, len(rows), shard_size)
    for i, start in enumerate(starts):
        part = rows[start : start + shard_size]
        table = pa.table({f"dim_{j}": part[:, j] for j in range(rows.shape[1])})
        pq.write_table(table, folder / f"shard_{i:05d}.parquet", compression="snappy", row_group_size=row_group)
    known = {
        "n_samples": len(rows),
        "hidden_dim": rows.shape[1],
        "n_shards": len(starts),
        "shard_size": shard_size,
    }
    (folder / "metadata.json").write_text(json.dumps(known | {"model_name": "esm2", "layer": 24} | changed))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("row_group", [None, 7])
def test_columns_of_bionemo_become_rows(row_group, dtype, tmp_path, rng):
    rows = rng.standard_normal((100, 70)).astype(dtype)
    folder = write_bionemo(tmp_path / "shards", rows, row_group=row_group)
    result = import_activations(folder, tmp_path / "s", chunk_rows=16)
    assert (result.n_samples, result.n_features, result.dtype, result.n_files) == (100, 70, dtype, 3)
    np.testing.assert_array_equal(stored(tmp_path / "s"), rows)


def test_other_parquet_of_such_a_name_is_read_as_what_it_is(tmp_path):
    rows = numbers(12, 4)
    (tmp_path / "metadata.json").write_text("{}")
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 4)
    pq.write_table(pa.table({"acts": column}), tmp_path / "shard_00000.parquet")
    import_activations(tmp_path / "shard_*.parquet", tmp_path / "s")
    np.testing.assert_array_equal(stored(tmp_path / "s"), rows)


def cut_parquet(folder):
    file = folder / "shard_00001.parquet"
    file.write_bytes(file.read_bytes()[:-20])


def spoil_page(folder):
    file = folder / "shard_00001.parquet"
    content = bytearray(file.read_bytes())
    content[4:24] = b"\xff" * 20  # the header of the first page
    file.write_bytes(content)


def rename_column(folder):
    table = pq.read_table(folder / "shard_00001.parquet")
    pq.write_table(table.rename_columns({"dim_2": "dim_9"}), folder / "shard_00001.parquet")


def empty_value(folder):
    table = pq.read_table(folder / "shard_00001.parquet")
    column = pa.array([None] + [1.0] * (len(table) - 1), pa.float32())
    pq.write_table(table.set_column(1, "dim_1", column), folder / "shard_00001.parquet")


def another_type(folder):
    table = pq.read_table(folder / "shard_00001.parquet")
    pq.write_table(table.set_column(1, "dim_1", table["dim_1"].cast(pa.float64())), folder / "shard_00001.parquet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_parquet, r"shard_00001.parquet is not a readable Parquet file, or truncated"),
        (spoil_page, r"shard_00001.parquet cannot be read after row 0"),
        (rename_column, r"shard_00001.parquet has 4 columns dim_N and no dim_2"),
        (empty_value, r"column dim_1 of .*shard_00001.parquet has 1 empty \(null\) values"),
        (another_type, r"shard_00001.parquet has columns dim_N of different types: double, float"),
        (lambda folder: (folder / "shard_00002.parquet").unlink(), r"holds 2 shards, its metadata.json says 3"),
    ],
)
def test_damaged_bionemo_shards_are_refused(damage, message, tmp_path):
    folder = write_bionemo(tmp_path / "shards", numbers(100, 4))
    damage(folder)
    with pytest.raises((StoreError, InputError), match=message):
        import_activations(folder, tmp_path / "s")


def test_bionemo_metadata_of_another_width_are_refused(tmp_path):
    folder = write_bionemo(tmp_path / "shards", numbers(10, 4), hidden_dim=5)
    with pytest.raises(StoreError, match=r"has 4 columns dim_N, metadata.json beside it says hidden_dim 5"):
        import_activations(folder, tmp_path / "s")


# Llamascopium: `ActivationWriter` of src/llamascopium/activation/writer.py


def write_llamascopium(folder, hooks, n_chunks=12, shards=("",)):
    """Write chunks of 2 sequences of 4 tokens, the last one or two of which are padding; return the rows kept."""
    kept = {}
    for number, hook in enumerate(hooks):
        (folder / hook).mkdir(parents=True)
        kept[hook] = []
        for s, shard in enumerate(shards):
            for chunk in range(n_chunks):
                activation = 1000 * number + numbers(2, 4, 3) + 24 * (s * n_chunks + chunk)
                mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
                tensors = {"activation": activation.astype("float32"), "mask": mask}
                tensors["tokens"] = numbers(2, 4, dtype="int64") + 8 * chunk
                tensors["attention_mask"] = np.ones((2, 4), np.int64)
                name = folder / hook / f"{shard}chunk-{chunk:08d}"
                safetensors.numpy.save_file(tensors, f"{name}.safetensors")
                (folder / hook / f"{name.name}.meta.json").write_text("[]")
                kept[hook].append(activation[mask])
    return {hook: np.concatenate(rows) for hook, rows in kept.items()}


@pytest.mark.parametrize("shards", [("",), ("shard-0-", "shard-1-", "shard-10-")])
def test_llamascopium_chunks_in_order_and_without_padding(shards, tmp_path):
    kept = write_llamascopium(tmp_path / "cache", ["blocks.3.hook_resid_post"], shards=shards)
    # the folder of the only hook is found
    result = import_activations(tmp_path / "cache", tmp_path / "s", aligned=["tokens"])
    np.testing.assert_array_equal(stored(tmp_path / "s"), kept["blocks.3.hook_resid_post"])
    assert result.dropped == {"mask_array": 3 * 12 * len(shards)}
    assert open_activations(tmp_path / "s").tokens.values[:5].tolist() == [0, 1, 2, 4, 5]


def test_hook_of_llamascopium_has_to_be_chosen(tmp_path):
    hooks = ["blocks.3.hook_resid_post", "blocks.10.hook_resid_post"]
    kept = write_llamascopium(tmp_path / "cache", hooks, n_chunks=2)
    with pytest.raises(InputError, match=r"holds blocks.3.*, blocks.10.*; give one of them: .*cache/blocks.3"):
        import_activations(tmp_path / "cache", tmp_path / "s")
    import_activations(tmp_path / "cache" / hooks[1], tmp_path / "s")
    np.testing.assert_array_equal(stored(tmp_path / "s"), kept[hooks[1]])


def test_all_rows_of_llamascopium_are_linked_only_when_asked_for(tmp_path, capsys):
    write_llamascopium(tmp_path / "cache", ["hook"], n_chunks=2)
    said = fails(capsys, "import", tmp_path / "cache", tmp_path / "s", "--link")
    assert "`mask` of" in said
    assert "leave out --link to write a copy, or give --format safetensors to link all rows" in said
    import_activations(tmp_path / "cache", tmp_path / "s", link=True, format="safetensors")
    assert open_rows(tmp_path / "s").n_samples == 16


# SAELens: one dataset with a column per hook


def test_hook_of_a_saelens_cache_with_several(tmp_path):
    folder, hooks = tmp_path / "cache", {f"blocks.{i}.hook_resid_post": numbers(6, 4, 3) + i for i in (3, 8)}
    folder.mkdir()
    columns = {"token_ids": pa.array(numbers(6, 4, dtype="int32").tolist())}
    columns |= {name: pa.array(rows.tolist(), pa.list_(pa.list_(pa.float32()))) for name, rows in hooks.items()}
    table = pa.table(columns)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(InputError, match=r"several arrays; name one with array=NAME: .*blocks.3.*blocks.8"):
        import_activations(folder, tmp_path / "s")
    import_activations(folder, tmp_path / "s", array="blocks.8.hook_resid_post", aligned=["token_ids"])
    np.testing.assert_array_equal(stored(tmp_path / "s"), hooks["blocks.8.hook_resid_post"].reshape(-1, 3))
    np.testing.assert_array_equal(open_activations(tmp_path / "s").token_ids.values, np.arange(24))
