"""Logits of atoms and their density by position, on the page."""

import json

import numpy as np
import pytest

from dbksvd_dask.codes import open_codes
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.report import write_report
from tests.helpers.report_parts import encoded, token_store, write_store
from tests.naive.report import page_data


def content(n_atoms=32):
    sides = lambda j: {"positive": [[f"t{j}", 3.0], [" same", 1.0]], "negative": [["same", -2.0 - j]]}  # noqa: E731
    return {"model": "m", "n_atoms": n_atoms, "atoms": [{"atom": j, **sides(j)} for j in range(n_atoms)]}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    store, _, columns = token_store(folder)
    run, codes = encoded(folder, store)
    return run, codes, columns


@pytest.mark.parametrize("as_file", [True, False])
def test_logits_reach_the_page(tmp_path, parts, as_file):
    run, codes, _ = parts
    given = content()
    if as_file:
        (tmp_path / "l.json").write_text(json.dumps(given))
        given = tmp_path / "l.json"
    head, arrays = page_data(write_report(run, codes, tmp_path / "r.html", logits=given))
    assert [head["tokens"][i] for i in arrays["positive_token"][7]] == ["t7", " same"]
    assert [head["tokens"][i] for i in arrays["negative_token"][7]] == ["same"]
    assert arrays["negative_logit"][7].tolist() == [-9.0]


def test_density_by_position_is_counted_token_by_token(tmp_path, parts, monkeypatch):
    run, codes, columns = parts
    monkeypatch.setattr("dbksvd_dask.codes.BLOCK_ROWS", 25)  # a block of codes does not begin with a text
    in_memory = open_codes(codes).load()
    head, arrays = page_data(write_report(run, in_memory, tmp_path / "r.html"))
    edges = head["position_edges"]
    assert edges == [0, 1, 2, 4]
    atom, value = (open_codes(codes)[name].values for name in ("atom", "coefficient"))
    for j in range(32):
        for b in range(3):
            there = [i for i, p in enumerate(columns["position"]) if edges[b] <= p < edges[b + 1]]
            active = [i for i in there if any(a == j and v != 0 for a, v in zip(atom[i], value[i], strict=True))]
            assert arrays["position_density"][j, b] == pytest.approx(len(active) / len(there))


def test_labels_are_classes(tmp_path, rng):
    columns = {"label": np.arange(60) % 3}
    store = write_store(tmp_path / "s.zarr", rng.standard_normal((60, 16)).astype(np.float32), columns, {})
    run, codes = encoded(tmp_path, store)
    (tmp_path / "s.txt").write_text("".join(f"text {i}\n" for i in range(60)))
    from dbksvd_dask.report.samples import Samples

    values, names = Samples(60, store).labels()
    np.testing.assert_array_equal(values, columns["label"])
    assert names == ["0", "1", "2"]
    assert write_report(run, codes, tmp_path / "r.html")


def test_bad_logits_are_refused_in_one_line(tmp_path, parts):
    run, codes, _ = parts
    out = tmp_path / "r.html"
    with pytest.raises(MismatchError, match="is about 5 atoms, the dictionary has 32"):
        write_report(run, codes, out, logits=content(5))
    with pytest.raises(InputError, match="does not hold logits"):
        write_report(run, codes, out, logits={"atoms": [{"atom": 0}]})
    with pytest.raises(StoreError, match="cannot read"):
        write_report(run, codes, out, logits=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        write_report(run, codes, out, logits=tmp_path / "bad.json")
    assert not out.exists()
