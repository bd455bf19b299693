"""The features of a run as one object for a notebook: look, search, ask, steer."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from dbksvd_dask import lm
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.encoding import encode
from dbksvd_dask.errors import InputError
from dbksvd_dask.report import cards
from dbksvd_dask.report.answers import Active, Explorer, Matches, Nearest, Steered
from dbksvd_dask.report.feature import Feature, Related, pictures_of
from dbksvd_dask.report.material import Material, gather_material, run_name
from dbksvd_dask.report.page import page_html, write_page
from dbksvd_dask.report.samples import Excerpt
from dbksvd_dask.report.searching import search_atoms
from dbksvd_dask.store import paths
from dbksvd_dask.store.reader import fingerprint
from dbksvd_dask.store.runs import as_dictionary

# Rows that are encoded on the spot where there are no codes yet: enough to look, a matter of seconds.
ENCODED_ROWS = 50_000
Rows = npt.NDArray[Any]
Capture = Callable[[str], Any]


def open_features(
    run: Any,
    codes: Any = None,
    samples: Any = None,
    *,
    activations: Any = None,
    explanations: Any = None,
    logits: Any = None,
    model: Any = None,
    hook: str | None = None,
    capture: Capture | None = None,
    title: str | None = None,
    image_shape: Sequence[int] | None = None,
    max_samples: int | None = None,
    n_top: int = 10,
    seed: int = 0,
) -> Features:
    """Open the features of a run, to look at in a notebook.

    Parameters
    ----------
    run : path of a dictionary or of the folder of a fit, Dictionary, or fitted DBKSVD
        Of a fit that is still running, the newest checkpoint.
    codes : path of a codes store, or Dataset of `atom` and `coefficient`, optional
        Made with this dictionary. Without it, the first `max_samples` rows of `activations` are encoded now.
    samples : path of a text file or activation store, sequence of str, or array of images, optional
        One per sample of the codes, as for `write_report`.
    activations : path of an activation store, or array_like of shape (n_samples, n_features), optional
        Needed where there are no codes.
    explanations, logits : optional
        As for `write_report`.
    model : LanguageModel, or path of a Hugging Face directory or GGUF file, optional
        For `Features.on` with a text, and for `Features.steer`.
    hook : str, optional
        Where in the model the activations come from, such as "resid:8"; default: what the store says.
    capture : callable, optional
        Returns the activation of a text, (n_features,) or (n_tokens, n_features); for `Features.on` in place of
        `model`.
    title : str, optional
        Default: the name of the run.
    image_shape, n_top, seed
        As for `write_report`.
    max_samples : int, optional
        Use only the first `max_samples`; default: all codes, or 50,000 rows where they are encoded now.

    Returns
    -------
    Features

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD, open_features
    >>> Y = np.load("activations.npy")
    >>> model = DBKSVD.recipe("read", n_atoms=12, k=2, n_iter=2).fit(Y)
    >>> features = open_features(model, model.transform(Y), [f"row {i}" for i in range(len(Y))])
    >>> features[3].strongest[0].excerpt.text.startswith("row ")
    True
    >>> len(features.on(Y[0]).atoms)
    2
    """
    options = {
        "samples": samples,
        "activations": activations,
        "explanations": explanations,
        "logits": logits,
        "title": title or run_name(run),
        "image_shape": image_shape,
        "max_samples": max_samples,
        "n_top": n_top,
        "seed": seed,
    }
    opener = _Opener(run, codes, options, _Source(model, hook, capture))
    return opener.open()


@dataclass(frozen=True, eq=False)
class _Source:
    """Where activations of a text come from."""

    model: Any
    hook: str | None
    capture: Capture | None


@dataclass(frozen=True, eq=False)
class _Opener:
    """What `open_features` was given, so that it can be opened again."""

    run: Any
    codes: Any
    options: dict[str, Any]
    source: _Source

    def open(self) -> Features:
        dictionary, options = as_dictionary(self.run), dict(self.options)
        codes = self.codes
        if codes is None:
            options["max_samples"] = options["max_samples"] or ENCODED_ROWS
            codes = _encode_lazily(options["activations"], dictionary)
        return Features(gather_material(dictionary, codes, **options), self)


def _encode_lazily(activations: Any, dictionary: Dictionary) -> xr.Dataset:
    """Return codes of rows that are encoded when they are read: only those that are shown are."""
    if activations is None:
        raise InputError(
            "neither codes nor activations were given; give the codes store, or activations to encode"
        )
    if isinstance(activations, str | os.PathLike):
        path = paths.normalise(activations)
        codes = encode(path, dictionary)
        codes.attrs["store"] = {"path": path, "fingerprint": fingerprint(path)}
        return codes
    rows = activations if isinstance(activations, da.Array) else da.from_array(np.asarray(activations), (8192, -1))
    return encode(rows, dictionary)


class Features:
    """The features of a run, with their codes and samples; made by `open_features`.

    ``features[17]`` is one atom, which shows itself in a notebook; ``len(features)`` counts them.

    Parameters
    ----------
    material : Material
    opener : what it was opened from
    """

    def __init__(self, material: Material, opener: _Opener) -> None:
        self.material, self._opener = material, opener
        self._model: Any = None

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary whose atoms these are."""
        return self.material.inputs.dictionary

    @property
    def iteration(self) -> int:
        """Iterations of the fit that made it."""
        return self.dictionary.iteration

    def __len__(self) -> int:
        """Atoms of the dictionary."""
        return self.material.n_atoms

    def __getitem__(self, atom: int) -> Feature:
        """One atom."""
        return Feature(self.material, self._atom(atom))

    def __iter__(self) -> Iterator[Feature]:
        """Walk over the atoms."""
        return (Feature(self.material, j) for j in range(len(self)))

    def _atom(self, given: Any) -> int:
        try:
            atom = operator.index(given)
        except TypeError:
            words = f"; to find one by words, use search({given!r})" if isinstance(given, str) else ""
            raise InputError(f"a feature is given by its number, not by {given!r}{words}") from None
        if not 0 <= atom < len(self):
            raise IndexError(f"feature {atom} does not exist; there are features 0 to {len(self) - 1}")
        return atom

    def refresh(self) -> Features:
        """Open the same run again: while its fit is running, the newest checkpoint.

        Codes that were given belong to one dictionary, so open a running fit with `activations` in their place.
        """
        return self._opener.open()

    # -- finding -------------------------------------------------------------

    def search(self, query: str, n: int = 10) -> Matches:
        """Find features by words, best first.

        Those whose name has the words come first, then those with the most matching strongest samples.

        Parameters
        ----------
        query : str
            Words, all of which must occur.
        n : int, default 10
            Features to return.
        """
        return Matches(self.material, query, tuple(search_atoms(self.material, query)[:n]))

    def nearest(self, atom: Any, n: int = 10) -> Nearest:
        """Return the features of the largest absolute cosine to one, or to any direction.

        Parameters
        ----------
        atom : int, or array_like of shape (n_features,)
        n : int, default 10
            Features to return.
        """
        if np.ndim(atom):
            cosine, skipped = self._cosines(np.asarray(atom, np.float32)), -1
        else:
            j = self._atom(atom)
            if n <= self.material.facts.neighbour.shape[1]:
                return Nearest(tuple(self[j].nearest[:n]))
            cosine, skipped = self.dictionary.atoms @ self.dictionary.atoms[j], j
        order = np.argsort(-np.abs(cosine), kind="stable")
        order = order[order != skipped][:n]
        return Nearest(tuple(self._related(order, cosine[order])))

    def _cosines(self, direction: Rows) -> Rows:
        if direction.shape != (self.dictionary.n_features,) or not np.any(direction):
            raise InputError(
                f"a direction of shape {direction.shape}; need ({self.dictionary.n_features},), not all zero"
            )
        return self.dictionary.atoms @ (direction / np.linalg.norm(direction))

    def _related(self, atoms: Rows, values: Rows) -> Iterator[Related]:
        pairs = zip(atoms.tolist(), values.tolist(), strict=True)
        return (Related(j, float(x), self.material.name(j)) for j, x in pairs)

    # -- asking --------------------------------------------------------------

    def on(self, given: Any) -> Active:
        """Return the features that are active on a sample, a vector or a text.

        Parameters
        ----------
        given : int, array_like of shape (n_features,) or (n_tokens, n_features), or str
            The number of a sample of the codes; activations, which are encoded as the dictionary was fitted; or a
            text, which the `model` or `capture` of `open_features` turns into activations.
        """
        if isinstance(given, str):
            return self._on_text(given)
        if np.ndim(given) == 0:
            return self._on_row(given)
        return Active(self.material, *self._codes_of(np.asarray(given)))

    def _on_row(self, given: Any) -> Active:
        row, reader = operator.index(given), self.material.inputs.reader
        if not 0 <= row < reader.n_samples:
            raise InputError(f"sample {row} does not exist; there are samples 0 to {reader.n_samples - 1}")
        ids = np.array([row])
        excerpts, pictures = self.material.inputs.samples.excerpts(ids), pictures_of(self.material, ids)
        atom, coefficient = reader.take(ids)
        picture = None if pictures is None else pictures[0]
        return Active(self.material, atom, coefficient, None if excerpts is None else excerpts[0], picture)

    def _on_text(self, text: str) -> Active:
        source = self._opener.source
        if source.capture is not None:
            return Active(self.material, *self._codes_of(np.asarray(source.capture(text))), Excerpt(text))
        if source.model is None:
            raise InputError(
                "a text needs the model whose activations these are: open_features(..., model=PATH, "
                "hook='resid:8'), or capture=FUNCTION that returns the activation of a text"
            )
        found = lm.text_activations(self._language_model(), text, self._hook())
        spans = tuple(zip(found.start.tolist(), found.end.tolist(), strict=True))
        return Active(self.material, *self._codes_of(found.rows), Excerpt(found.text), spans=spans)

    def _codes_of(self, rows: Rows) -> tuple[Rows, Rows]:
        rows = np.atleast_2d(rows).astype(np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.dictionary.n_features:
            raise InputError(
                f"activations of shape {rows.shape}; need (n_features,) or (n_tokens, n_features) with "
                f"n_features={self.dictionary.n_features}"
            )
        stated = None if "k" in self.dictionary.params else self.material.inputs.codes_about.get("k")
        codes = encode(rows, self.dictionary, stated)
        return np.asarray(codes["atom"]), np.asarray(codes["coefficient"])

    # -- the model -----------------------------------------------------------

    def _language_model(self) -> Any:
        if self._model is None:
            given = self._opener.source.model
            self._model = lm.open_model(given) if isinstance(given, str | os.PathLike) else given
        return self._model

    def _hook(self) -> str:
        hook = self._opener.source.hook or self.material.inputs.samples.provenance.get("hook")
        if hook is None:
            raise InputError(
                "no hook is known; say where the activations come from: open_features(..., hook='resid:8')"
            )
        return str(hook)

    def steer(
        self,
        atom: int,
        prompt: str,
        strength: float | None = None,
        *,
        n_tokens: int = 30,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Steered:
        """Continue a text with and without a feature added to the model's activations.

        Parameters
        ----------
        atom : int
        prompt : str
        strength : float, optional
            Coefficient that is added; default: the largest one of the codes.
        n_tokens, temperature, seed
            As for `LanguageModel.generate`.
        """
        j = self._atom(atom)
        if self._opener.source.model is None:
            raise InputError("steering needs the model: open_features(..., model=PATH, hook='resid:8')")
        amount = (
            self[j].largest * float(self.material.facts.codes.sign[j]) if strength is None else float(strength)
        )
        model = self._language_model()
        how = {"n_tokens": n_tokens, "temperature": temperature, "seed": seed}
        plain = model.generate(prompt, **how)
        with lm.steer(model, self._hook(), self.dictionary, j, amount):
            changed = model.generate(prompt, **how)
        return Steered(j, self.material.name(j), amount, prompt, plain, changed, temperature, seed)

    # -- tables --------------------------------------------------------------

    def to_xarray(self) -> xr.Dataset:
        """Return what is known of each feature as a Dataset over `feature`, with `neighbour` and `bin`."""
        facts, m = self.material.facts, self.material.facts.codes
        share = np.divide(m.n_positive, m.n_active, out=np.full(len(self), math.nan), where=m.n_active > 0)
        per_atom = {
            "name": np.array([self.material.name(j) for j in range(len(self))], dtype=object),
            "n_active": m.n_active,
            "density": m.density,
            "mean": m.mean_active,
            "largest": m.largest,
            "positive": share,
            "coherence": facts.coherence.absolute,
            "nearest": facts.coherence.nearest,
        }
        if self.material.explanations:
            per_atom["score"] = np.array([self[j].score for j in range(len(self))])
        wide = {
            "neighbour": (("feature", "rank"), facts.neighbour),
            "cosine": (("feature", "rank"), facts.similarity),
            "histogram": (("feature", "bin"), facts.histogram),
        }
        variables = {name: ("feature", values) for name, values in per_atom.items()}
        return xr.Dataset(variables | wide, coords={"feature": np.arange(len(self))})

    def to_pandas(self) -> Any:
        """Return what is known of each feature as a pandas DataFrame, one row per feature."""
        table = self.to_xarray()
        return table[
            [name for name, values in table.data_vars.items() if values.dims == ("feature",)]
        ].to_dataframe()

    # -- the page ------------------------------------------------------------

    def explore(self, height: int = 720) -> Explorer:
        """Show the report page inside the notebook: search, sort, follow links.

        The whole page becomes part of the notebook's file. `write_report` writes it to a file instead.

        Parameters
        ----------
        height : int, default 720
            In pixels.
        """
        return Explorer(page_html(self.material), int(height))

    def write_report(self, out: str | os.PathLike[str] = "report.html") -> str:
        """Write the report page to a file; return its path."""
        return write_page(Path(out), page_html(self.material))

    def __repr__(self) -> str:
        """One line: how many, of what."""
        m = self.material.facts.codes
        return f"<Features of {self.material.title}: {len(self):,}, measured on {m.n_samples:,} samples>"

    def _repr_html_(self) -> str:
        m = self.material.facts.codes
        often = np.argsort(-m.variance, kind="stable")[:8].tolist()
        numbers = [
            ("features", f"{len(self):,}"),
            ("samples", f"{m.n_samples:,}"),
            ("iterations", f"{self.iteration:,}"),
            ("never active", f"{int(np.count_nonzero(m.n_active == 0)):,}"),
        ]
        rows = ((str(j), f"{m.density[j]:.2%}", escape(self.material.name(j))) for j in often)
        listed = cards.table(rows, ("feature", "density", "name"))
        return cards.box(
            cards.heading("Features", self.material.title),
            cards.facts(numbers),
            cards.section("Those of the highest variance", listed),
        )
