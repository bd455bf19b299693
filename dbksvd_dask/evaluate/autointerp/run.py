"""Autointerpretation: explain atoms in words, and score each explanation on samples it has not seen."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import ConstantInputWarning, spearmanr

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate.autointerp.protocols import Example, Explainer, Sample, Scorer
from dbksvd_dask.evaluate.autointerp.selection import AtomSelection


@dataclass(frozen=True)
class Interpretation:
    """One atom in words.

    Attributes
    ----------
    atom : int
    flipped : bool
        The explanation describes the atom's negative.
    explanation : str
    score : float
        Spearman correlation of similarity and activation; 0 where it is undefined.
    defined : bool
        False if all similarities or all activations were equal.
    n_scored : int
    """

    atom: int
    flipped: bool
    explanation: str
    score: float
    defined: bool
    n_scored: int


@dataclass(frozen=True)
class AutointerpResult:
    """Interpretations of several atoms.

    Attributes
    ----------
    interpretations : tuple of Interpretation
    mean_score : float
        Mean over atoms; an undefined score counts as 0: it explains nothing.
    n_undefined : int
    """

    interpretations: tuple[Interpretation, ...]
    mean_score: float
    n_undefined: int


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Compute the Spearman rank correlation, ties at their mean rank; nan if either side is constant.

    Parameters
    ----------
    a, b : array_like of shape (n,)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)  # nan says it
        return float(spearmanr(a, b).statistic)


def interpret_atom(
    selection: AtomSelection, samples: Sequence[Sample], explainer: Explainer, scorer: Scorer
) -> Interpretation:
    """Explain one atom and score the explanation.

    Parameters
    ----------
    selection : AtomSelection
    samples : sequence of str or bytes
        All samples of the store, in its order; only those of the selection are read.
    explainer : Explainer
    scorer : Scorer

    Returns
    -------
    Interpretation
    """
    examples = [
        Example(samples[int(i)], float(a))
        for i, a in zip(selection.explain_samples, selection.explain_activations, strict=True)
    ]
    explanation = explainer.explain(examples)
    tested = [samples[int(i)] for i in selection.score_samples]
    similarity = np.asarray(scorer.similarity(explanation, tested), np.float64)
    if similarity.shape != (len(tested),):
        raise MismatchError(
            f"the scorer gave similarities of shape {similarity.shape} for {len(tested)} samples; "
            "it must give one number per sample"
        )
    score = spearman(similarity, selection.score_activations) if tested else float("nan")
    defined = bool(np.isfinite(score))
    return Interpretation(
        selection.atom, selection.flipped, explanation, score if defined else 0.0, defined, len(tested)
    )


def iter_interpretations(
    selections: Sequence[AtomSelection], samples: Sequence[Sample], explainer: Explainer, scorer: Scorer
) -> Iterator[Interpretation]:
    """Interpret one atom after the other, so that a caller can keep each answer as it comes.

    Parameters
    ----------
    selections : sequence of AtomSelection
    samples : sequence of str or bytes
    explainer : Explainer
    scorer : Scorer

    Yields
    ------
    Interpretation
    """
    encoded = max((s.n_samples for s in selections), default=0)
    if len(samples) < encoded:
        raise InputError(
            f"received {len(samples)} texts or images for {encoded} encoded samples; pass one for every sample, "
            "in the order of the store"
        )
    for selection in selections:
        yield interpret_atom(selection, samples, explainer, scorer)


def autointerpret(
    selections: Sequence[AtomSelection], samples: Sequence[Sample], explainer: Explainer, scorer: Scorer
) -> AutointerpResult:
    """Interpret all selected atoms and take the mean score.

    Parameters
    ----------
    selections : sequence of AtomSelection
        From `select_samples`.
    samples : sequence of str or bytes
    explainer : Explainer
    scorer : Scorer

    Returns
    -------
    AutointerpResult
    """
    return summarise(iter_interpretations(selections, samples, explainer, scorer))


def summarise(interpretations: Iterator[Interpretation] | Sequence[Interpretation]) -> AutointerpResult:
    """Return the mean score of interpretations."""
    done = tuple(interpretations)
    if not done:
        raise InputError("no atom was interpreted; select at least one atom that is in use")
    return AutointerpResult(done, float(np.mean([i.score for i in done])), sum(not i.defined for i in done))
