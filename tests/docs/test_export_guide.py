"""The commands export and import-dictionary, and every command of docs/saelens.md, at small size."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask.cli import main
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.runs import open_dictionary
from tests.naive import saelens

GUIDE = Path(__file__).parents[2] / "docs" / "saelens.md"
SMALLER = {"--n-atoms 4096": "--n-atoms 48 --n-iter 3", "--k 32": "--k 8"}
# What the guide shows but no test can run: it needs an account.
ELSEWHERE = ("hf upload",)
NAMES = ["--model-name", "gpt2-small", "--hook-name", "blocks.6.hook_resid_post"]


def dbksvd(*args):
    """Run the command line; gives its exit code."""
    try:
        main([str(a) for a in args])
    except SystemExit as done:
        return done.code or 0
    return 0


def blocks_of_the_guide():
    return re.findall(r"```(sh|python)\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def run_commands(block):
    """Run the lines of a shell block; gives how many ran."""
    lines = [line for line in block.splitlines() if not line.startswith(ELSEWHERE)]
    for line in lines:
        for old, new in SMALLER.items():
            line = line.replace(old, new)
        program, *args = shlex.split(line)
        assert program == "dbksvd", line
        assert dbksvd(*args) == 0, line
    return len(lines)


def test_every_command_of_the_guide_runs(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("activations.npy", (rng.standard_normal((900, 12)) + 1).astype(np.float32))
    ran = sum(run_commands(block) for kind, block in blocks_of_the_guide() if kind == "sh")
    assert ran == 11
    assert sorted(p.name for p in Path("sae").iterdir()) == [
        *("cfg.json", "sae_weights.safetensors", "sparsity.safetensors")
    ]
    same, again = open_dictionary("run").atoms, open_dictionary("sae.zarr").atoms
    np.testing.assert_array_equal(same, again)  # there and back


@pytest.mark.filterwarnings("default")  # SAELens builds on a class that its maker calls deprecated
@pytest.mark.interop
def test_every_block_of_the_guide_runs_with_saelens(tmp_path, monkeypatch):
    sae_lens = pytest.importorskip("sae_lens")
    from benchmarks import tiny_model

    monkeypatch.chdir(tmp_path)
    texts = [
        f"the {a} {b} {c}" for a in ("red", "old", "big") for b in ("cat", "dog", "sun") for c in "abcdefghij"
    ]
    model = tiny_model.make_model(tiny_model.make_tokenizer(texts, "tokenizer"), n_layers=7, d_model=32, n_ctx=16)
    monkeypatch.setattr(sae_lens.HookedSAETransformer, "from_pretrained", lambda name: model)
    names = {"texts": texts}
    for kind, block in blocks_of_the_guide():
        if kind == "sh":
            run_commands(block)
        else:
            exec(compile(block, GUIDE.name, "exec"), names)
    assert names["coefficients"].shape == (100, 48)
    assert names["acts"].shape == (1, 5, 48)  # with the token that marks a beginning
    assert not np.allclose(names["changed"].detach(), names["logits"].detach())


def test_guide_names_no_place_of_this_machine():
    text = GUIDE.read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|home|root|work|usr)/", text)
    assert "FIGURES" not in text


# -------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def run(tmp_path, make_dictionary):
    params = {"n_atoms": 20, "k": 3, "center": False}
    return save_dictionary(tmp_path / "run.zarr", Dictionary(make_dictionary(20, 6), None, params))


def test_export_tells_what_it_wrote(run, tmp_path, capsys):
    assert (
        dbksvd("export", "saelens", run, tmp_path / "sae", *NAMES, "--context-size", 64, "--no-prepend-bos") == 0
    )
    printed = capsys.readouterr().out
    assert "40 latents (the positive and the negative part of each atom)" in printed
    assert "SAELens architecture matching_pursuit" in printed
    metadata = saelens.open_folder(tmp_path / "sae")[0]["metadata"]
    assert (metadata["context_size"], metadata["prepend_bos"]) == (64, False)


def test_export_as_json(run, tmp_path, capsys):
    assert dbksvd("export", "saelens", run, tmp_path / "sae", *NAMES, "--form", "plugin", "--k", 2, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["architecture"], result["n_latents"], result["stacked"]) == ("dbksvd_pursuit", 20, False)
    assert saelens.open_folder(tmp_path / "sae")[0]["k"] == 2


def test_existing_folder_is_one_line_of_error(run, tmp_path, capsys):
    (tmp_path / "sae").mkdir()
    assert dbksvd("export", "saelens", run, tmp_path / "sae", *NAMES) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "already exists; choose another folder, or replace it with --force" in error
    assert dbksvd("export", "saelens", run, tmp_path / "sae", *NAMES, "--force") == 0


def test_help_has_examples_and_says_what_force_does_here(capsys):
    assert dbksvd("export", "--help") == 0
    out = capsys.readouterr().out
    assert "dbksvd export saelens run sae --model-name gpt2-small" in out
    assert "dbksvd export hf run folder --repo-id me/gpt2-atoms" in out
    earlier = "Replace OUT if it is an earlier export."
    of_its_kind = {"export saelens": earlier, "export hf": earlier, "import-dictionary": "if it is a dictionary."}
    for command, text in of_its_kind.items():
        assert dbksvd(*command.split(), "--help") == 0
        out = capsys.readouterr().out
        assert text in " ".join(out.split())
        assert "unfinished work" not in out.lower()


def test_hf_writes_a_card(run, tmp_path):
    assert dbksvd("export", "hf", run, tmp_path / "hf", "--repo-id", "me/atoms", "--license", "mit") == 0
    head, body = saelens.read_card((tmp_path / "hf" / "README.md").read_text())
    assert "license: mit" in head
    assert "# atoms" in body


def test_import_dictionary_says_what_it_changed(tmp_path, capsys, make_dictionary):
    D = make_dictionary(20, 6)
    np.save(tmp_path / "d.npy", 2 * D.T)
    options = ("--k", 4, "--json")
    assert dbksvd("import-dictionary", tmp_path / "d.npy", tmp_path / "d.zarr", *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["n_atoms"], result["n_features"], result["k"]) == (20, 6, 4)
    assert (result["transposed"], result["normalised"]) == (True, True)
    np.testing.assert_allclose(open_dictionary(tmp_path / "d.zarr").atoms, D, atol=1e-6)
    assert dbksvd("import-dictionary", tmp_path / "d.npy", tmp_path / "d.zarr") == 1
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_help_loads_no_torch():
    import subprocess
    import sys

    code = (
        "import sys\nfrom dbksvd_dask.cli import main\n"
        "try:\n    main(['export', 'saelens', '--help'])\nexcept SystemExit:\n    pass\n"
        "import dbksvd_dask.export.foreign, dbksvd_dask.export.huggingface\n"
        "assert not {'torch', 'sae_lens', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
