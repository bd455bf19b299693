"""The Neuronpedia export: its layout, and that tokens and values are those of the codes."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from dbksvd_dask.codes import codes_to_csr, open_codes
from dbksvd_dask.errors import InputError, StoreError
from dbksvd_dask.export.neuronpedia import NeuronpediaSource
from dbksvd_dask.report import neuronpedia
from dbksvd_dask.report.neuronpedia import export_neuronpedia
from tests.helpers.cli import fails
from tests.helpers.cli import run as run_cli
from tests.helpers.report_parts import WORDS, encoded, text_report_parts, token_store

N_ATOMS = 16
LOGITS = {"atoms": [{"atom": j, "positive": [(" tree", 1.5)], "negative": [("x", -2.0)]} for j in range(N_ATOMS)]}
HEADS = {"model", "release", "sourceset", "source"}


def rows(home, kind):
    """Every line of a kind, file by file."""
    files = sorted((home / kind).glob("batch-*.jsonl.gz"), key=lambda p: int(p.name.split("-")[1].split(".")[0]))
    return [[json.loads(line) for line in gzip.decompress(f.read_bytes()).splitlines()] for f in files]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    store, texts, _ = token_store(folder)
    run, codes = encoded(folder, store, N_ATOMS)
    return run, codes, texts


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory):
    """An export in files of five features."""
    run, codes, _ = parts
    out = tmp_path_factory.mktemp("out") / "export"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neuronpedia, "BATCH", 5)
        result = export_neuronpedia(
            run,
            codes,
            out,
            model_name="tiny",
            hook="resid:3",
            logits=LOGITS,
            explanations={2: "a tree"},
            n_top=4,
            vectors=True,
        )
    return result, out / "tiny" / "3-res-dbksvd"


def test_the_layout_is_the_documented_one(exported):
    result, home = exported
    names = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    kinds, n_files = ("features", "activations", "explanations"), -(-N_ATOMS // 5)
    batches = {f"{kind}/batch-{i}.jsonl.gz" for kind in kinds for i in range(n_files)}
    assert names == batches | {f"{name}.jsonl" for name in HEADS}
    assert result.source == "tiny/3-res-dbksvd"
    heads = {name: json.loads((home / f"{name}.jsonl").read_text()) for name in HEADS}
    assert heads["model"]["id"] == heads["source"]["modelId"] == heads["sourceset"]["modelId"] == "tiny"
    assert heads["source"]["setName"] == heads["sourceset"]["name"] == "res-dbksvd"
    assert heads["sourceset"]["releaseName"] == heads["release"]["name"]
    assert heads["source"]["num_prompts"] == 40


def test_every_feature_is_in_the_file_of_its_number(exported, parts):
    result, home = exported
    files = rows(home, "features")
    assert [[int(row["index"]) for row in file] for file in files] == [
        list(range(a, min(a + 5, N_ATOMS))) for a in range(0, N_ATOMS, 5)
    ]
    assert result.n_features == N_ATOMS
    dense = codes_to_csr(open_codes(parts[1])).toarray()
    for row in (row for file in files for row in file):
        own = dense[:, int(row["index"])]
        assert row["frac_nonzero"] == pytest.approx(np.count_nonzero(own) / len(own))
        assert sum(row["freq_hist_data_bar_heights"]) == np.count_nonzero(own)
        assert row["maxActApprox"] == pytest.approx(np.abs(own).max(), rel=1e-4)
        assert (row["pos_str"], row["pos_values"], row["neg_str"]) == ([" tree"], [1.5], ["x"])
        assert row["hookName"] == "blocks.3.hook_resid_post"
        assert np.linalg.norm(row["vector"]) == pytest.approx(1, abs=1e-5)


def test_tokens_are_those_of_the_text_and_values_those_of_the_codes(exported, parts):
    _, home = exported
    dense = codes_to_csr(open_codes(parts[1])).toarray()
    texts = parts[2]
    first = np.cumsum([0, *(len(text.split(" ")) for text in texts)])
    lines = {text: number for number, text in enumerate(texts)}
    found = [row for file in rows(home, "activations") for row in file]
    assert len({row["id"] for row in found}) == len(found) > N_ATOMS
    for row in found:
        number = lines["".join(row["tokens"])]
        expected = dense[first[number] : first[number + 1], int(row["index"])]
        np.testing.assert_allclose(row["values"], expected, rtol=1e-4, atol=1e-6)
        assert row["values"][row["maxValueTokenIndex"]] == row["maxValue"] == max(row["values"])
    drawn = [row for row in found if row["binContains"] is not None]
    assert 0 < len(drawn) < len(found)
    assert all(row["binMin"] <= row["binMax"] for row in drawn)


def test_explanations_are_those_given_or_keywords(exported, parts, tmp_path):
    _, home = exported
    texts = {int(r["index"]): r["description"] for file in rows(home, "explanations") for r in file}
    assert texts[2] == "a tree"
    keywords = {word for j, text in texts.items() if j != 2 for word in text.split(" · ")}
    assert keywords <= {*WORDS, "\U0001f333"}
    run, codes, _ = parts
    options = {"model_name": "tiny", "hook": "mlp:0", "explanations": {2: "a tree"}, "keywords": False}
    assert export_neuronpedia(run, codes, tmp_path / "out", **options).n_explanations == 1


def test_the_same_bytes_again_and_long_texts_are_cut_around_the_token(parts, tmp_path):
    run, codes, _ = parts
    for name in ("a", "b"):
        export_neuronpedia(run, codes, tmp_path / name, model_name="tiny", hook="resid:3", n_tokens=2)
    files = [
        {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("a", "b")
    ]
    assert files[0] == files[1]
    for row in rows(tmp_path / "a" / "tiny" / "3-res-dbksvd", "activations")[0]:
        assert len(row["tokens"]) == len(row["values"]) == 2
        assert any(row["values"])


def test_the_command_writes_the_same_and_refuses_to_replace(parts, tmp_path, capsys):
    run, codes, _ = parts
    logits = tmp_path / "logits.json"
    logits.write_text(json.dumps(LOGITS))
    command = ["export", "neuronpedia", run, tmp_path / "out", "--codes", codes]
    command += ["--hook", "resid:3", "--model-name", "tiny", "--logits", logits]
    code, out, _ = run_cli(capsys, *command)
    assert (code, f"{N_ATOMS} features" in out) == (0, True)
    assert "already exists" in fails(capsys, *command)
    assert run_cli(capsys, *command, "--force")[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": "Gemma 3"}, r"model='Gemma 3' cannot be part of an address"),
        ({"set_name": "a/b"}, r"set_name='a/b' cannot be part of an address"),
        ({"hook": "blocks.3"}, r"hook='blocks.3' is not known; name it as in 'resid:14'"),
        ({"hook": None}, r"no hook is known"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_written(parts, tmp_path, change, message):
    run, codes, _ = parts
    with pytest.raises(InputError, match=message):
        export_neuronpedia(run, codes, tmp_path / "out", **{"model_name": "tiny", "hook": "resid:3", **change})
    assert not (tmp_path / "out").exists()


def test_samples_that_are_not_tokens_and_folders_in_the_way_are_refused(parts, tmp_path):
    dictionary, codes, texts, _ = text_report_parts()
    with pytest.raises(InputError, match="Neuronpedia shows tokens"):
        export_neuronpedia(dictionary, codes, tmp_path / "out", model_name="tiny", hook="resid:3", samples=texts)
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreError, match="already exists"):
        export_neuronpedia(*parts[:2], tmp_path / "there", model_name="tiny", hook="resid:3")


def test_codes_of_a_shuffled_store_are_refused(tmp_path):
    store, _, _ = token_store(tmp_path, shuffled=True)
    run, codes = encoded(tmp_path, store)
    with pytest.raises(InputError, match="do not stand together"):
        export_neuronpedia(run, codes, tmp_path / "out", model_name="tiny", hook="resid:3")
    assert not (tmp_path / "out").exists()


def test_names_follow_the_hook():
    names = {hook: NeuronpediaSource("m", hook).name for hook in ("resid:14", "mlp:2", "attn:0")}
    assert names == {"resid:14": "14-res-dbksvd", "mlp:2": "2-mlp-dbksvd", "attn:0": "0-att-dbksvd"}


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
def test_the_package_of_neuronpedia_reads_every_line(exported):
    pytest.importorskip("neuronpedia")
    from neuronpedia.np_activation import Activation
    from neuronpedia.np_explanation import Explanation
    from neuronpedia.np_source_set import SourceSet

    _, home = exported
    for row in (row for file in rows(home, "activations") for row in file):
        read = Activation.from_np_db_json({**row, "source": row["layer"]})
        assert (read.modelId, read.source, len(read.tokens)) == ("tiny", "3-res-dbksvd", len(read.values))
    for row in (row for file in rows(home, "explanations") for row in file):
        assert Explanation.from_np_db_json({**row, "source": row["layer"]}).text
    heads = {name: json.loads((home / f"{name}.jsonl").read_text()) for name in ("sourceset", "source")}
    read = SourceSet.from_np_db_json({**heads["sourceset"], "sources": [heads["source"]]})
    assert read.get_source_for_layer_number(3).id == "3-res-dbksvd"
