"""Capture: activations of a language model, to stores."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask import open_activations
from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.lm.texts import Texts
from tests.helpers.cli import fails, run
from tests.helpers.jobs import PATIENCE
from tests.helpers.language_models import make_model, make_network, make_tokenizer, save_model, sentences

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

FAMILIES = ("llama", "gemma3", "gpt2", "neox")
# small, so that a few texts make several blocks and chunks
SMALL = {"context": 24, "batch_tokens": 64, "chunk_rows": 50}


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def capture(*args, **options):
    from dbksvd_dask.lm import capture_activations

    return capture_activations(*args, **{**SMALL, **options})


def content_of(folder):
    """Every file below a folder, by name."""
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_each_text_alone(tmp_path, family):
    """Padding and batches leave no trace: one text at a time through the whole model gives the same rows."""
    model = make_model(family)
    texts = sentences(12)
    capture(model, texts, tmp_path / "out", ["resid:0", "resid:1", "mlp:1", "attn:0"])
    seen = {}
    naive = {name: [] for name in ("resid:0", "mlp:1", "attn:0")}
    for name in ("mlp:1", "attn:0"):
        module = model.module(model.hook(name))
        module.register_forward_hook(
            lambda m, i, o, name=name: seen.__setitem__(name, o[0] if isinstance(o, tuple) else o)
        )
    for text in texts:
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        for a in range(0, len(ids), 23):
            with torch.inference_mode():
                out = model.model(torch.tensor([[0, *ids[a : a + 23]]]), output_hidden_states=True)
            naive["resid:0"].append(out.hidden_states[1][0, 1:].numpy())
            for name in ("mlp:1", "attn:0"):
                naive[name].append(seen[name][0, 1:].numpy())
    for name, rows in naive.items():
        found = open_activations(tmp_path / "out" / f"{name.replace(':', '-')}.zarr")["activations"].values
        np.testing.assert_allclose(found, np.concatenate(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_of_a_block_add_up(tmp_path, family):
    """The residual stream after a block is the one before it, and what attention and MLP add."""
    capture(make_model(family), sentences(4), tmp_path / "out", ["resid:0", "attn:1", "mlp:1", "resid:1"])
    rows = {
        name: open_activations(tmp_path / "out" / f"{name}.zarr")["activations"].values
        for name in ("resid-0", "attn-1", "mlp-1", "resid-1")
    }
    whole = rows["resid-0"] + rows["attn-1"] + rows["mlp-1"]
    np.testing.assert_allclose(whole, rows["resid-1"], rtol=1e-4, atol=1e-4)


def test_arrays_beside_the_rows_say_what_each_is(tmp_path, model):
    texts = Texts(["the cat sat on the mat.\nthe café", "", "a dog"], np.array([1, 0, 0], np.int32), ["no", "yes"])
    result = capture(model, texts, tmp_path / "out", ["resid:0"])
    data = open_activations(result.stores["resid:0"])
    assert data["document"].values[-1] == 2
    assert data["label"].attrs["names"] == ["no", "yes"]
    np.testing.assert_array_equal(data["label"].values, np.where(data["document"].values == 0, 1, 0))
    assert data["position"].values.min() == 1
    provenance = data.attrs["provenance"]
    assert (provenance["hook"], provenance["bos"], provenance["context"]) == ("resid:0", "drop", 24)
    lines = (tmp_path / "out" / provenance["texts"]).read_text().split("\n")
    spans = zip(*(data[name].values for name in ("text", "start", "end", "token_id")), strict=True)
    for text, start, end, token in spans:
        piece = lines[text][start:end].replace("\u21b5", "\n")
        shown = model.tokenizer.decode([token])
        assert piece == shown or "\ufffd" in shown  # a byte of é is no character by itself
    assert result.n_empty == 1


def test_beginning_token_kept_has_a_row_at_position_0(tmp_path, model):
    result = capture(model, ["a dog", "the cat"], tmp_path / "out", ["resid:1"], bos="keep")
    data = open_activations(result.stores["resid:1"])
    np.testing.assert_array_equal(
        np.flatnonzero(data["position"].values == 0), np.flatnonzero(data["token_id"] == 0)
    )
    assert (data["position"].values == 0).sum() == 2


def test_blocks_after_the_last_hook_are_not_computed(tmp_path, model):
    calls = []
    handle = model.blocks[1].register_forward_pre_hook(lambda *a: calls.append(1))
    try:
        capture(model, sentences(4), tmp_path / "a", ["attn:0", "resid:0"])
        assert not calls
        capture(model, sentences(4), tmp_path / "b", ["attn:1"])
        assert calls
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_stores_round_the_same_rows(tmp_path, model, dtype):
    whole = capture(model, sentences(6), tmp_path / "a", ["resid:1"])
    narrow = capture(model, sentences(6), tmp_path / "b", ["resid:1"], dtype=dtype)
    rows = open_activations(whole.stores["resid:1"])["activations"].values
    rounded = torch.from_numpy(rows).to(getattr(torch, dtype)).float().numpy()
    found = open_activations(narrow.stores["resid:1"])["activations"].values.astype(np.float32)
    np.testing.assert_array_equal(found, rounded)


def test_numbers_beyond_float16_are_refused(tmp_path):
    network = make_network()
    with torch.no_grad():
        network.get_input_embeddings().weight *= 1e6
    from dbksvd_dask.lm import LanguageModel

    model = LanguageModel(network, make_tokenizer())
    with pytest.raises(InputError, match="at resid:0 do not fit float16; use bfloat16 or float32"):
        capture(model, sentences(2), tmp_path / "a", ["resid:0"], dtype="float16")
    capture(model, sentences(2), tmp_path / "b", ["resid:0"], dtype="bfloat16")


KILLED = """
import os, signal, sys
from dbksvd_dask.lm import capture_activations, open_model
from tests.helpers.language_models import sentences
from tests.lm.test_capture import SMALL
seen = []
def die(event):
    seen.append(event)
    if len(seen) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
