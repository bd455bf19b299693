"""Autointerpretation: words for atoms, and a score for the words.

Per atom the strongest samples go to an explainer; the explanation is scored on next-strongest and random samples
by the rank correlation of a similarity (explanation, sample) with the activation.
"""

from dbksvd_dask.evaluate.autointerp.client import OpenAIClient
from dbksvd_dask.evaluate.autointerp.embedding import (
    EmbeddingScorer,
    HashingEmbedding,
    SentenceTransformerEmbedding,
)
from dbksvd_dask.evaluate.autointerp.keywords import KeywordExplainer, strongest_texts
from dbksvd_dask.evaluate.autointerp.openai import IMAGE_PROMPT, TEXT_PROMPT, OpenAIExplainer, OpenAIScorer
from dbksvd_dask.evaluate.autointerp.protocols import Example, Explainer, Sample, Scorer
from dbksvd_dask.evaluate.autointerp.run import (
    AutointerpResult,
    Interpretation,
    autointerpret,
    interpret_atom,
    iter_interpretations,
    spearman,
    summarise,
)
from dbksvd_dask.evaluate.autointerp.selection import AtomSelection, atoms_of_highest_variance, select_samples

__all__ = [
    "IMAGE_PROMPT",
    "TEXT_PROMPT",
    "AtomSelection",
    "AutointerpResult",
    "EmbeddingScorer",
    "Example",
    "Explainer",
    "HashingEmbedding",
    "Interpretation",
    "KeywordExplainer",
    "OpenAIClient",
    "OpenAIExplainer",
    "OpenAIScorer",
    "Sample",
    "Scorer",
    "SentenceTransformerEmbedding",
    "atoms_of_highest_variance",
    "autointerpret",
    "interpret_atom",
    "iter_interpretations",
    "select_samples",
    "spearman",
    "strongest_texts",
    "summarise",
]
