"""What Neuronpedia shows of a dictionary, gathered from a run, its codes and its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError
from dbksvd_dask.export.check import new_folder
from dbksvd_dask.export.neuronpedia import (
    BATCH,
    NeuronpediaSource,
    activation_line,
    explanation_line,
    write_source,
)
from dbksvd_dask.report.context import Context, find_context
from dbksvd_dask.report.facts import N_QUARTERS, histogram_range
from dbksvd_dask.report.material import Material, gather_material
from dbksvd_dask.report.samples import Tokens, TokenSamples, pick_texts
from dbksvd_dask.store.paths import PathLike

# Components of an atom that are listed as the neurons it is aligned with, and neighbours by cosine.
N_ALIGNED = 3
N_SIMILAR = 5
DIGITS = 5


@dataclass(frozen=True)
class NeuronpediaResult:
    """What was written.

    Attributes
    ----------
    path : str
    source : str
        MODEL/SOURCE below it.
    n_features, n_activations, n_explanations : int
    """

    path: str
    source: str
    n_features: int
    n_activations: int
    n_explanations: int


def export_neuronpedia(
    run: Any,
    codes: Any,
    path: PathLike,
    *,
    model_name: str,
    hook: str | None = None,
    set_name: str = "",
    release: str = "dbksvd",
    creator: str = "",
    creator_id: str = "dbksvd-dask",
    url: str = "",
    description: str = "",
    dataset: str = "",
    created: str = "1970-01-01T00:00:00",
    samples: Any = None,
    explanations: Any = None,
    logits: Any = None,
    keywords: bool = True,
    vectors: bool = False,
    n_top: int = 20,
    n_tokens: int = 128,
    max_samples: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> NeuronpediaResult:
    """Write a dictionary of a language model for import into Neuronpedia.

    Parameters
    ----------
    run : path of a dictionary or of the folder of a fit, Dictionary, or fitted DBKSVD
    codes : path of a codes store, or Dataset
        Of tokens in the order of their texts, as `dbksvd capture` writes them.
    path : path
        Folder to write; must not exist.
    model_name : str
        Neuronpedia's name of the model, such as gemma-3-270m.
    hook : str, optional
        Such as resid:14; default: what the store says.
    set_name, release, creator, creator_id, url, description, dataset, created
        See `NeuronpediaSource`.
    samples, explanations, logits, max_samples, seed
        As for `write_report`. With `logits`, features list the tokens that they make likelier and less likely.
    keywords : bool
        Use the keywords of a feature as its explanation if it has none.
    vectors : bool
        Write the atoms too, so that Neuronpedia can steer with them.
    n_top : int
        Strongest texts per feature.
    n_tokens : int
        Most tokens of a text, around the strongest.
    overwrite : bool
        Replace an earlier export.
    """
    material = gather_material(
        run,
        codes,
        samples=samples,
        explanations=explanations,
        logits=logits,
        max_samples=max_samples,
        n_top=n_top,
        seed=seed,
    )
    tokens = material.inputs.samples
    if not isinstance(tokens, TokenSamples):
        raise InputError(
            "Neuronpedia shows tokens, and these samples are none; give the store that `dbksvd capture` wrote and "
            "codes of it"
        )
    place = hook or tokens.provenance.get("hook")
    if place is None:
        raise InputError("no hook is known; say where the activations come from: hook='resid:14'")
    source = NeuronpediaSource(
        model=model_name,
        hook=str(place),
        set_name=set_name,
        release=release,
        creator=creator,
        creator_id=creator_id,
        url=url,
        description=description,
        dataset=dataset,
        created=created,
    )
    gathered = _Gathered(material, tokens, source, keywords, vectors, n_tokens)
    source = replace(source, n_texts=int(gathered.spans.text.max()) + 1, n_tokens=n_tokens)
    with new_folder(path, overwrite=overwrite) as folder:
        counts = write_source(folder, source, gathered.batches())
    return NeuronpediaResult(str(path), f"{source.model}/{source.name}", *counts.values())


class Entries(NamedTuple):
    """Atom, sample and quarter of texts, each of shape (n,)."""

    atom: NDArray[np.int64]
    sample: NDArray[np.int64]
    quarter: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Lines about features, from what a report shows of them."""

    material: Material
    tokens: TokenSamples
    source: NeuronpediaSource
    keywords: bool
    vectors: bool
    n_tokens: int

    def batches(self) -> Iterator[dict[str, Iterable[dict[str, Any]]]]:
        """Yield the lines of `BATCH` features at a time."""
        for first in range(0, self.material.n_atoms, BATCH):
            atoms = range(first, min(first + BATCH, self.material.n_atoms))
            yield {
                "features": map(self._feature, atoms),
                "activations": self._activations(atoms),
                "explanations": [explanation_line(self.source, j, text) for j in atoms if (text := self._name(j))],
            }

    def _name(self, atom: int) -> str:
        return self.material.name(atom) if self.keywords else self.material.explanation(atom)

    # -- features ------------------------------------------------------------

    def _feature(self, j: int) -> dict[str, Any]:
        facts, m = self.material.facts, self.material.facts.codes
        low, high = (float(end[j]) for end in histogram_range(m))
        counts = facts.histogram[j]
        edges = np.linspace(low, high, len(counts) + 1)
        atom = np.asarray(self.material.inputs.dictionary.atoms[j], np.float64)
        aligned = np.argsort(-np.abs(atom), kind="stable")[:N_ALIGNED]
        largest = float(m.largest[j])
        return {
            **self.source.place(j),
            "maxActApprox": _round(largest),
            "frac_nonzero": float(m.density[j]),
            "freq_hist_data_bar_heights": counts.tolist(),
            "freq_hist_data_bar_values": _rounded((edges[:-1] + edges[1:]) / 2),
            "logits_hist_data_bar_heights": [],
            "logits_hist_data_bar_values": [],
            "neuron_alignment_indices": aligned.tolist(),
            "neuron_alignment_values": _rounded(atom[aligned]),
            "neuron_alignment_l1": _rounded(np.abs(atom[aligned]) / np.abs(atom).sum()),
            "correlated_neurons_indices": [],
            "correlated_neurons_l1": [],
            "correlated_neurons_pearson": [],
            "decoder_weights_dist": [],
            **self._logits(j),
            "sourceSetName": self.source.set,
            "topkCosSimIndices": facts.neighbour[j, :N_SIMILAR].tolist(),
            "topkCosSimValues": _rounded(facts.similarity[j, :N_SIMILAR]),
            "vector": _rounded(atom, 7) if self.vectors else [],
            "vectorLabel": None,
            "hookName": self.source.hook_name if self.vectors else None,
            "vectorDefaultSteerStrength": _round(largest) if self.vectors else None,
            "hasVector": self.vectors,
        }

    def _logits(self, j: int) -> dict[str, Any]:
        found = self.material.logits
        sides = {"neg": "negative", "pos": "positive"}
        pairs = {short: [] if found is None else found[j][side] for short, side in sides.items()}
        return {f"{short}_str": [token for token, _ in listed] for short, listed in pairs.items()} | {
            f"{short}_values": _rounded([value for _, value in listed]) for short, listed in pairs.items()
        }

    # -- activations ---------------------------------------------------------

    @cached_property
    def spans(self) -> Tokens:
        """Text and characters of every token."""
        return self.tokens.tokens(np.arange(self.material.inputs.reader.n_samples))

    @cached_property
    def entries(self) -> Entries:
        """Every text that is written: its atom, sample and quarter (-1: one of the strongest), atom by atom."""
        shown = self.material.shown
        size = shown.lists["typical"].shape[1] // N_QUARTERS
        places = np.concatenate([shown.lists["strongest"], shown.lists["typical"]], axis=1)
        quarter = np.repeat([-1, *range(N_QUARTERS)], [shown.lists["strongest"].shape[1], *[size] * N_QUARTERS])
        atom, column = np.nonzero(places >= 0)
        return Entries(atom, shown.sample[places[atom, column]], quarter[column])

    @cached_property
    def context(self) -> Context:
        """Active tokens of the text of every entry."""
        found = find_context(self.material.inputs.reader, self.tokens, self.entries.atom, self.entries.sample)
        if found is None:
            raise InputError(
                "the tokens of a text do not stand together in these codes, or there are too many codes; encode "
                "the captured store as it is, not a shuffled one, or use max_samples=N"
            )
        return found

    def _activations(self, atoms: range) -> Iterator[dict[str, Any]]:
        """Yield the texts of some atoms; only one of them is held at a time."""
        a, b = np.searchsorted(self.entries.atom, (atoms.start, atoms.stop))
        if a == b:
            return
        sample, text = self.entries.sample[a:b], self.spans.text
        first, last = (np.searchsorted(text, text[sample], side=side) for side in ("left", "right"))
        first = np.maximum(first, np.minimum(sample - self.n_tokens // 2, last - self.n_tokens))
        last = np.minimum(last, first + self.n_tokens)
        lines = np.unique(text[sample])
        whole = dict(zip(lines.tolist(), pick_texts(self.tokens.texts, lines), strict=True))
        number = np.arange(a, b) - np.searchsorted(self.entries.atom, self.entries.atom[a:b])
        for e, i, j, n in zip(range(a, b), first.tolist(), last.tolist(), number.tolist(), strict=True):
            words = _pieces(whole[int(text[i])], self.spans.start[i:j].tolist(), self.spans.end[i:j].tolist())
            atom, quarter = int(self.entries.atom[e]), int(self.entries.quarter[e])
            interval = None if quarter < 0 else self._interval(atom, quarter)
            yield activation_line(self.source, atom, n, words, self._values(e, i, j), interval)

    def _values(self, entry: int, first: int, last: int) -> list[float]:
        """Return the coefficient on each token of a window."""
        values = np.zeros(last - first)
        items = slice(self.context.offset[entry], self.context.offset[entry + 1])
        at = self.context.sample[items] - first
        inside = (at >= 0) & (at < last - first)
        values[at[inside]] = self.context.value[items][inside]
        return _rounded(values)

    def _interval(self, atom: int, quarter: int) -> tuple[float, float, float]:
        edges = self.material.shown.quarter[atom]
        low, high = edges[N_QUARTERS - 1 - quarter], edges[N_QUARTERS - quarter]
        return _round(low), _round(high), 1 / N_QUARTERS


def _pieces(text: str, start: Sequence[int], end: Sequence[int]) -> list[str]:
    """Cut a text at the ends of tokens, so that the pieces put together give the text between first and last.

    >>> _pieces("an old house", [0, 3, 7], [2, 6, 12])
    ['an', ' old', ' house']
    """
    at = [start[0], *end]
    return [text[a:b] for a, b in itertools.pairwise(at)]


def _round(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _rounded(values: Any, digits: int = DIGITS) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in np.asarray(values, np.float64).tolist()]