model, hooks = open_model(sys.argv[1]), ["resid:0", "mlp:1"]
capture_activations(model, sentences(60), sys.argv[2], hooks, callbacks=[die], **SMALL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("event", [20, 45])
def test_killed_and_run_again_gives_the_same_bytes(tmp_path, folder, event):
    from dbksvd_dask.lm import open_model

    model = open_model(folder)
    capture(model, sentences(60), tmp_path / "whole", ["resid:0", "mlp:1"])
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "killed"), str(event)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "killed" / "resid-0.zarr").exists()
    events = []
    result = capture(model, sentences(60), tmp_path / "killed", ["resid:0", "mlp:1"], callbacks=[events.append])
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")
    if event == 45:  # chunks of the killed run were kept
        assert 0 < result.tokens_run < result.n_rows
        assert events[0].done > 0


def test_progress_tells_pace_and_reaches_the_end(tmp_path, model):
    events = []
    result = capture(model, sentences(10), tmp_path / "out", ["resid:0"], callbacks=[events.append])
    assert (events[0].done, events[-1].done, events[-1].total) == (0, result.n_rows, result.n_rows)
    assert events[-1].unit == "tokens"
    assert events[-1].per_second > 0


def test_finished_capture_is_not_repeated_and_another_hook_is_added(tmp_path, model):
    first = capture(model, sentences(10), tmp_path / "out", ["resid:0"])
    before = content_of(tmp_path / "out" / "resid-0.zarr")
    again = capture(model, sentences(10), tmp_path / "out", ["resid:0", "mlp:0"])
    assert first.tokens_run == again.tokens_run > 0
    assert content_of(tmp_path / "out" / "resid-0.zarr") == before
    assert capture(model, sentences(10), tmp_path / "out", ["resid:0", "mlp:0"]).tokens_run == 0
    with pytest.raises(StoreError, match="already exists"):
        capture(model, sentences(11), tmp_path / "out", ["resid:0"])
    assert capture(model, sentences(11), tmp_path / "out", ["resid:0"], force=True).tokens_run > 0


def test_unfinished_capture_of_other_options_is_refused(tmp_path, model):
    calls = []

    def fail(*args):
        calls.append(1)
        if len(calls) > 20:
            raise ZeroDivisionError

    handle = model.blocks[0].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            capture(model, sentences(60), tmp_path / "out", ["resid:0"])
    finally:
        handle.remove()
    with pytest.raises(MismatchError, match="context=24, now context=16"):
        capture(model, sentences(60), tmp_path / "out", ["resid:0"], context=16)


