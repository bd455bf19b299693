"""A Zarr description that is broken is one line that names its file, in every command."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import zarr

from dbksvd_dask import DBKSVD, open_codes, open_dictionary
from dbksvd_dask.encode_job import encode_store
from dbksvd_dask.errors import StoreError
from dbksvd_dask.import_job import import_activations
from dbksvd_dask.store import remote
from dbksvd_dask.store.activations import open_activations, open_rows
from tests import jobs
from tests.cli_helpers import fails, run
from tests.store_helpers import make_store

REGULAR = "regular"
CHANGES = {
    "negative shape": {"shape": [-60, 8]},
    "shape beyond a file": {"shape": [10**30, 8]},
    "shape of text": {"shape": "60"},
    "chunk of no rows": {"chunk_grid": {"name": REGULAR, "configuration": {"chunk_shape": [0, 8]}}},
    "chunk of three axes": {"chunk_grid": {"name": REGULAR, "configuration": {"chunk_shape": [20, 8, 1]}}},
    "unknown codec": {"codecs": [{"name": "nobody"}]},
    "no codec": {"codecs": []},
    "unknown type": {"data_type": "float31"},
    "fill value of text": {"fill_value": "x"},
    "attributes that are a list": {"attributes": [1]},
    "a group after all": {"node_type": "group"},
    "version of the future": {"zarr_format": 9},
}
TEXTS = {
    "cut off": '{"zarr_format": 3, "node',
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "7",
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep attributes": '{"zarr_format": 3, "node_type": "array", "attributes": '
    + '{"a":' * 50_000
    + "1"
    + "}" * 50_001,
    "no text": b"\xff\xfe\x00\x80",
}
MISSING = (
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "zarr_format",
    "node_type",
)


def broken(original):
    """Every broken form of the metadata of an array, by name."""
    described = json.loads(original)
    forms = dict(TEXTS)
    forms |= {name: json.dumps({**described, **change}) for name, change in CHANGES.items()}
    forms |= {f"no {key}": json.dumps({k: v for k, v in described.items() if k != key}) for key in MISSING}
    return forms


def write(file, content):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("made")
    rows = jobs.made_up(60, 8)
    make_store(home / "store.zarr", rows, 20, {"label": np.arange(60, dtype=np.int32)})
    jobs.write_dictionary(home / "run.zarr", 16, 8, 2)
    encode_store(home / "store.zarr", home / "run.zarr", home / "codes.zarr")
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


FORMS = [*TEXTS, *CHANGES, *(f"no {key}" for key in MISSING)]


@pytest.mark.parametrize("form", FORMS)
def test_every_reader_names_the_file_of_a_broken_array(form, home):
    for array, readers in {
        "store.zarr/activations": [open_rows, open_activations, DBKSVD(16, 2, n_iter=1).fit],
        "store.zarr/label": [open_activations],
        "run.zarr/dictionary": [open_dictionary],
        "codes.zarr/atom": [open_codes],
    }.items():
        file = home / array / "zarr.json"
        whole = file.read_text()
        write(file, broken(whole)[form])
        for read in readers:
            with pytest.raises(StoreError) as caught:
                read(home / array.split("/")[0])
            assert str(file) in str(caught.value) or "`" in str(caught.value)
            assert len(str(caught.value)) < 800
            assert "\n" not in str(caught.value)
        write(file, whole)


@pytest.mark.parametrize(
    "form", ["cut off", "negative shape", "chunk of no rows", "unknown codec", "deep", "no shape"]
)
def test_every_command_says_one_line(form, home, capsys):
    file = home / "store.zarr" / "activations" / "zarr.json"
    write(file, broken(file.read_text())[form])
    store = home / "store.zarr"
    for command in (
        ["info", store],
        ["import", store, home / "new.zarr"],
        ["fit", store, home / "fit", "--n-atoms", 16, "--k", 2],
        ["encode", store, home / "run.zarr", home / "new.zarr"],
        ["shuffle", store, home / "new.zarr", "--seed", 0],
        ["report", home / "run.zarr", "--codes", home / "codes.zarr", "--samples", store, "--image-shape", "2x4"],
    ):
        assert str(file) in fails(capsys, *command), command


@pytest.mark.parametrize("form", [*TEXTS, "version of the future", "attributes that are a list"])
@pytest.mark.parametrize("store", ["store.zarr", "run.zarr", "codes.zarr"])
def test_every_command_names_the_file_of_a_broken_group(form, store, home, capsys):
    file = home / store / "zarr.json"
    write(file, broken(file.read_text())[form])
    given = {
        "store.zarr": ["shuffle", home / store, home / "new.zarr", "--seed", 0],
        "run.zarr": ["encode", home / "store.zarr", home / store, home / "new.zarr"],
        "codes.zarr": ["report", home / "run.zarr", "--codes", home / store],
    }
    for command in (["info", home / store], given[store]):
        assert str(file) in fails(capsys, *command)


def test_format_2_names_the_broken_file_too(tmp_path):
    group = zarr.open_group(tmp_path / "old.zarr", mode="w", zarr_format=2)
    group.create_array("activations", shape=(6, 4), chunks=(3, 4), dtype="f4")[...] = 1
    assert import_activations(tmp_path / "old.zarr", tmp_path / "fine.zarr").n_samples == 6
    for name in (".zarray", ".zattrs"):
        file = tmp_path / "old.zarr" / "activations" / name
        whole = file.read_text()
        file.write_text(whole[:-3] + "!")
        with pytest.raises(StoreError, match=f"activations/{name}"):
            import_activations(tmp_path / "old.zarr", tmp_path / "new.zarr")
        file.write_text(whole)


def test_an_aligned_array_without_its_shape_is_not_left_out(home, capsys):
    """Zarr lists the arrays of a group without those whose metadata lack a key."""
    file = home / "store.zarr" / "label" / "zarr.json"
    write(file, broken(file.read_text())["no shape"])
    assert str(file) in fails(capsys, "shuffle", home / "store.zarr", home / "new.zarr", "--seed", 0)
    file.unlink()  # without any metadata it is no array
    assert run(capsys, "shuffle", home / "store.zarr", home / "new.zarr", "--seed", 0)[0] == 0


def test_a_bare_array_is_not_taken_for_a_group(home):
    shutil.copy(
        home / "store.zarr" / "activations" / "zarr.json", home / "codes.zarr" / "statistics" / "zarr.json"
    )
    with pytest.raises(StoreError, match=r"statistics is a Zarr array, not a group"):
        remote.open_group(home / "codes.zarr" / "statistics")
