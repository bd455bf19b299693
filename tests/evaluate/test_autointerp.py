"""Autointerpretation offline: selection, keywords, embedding scores, the whole protocol."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate import autointerp as ai
from dbksvd_dask.evaluate.autointerp import embedding
from dbksvd_dask.evaluate.codes import code_moments
from tests.helpers.jobs import PATIENCE
from tests.naive import metrics as naive

N, K, M = 300, 4, 20
TOPICS = {
    0: ["river", "water", "boat", "fish"],
    1: ["engine", "wheel", "motor", "brake"],
    2: ["violin", "melody", "concert", "chord"],
}


@pytest.fixture(scope="module")
def codes():
    return naive.random_codes(np.random.default_rng(0), N, K, M - 1)


def in_blocks(codes, rows=70):
    return lambda: ((codes[0][i : i + rows], codes[1][i : i + rows]) for i in range(0, len(codes[0]), rows))


def test_selection_follows_the_protocol(codes):
    X = naive.dense_codes(*codes, M)
    selected = ai.select_samples(in_blocks(codes), M, n_interpret=6, n_explain=3, n_next=5, n_random=7, seed=1)
    assert [s.atom for s in selected] == np.argsort(-X.var(axis=0), kind="stable")[:6].tolist()
    for s in selected:
        column = X[:, s.atom]
        sign = -1 if column[column != 0].mean() < 0 else 1
        assert s.flipped == (sign < 0)
        rows, values = naive.strongest(X, s.atom, sign, 8)
        assert s.explain_samples.tolist() == rows[:3]
        np.testing.assert_array_equal(s.explain_activations, values[:3])
        assert s.score_samples[:5].tolist() == rows[3:]
        random = s.score_samples[5:]
        assert len(set(random)) == 7
        assert not set(random) & set(rows)
        np.testing.assert_allclose(s.score_activations, sign * column[s.score_samples], rtol=1e-6)
        assert s.n_samples == N


@pytest.mark.parametrize("rows", [1, 299, 300])
def test_selection_does_not_depend_on_the_blocks(codes, rows):
    a = ai.select_samples(in_blocks(codes, rows), M, seed=2)
    b = ai.select_samples(in_blocks(codes), M, seed=2)
    assert len(a) == len(b) == M - 1  # the dead atom is left out
    for x, y in zip(a, b, strict=True):
        assert (x.atom, x.flipped) == (y.atom, y.flipped)
        np.testing.assert_array_equal(x.score_samples, y.score_samples)
        np.testing.assert_array_equal(x.score_activations, y.score_activations)


def test_random_samples_change_with_the_seed_only(codes):
    a, b, c = (ai.select_samples(in_blocks(codes), M, atoms=[4], seed=s)[0] for s in (0, 0, 1))
    np.testing.assert_array_equal(a.score_samples, b.score_samples)
    assert a.score_samples.tolist() != c.score_samples.tolist()


def test_fewer_samples_than_asked_for(codes):
    small = (codes[0][:20], codes[1][:20])
    for s in ai.select_samples(in_blocks(small), M):
        assert len(set(s.explain_samples) | set(s.score_samples)) <= 20
        assert s.explain_samples.size <= 8


def test_atoms_of_highest_variance_leave_out_dead_ones(codes):
    assert M - 1 not in ai.atoms_of_highest_variance(code_moments(*codes, M), M)


@pytest.mark.parametrize("seed", range(3))
def test_spearman_is_the_correlation_of_ranks_with_ties_at_their_mean(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 5, 40), rng.standard_normal(40)
    assert ai.spearman(a, b) == pytest.approx(naive.spearman(a, b), rel=1e-9)


def test_spearman_of_a_constant_is_undefined():
    assert np.isnan(ai.spearman([1, 1, 1], [1, 2, 3]))


def test_keyword_weights_equal_their_twin():
    groups = [["the river and the boat", "a river fish"], ["motor and wheel", "wheel of a boat"], ["a violin"]]
    explainer = ai.KeywordExplainer(groups, n_keywords=2)
    expected = naive.class_tf_idf(groups, CountVectorizer(stop_words="english").build_analyzer())
    for texts, weights in zip(groups, expected, strict=True):
        assert explainer.weights(texts) == pytest.approx(weights)
    examples = [ai.Example(text, 1.0) for text in groups[1]]
    assert explainer.explain(examples) == "wheel, motor"


def test_keywords_may_be_word_pairs_and_keep_stop_words():
    explainer = ai.KeywordExplainer([["the old boat"]], stop_words=None, ngram_range=(2, 2))
    assert explainer.explain([ai.Example("the old boat", 1.0)]) == "old boat, the old"


def test_keywords_need_texts():
    explainer = ai.KeywordExplainer([["x y"]])
    with pytest.raises(InputError, match=r"keywords need texts, received bytes; .* OpenAIExplainer"):
        explainer.explain([ai.Example(b"\x89PNG", 1.0)])
    with pytest.raises(InputError, match="at least one atom"):
        ai.KeywordExplainer([])


def topic_data():
    """Texts on three topics; atom t is active on the texts of topic t, atom 1 with a negative sign."""
    rng = np.random.default_rng(3)
    topic = rng.integers(0, 3, 240)
    texts = [" ".join(rng.choice(TOPICS[t], 3)) + " thing" for t in topic]
    strength = 1 + rng.random(240)
    coefficient = np.where(topic == 1, -strength, strength)[:, None].astype(np.float32)
    return texts, (topic[:, None].astype(np.int32), coefficient)


def test_offline_pair_explains_topics_with_a_high_score():
    texts, codes = topic_data()
    selected = ai.select_samples(in_blocks(codes), 4, n_next=30, n_random=30)
    explainer = ai.KeywordExplainer(ai.strongest_texts(selected, texts), n_keywords=4)
    result = ai.autointerpret(selected, texts, explainer, ai.EmbeddingScorer(ai.HashingEmbedding()))
    assert len(result.interpretations) == 3
    for one in result.interpretations:
        assert set(one.explanation.split(", ")) == set(TOPICS[one.atom])
        assert one.flipped == (one.atom == 1)
        assert one.score > 0.5
    assert result.mean_score == pytest.approx(np.mean([i.score for i in result.interpretations]))
    shuffled = [texts[i] for i in np.random.default_rng(4).permutation(len(texts))]
    nonsense = ai.autointerpret(selected, shuffled, explainer, ai.EmbeddingScorer(ai.HashingEmbedding()))
    assert nonsense.mean_score < 0.3


def test_an_explanation_that_fits_all_samples_alike_counts_zero():
    texts, codes = topic_data()
    selected = ai.select_samples(in_blocks(codes), 4, atoms=[0, 2])

    class Same:
        def explain(self, examples):
            return "anything"

        def similarity(self, explanation, samples):
            return np.ones(len(samples))

    result = ai.autointerpret(selected, texts, Same(), Same())
    assert (result.mean_score, result.n_undefined) == (0.0, 2)


def test_embedding_scorer_is_cosine_similarity():
    vectors = {"q": [3.0, 4.0], "a": [6.0, 8.0], "b": [-4.0, 3.0], "z": [0.0, 0.0]}
    scorer = ai.EmbeddingScorer(lambda texts: np.array([vectors[t] for t in texts]))
    np.testing.assert_allclose(scorer.similarity("q", ["a", "b", "z"]), [1, 0, 0], atol=1e-12)


def test_images_may_have_their_own_embedding():
    scorer = ai.EmbeddingScorer(lambda t: np.ones((len(t), 2)), lambda b: np.array([[len(x), 0.0] for x in b]))
    np.testing.assert_allclose(scorer.similarity("word", [b"xx", b"y"]), [0.5**0.5] * 2)


def test_wrong_embeddings_and_scores_are_refused():
    with pytest.raises(InputError, match=r"shape \(2, n_dimensions\), received \(1, 4\)"):
        ai.EmbeddingScorer(lambda t: np.ones((1, 4))).similarity("e", ["a", "b"])
    with pytest.raises(InputError, match="4 dimensions but samples into 3"):
        ai.EmbeddingScorer(lambda t: np.ones((len(t), 4)), lambda t: np.ones((len(t), 3))).similarity("e", ["a"])
    texts, codes = topic_data()
    selected = ai.select_samples(in_blocks(codes), 4)

    class Short:
        def explain(self, examples):
            return "x"

        def similarity(self, explanation, samples):
            return np.ones(3)

    with pytest.raises(MismatchError, match=r"similarities of shape \(3,\) for \d+ samples"):
        ai.autointerpret(selected, texts, Short(), Short())


def test_fewer_texts_than_samples_are_refused():
    texts, codes = topic_data()
    selected = ai.select_samples(in_blocks(codes), 4)
    explainer = ai.KeywordExplainer([["x y"]])
    with pytest.raises(InputError, match="received 239 texts or images for 240 encoded samples; pass one"):
        ai.autointerpret(selected, texts[:-1], explainer, ai.EmbeddingScorer(ai.HashingEmbedding()))


def test_nothing_to_interpret_is_refused():
    _, codes = topic_data()
    with pytest.raises(InputError, match="no atom was interpreted"):
        ai.autointerpret([], [], ai.KeywordExplainer([["x"]]), ai.EmbeddingScorer(ai.HashingEmbedding()))
    with pytest.raises(InputError, match="n_explain=0 must be at least 1"):
        ai.select_samples(in_blocks(codes), 4, n_explain=0)


def test_missing_sentence_transformers_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(embedding.importlib, "import_module", missing)
    with pytest.raises(InputError, match="pip install sentence-transformers"):
        ai.SentenceTransformerEmbedding()(["text"])


def test_sentence_transformer_adapter_passes_texts_on(monkeypatch):
    class Model:
        def __init__(self, name, device):
            self.name, self.device = name, device

        def encode(self, texts, **options):
            assert options["convert_to_numpy"]
            assert not options["show_progress_bar"]
            return [[len(t), len(self.name)] for t in texts]

    class Library:
        SentenceTransformer = Model

    monkeypatch.setattr(embedding.importlib, "import_module", lambda name: Library)
    embed = ai.SentenceTransformerEmbedding("tiny", device="cpu")
    np.testing.assert_array_equal(embed(["a", "bcd"]), [[1, 4], [3, 4]])


def test_minilm_comes_from_an_installed_package_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(embedding, "MINILM_PACKAGE", "weights_in_a_package")
    assert embedding._minilm() == embedding.MINILM
    (tmp_path / "weights_in_a_package").mkdir()
    (tmp_path / "weights_in_a_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert embedding._minilm() == str(tmp_path / "weights_in_a_package" / "model")


@pytest.mark.interop
def test_minilm_tells_a_topic_from_another():
    pytest.importorskip("sentence_transformers")
    try:
        scorer = ai.EmbeddingScorer(ai.SentenceTransformerEmbedding(device="cpu"))
        close, far = scorer.similarity("boats on water", ["A ship sails down the river.", "The motor needs oil."])
    except OSError as error:  # the library is there but the model's files are not
        pytest.skip(f"MiniLM is not on this machine: {error}")
    assert close > far + 0.1


@pytest.mark.slow
def test_importing_the_evaluation_needs_no_dask_and_no_store():
    modules = ["evaluate.metrics", "evaluate.probing", "evaluate.ground_truth", "evaluate.autointerp"]
    names = ", ".join(f"dbksvd_dask.{module}" for module in modules)
    check = "assert not {'dask', 'distributed', 'zarr', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, {names}; {check}"], check=True, timeout=PATIENCE)