def test_hook_that_does_not_exist_lists_those_that_do(tmp_path, model):
    for name in ("resid:2", "logits", "resid", "key:0"):
        with pytest.raises(InputError, match="resid:0 to resid:1, mlp:0 to mlp:1, attn:0 to attn:1"):
            capture(model, ["a dog"], tmp_path / "out", [name])
    with pytest.raises(InputError, match="no hook was given"):
        capture(model, ["a dog"], tmp_path / "out", [])
    assert not (tmp_path / "out").exists()


def test_tokenizer_of_another_model_is_refused(tmp_path):
    from dbksvd_dask.lm import LanguageModel

    with pytest.raises(InputError, match=r"the tokenizer has \d+ tokens, the embedding of model only 100 rows"):
        LanguageModel(make_network(vocabulary=100), make_tokenizer())


def test_token_added_beyond_the_embedding_is_refused_only_where_it_occurs(tmp_path):
    from dbksvd_dask.lm import LanguageModel

    tokenizer = make_tokenizer()
    model = LanguageModel(make_network(vocabulary=len(tokenizer)), tokenizer)
    tokenizer.add_tokens(["<image>"])
    capture(model, ["a dog"], tmp_path / "a", ["resid:0"])
    with pytest.raises(InputError, match=r"token id \d+ is beyond the \d+ rows of the embedding"):
        capture(model, ["a <image> dog"], tmp_path / "b", ["resid:0"])


def test_window_longer_than_the_positions_of_a_model_is_refused(tmp_path):
    model = make_model("gpt2")
    long = [" ".join(sentences(30))]
    with pytest.raises(InputError, match="256 tokens is longer than the 64 positions of gpt2; use context=64"):
        capture(model, long, tmp_path / "a", ["resid:0"], context=256)
    capture(model, long, tmp_path / "b", ["resid:0"], context=64)
    assert make_model("llama").n_positions is None


# -- command line ----------------------------------------------------------------------------------------


def test_command_writes_stores_and_says_so(tmp_path, capsys, folder):
    (tmp_path / "texts.csv").write_text("text,topic\n" + "".join(f'"{t}",{len(t) % 2}\n' for t in sentences(5)))
    options = ["--hook", "resid:1", "--hook", "mlp:0", "--label", "topic", "--context", 16, "--dtype", "bfloat16"]
    code, out, err = run(capsys, "capture", folder, tmp_path / "texts.csv", tmp_path / "acts", *options)
    assert code == 0, err
    assert "resid-1.zarr" in out
    assert "tokens/s" in out
    assert open_activations(tmp_path / "acts" / "mlp-0.zarr")["label"].attrs["names"] == ["0", "1"]


def test_command_refuses_bad_input_in_one_line(tmp_path, capsys, folder):
    (tmp_path / "a.txt").write_text("a dog")
    (tmp_path / "empty.txt").write_text("")
    make_network().save_pretrained(str(tmp_path / "headless"))
    make_tokenizer(bos=None).save_pretrained(str(tmp_path / "headless"))
    hook = ("--hook", "resid:0")
    text, out = tmp_path / "a.txt", tmp_path / "out"
    assert "no model at" in fails(capsys, "capture", tmp_path / "nowhere", text, out, *hook)
    assert "has no config.json" in fails(capsys, "capture", tmp_path, text, out, *hook)
    assert "it has resid:0 to resid:1" in fails(capsys, "capture", folder, text, out, "--hook", "resid:9")
    assert "none of 1 texts has a token" in fails(capsys, "capture", folder, tmp_path / "empty.txt", out, *hook)
    assert "no BOS token" in fails(capsys, "capture", tmp_path / "headless", text, out, *hook)
    make_network().save_pretrained(str(tmp_path / "mute"))
    assert "has no tokenizer" in fails(capsys, "capture", tmp_path / "mute", text, out, *hook)
    labelled = fails(capsys, "capture", folder, text, out, *hook, "--label", "topic")
    assert "is plain text, without labels" in labelled
    assert run(capsys, "capture", tmp_path / "headless", text, out, *hook, "--bos", "none")[0] == 0
    assert not os.path.exists(f"{out}/resid-9.zarr")
