"""The estimator, with scikit-learn's habits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dbksvd_dask._words import parse_bytes
from dbksvd_dask.base.late import late, postponed
from dbksvd_dask.dictionary import Dictionary, History, fit_html
from dbksvd_dask.encoding import as_source, check_width, encode_source, placed_plan, plain_array
from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import DECISIVE
from dbksvd_dask.plan.memory import MemoryPlan
from dbksvd_dask.plan.params import FitParams, check_choice, check_integer, check_k
from dbksvd_dask.plan.recipes import find_recipe, recipe_params
from dbksvd_dask.store import paths
from dbksvd_dask.store.dictionary import save_dictionary
from dbksvd_dask.store.paths import PathLike
from dbksvd_dask.store.runs import open_dictionary, run_folder

# What computes (kernels, graphs, codes) is imported in the methods that use it, and loads with the first call.

with postponed("scipy.stats", "pandas"):  # two thirds of the time that these imports take
    import scipy.sparse as sp
    from sklearn.base import BaseEstimator, TransformerMixin, clone
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.validation import check_is_fitted

if TYPE_CHECKING:
    import xarray as xr

    from dbksvd_dask.fit.trainer import Trainer
    from dbksvd_dask.graph.encode import EncodePlan
    from dbksvd_dask.graph.sources import Source
else:
    xr = late("xarray")

_PARAMS = FitParams.__dataclass_fields__
OUTPUTS = ("codes", "sparse")
INIT_RULES = ("data", "uniform")


class DBKSVD(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Double-Batch K-SVD: a sparse dictionary of more samples than fit in memory.

    Parameters
    ----------
    n_atoms : int
        Atoms of the dictionary.
    k : int
        Most nonzeros per sample.
    batch_size : int, default 65536
        Samples of one outer batch; never more than the data have.
    n_iter : int or None, default None
        Outer batches; the data are reshuffled and reused when exhausted. None for 40, or what `growth` takes.
    n_rounds : int or None, default None
        Rounds of one dictionary update; the atoms of a round are updated at the same time. None for 8, or twice k
        (up to 64) where atoms have fewer samples in a batch than there are features.
    lanczos_steps : int or None, default None
        Dimension of the Krylov space in which a new atom is sought: passes over the residual per round. None for
        2, or 1 where atoms have fewer samples in a batch than there are features.
    groups : tuple of int, "exponential" or None, default None
        Matryoshka groups: sizes that sum to n_atoms.
    encoder : {"mp", "omp", "fista"}, default "mp"
        Matching pursuit, orthogonal matching pursuit, or lasso by FISTA, refitted on its k largest coefficients.
    nonneg : bool, default False
        Allow non-negative coefficients only.
    refit : bool, default False
        Least squares on the support that the pursuit found; nothing to do for "omp", which is one.
    min_coefficient, rtol : float, default 0.0
        Stop a pursuit when the next coefficient is below `min_coefficient`, or when the residual norm falls to
        `rtol` times the sample's norm.
    center : bool, default True
        Subtract the mean from every sample.
    init : {"data", "uniform"}, ndarray of shape (n_atoms, n_features) or path, default "data"
        First dictionary: samples, random directions, or given (warm start): an array, or the path of a dictionary,
        of the folder of a fit, or of a dictionary of another tool (`.npy`, `.safetensors`, SAELens folder). Where
        there are fewer samples than atoms, the rest are random directions.
    dead_atoms : {"residual", "random", "keep"}, default "residual"
        What takes the place of an atom that no sample of a batch used: the worst-reconstructed samples, random
        directions, or nothing.
    chunk_size : int, default 8192
        Samples per task. The last bits of a result depend on it, and on nothing else about how it was computed.
    validation : int or samples, default 8192
        Samples set aside to measure on (at most a tenth of the data; 0: none), or samples of their own.
    device : {"auto", "cpu", "gpu"}, default "auto"
        Where the heavy work runs.
    seed : int, default 0
        Everything random follows from it.
    checkpoint : path or None, default None
        Folder or fsspec URL to which the state of the fit is written.
    callbacks : sequence of callables, default ()
        Each is called with progress events (`dbksvd_dask.events`).
    checkpoint_every : int, default 1
        Iterations between two checkpoints.
    memory_limit : int, str or None, default None
        Most memory per worker process, as bytes or as in "4GB". A fit that is planned to take more is refused
        before it starts (see `plan`).
    momentum : float, default 0.6
        Share of an atom's last change by which it is moved on before the next batch is encoded; 0 for none, the
        plain algorithm.
    warm_up : bool, default True
        Begin with small outer batches, 4 samples per atom but at least 8192, and double them every other
        iteration up to `batch_size`: most of what the first iterations learn does not need more.
    output : {"codes", "sparse"}, default "codes"
        What `transform` gives: a labelled Dataset of codes, or a csr array (n_samples, n_atoms) in memory, which
        the next step of a scikit-learn Pipeline can use.
    encode : {"plain", "staged"}, default "plain"
        How samples are encoded when the dictionary is used: one pursuit over all atoms, or the groups (of `groups`
        or of `growth`) offered in order, each to what the ones before left over.
    sparsity : {"max", "mean"} or None, default None
        What k is: the most nonzeros of any sample, or their mean over samples. The latter is reached by a
        threshold on coefficients, the same for all samples, which is learned in training (`threshold_`). None for
        "mean" where `max_nonzeros` or `frequency_prior` is given, else "max".
    max_nonzeros : int or None, default None
        Where k is the mean, the most nonzeros of any sample; None for 3 k.
    growth : float or None, default None
        Grow the dictionary from 16 atoms to n_atoms by this factor at a time, with eight iterations after each
        step: finds more of the features that made the data. Atoms are then sorted by how often they are used,
        and `mean_` is learned on the way. `refit` counts for the finished dictionary only.
    growth_threshold : float, default 1.3
        While growing, stop a pursuit below this multiple of the largest coefficient that chance would give: the
        residual's size per feature times ``sqrt(2 log n_atoms)``.
    frequency_prior : bool, default False
        With `growth`, where k is the mean: when samples are encoded, an atom that few samples use needs a
        larger coefficient than one that many use, by the odds that a sample uses it and by how far the threshold
        is above the noise. Spends the nonzeros where they are most likely right.
    patience : int or None, default None
        Stop before `n_iter` once the error on held-out samples (without any: on the batch) has not fallen by 0.1 %
        for this many iterations; a growing dictionary reaches its full size first. None never stops early.
    gram : {"auto", "always", "never"}, default "auto"
        Whether matching pursuit uses the products of all pairs of atoms, n_atoms x n_atoms numbers. Without
        them it searches all atoms in a few passes, and the best candidates in between: nearly the same codes, in
        memory that grows with n_atoms only. "auto" forms the gram of up to 16,384 atoms (in training, of a group).
    whiten : float, default 0.0
        Fit and encode in coordinates in which directions vary more alike: samples are multiplied by the inverse
        covariance (without `center`, by the inverse second moments) to the power ``whiten / 2``, from 0 (not at
        all) to 1 (wholly). Takes one pass over at most 262,144 samples; 0.5 is best for activations of language
        models. Atoms, codes and reconstructions are those of the samples as they are, and so are all figures but
        those of batches in `history_`. Thresholds (`min_coefficient`, `rtol`, `threshold_`) count in these
        coordinates.
    verbose : bool or None, default None
        Show live progress while fitting: a view in a notebook, lines elsewhere. None shows it in a notebook only.

    Attributes
    ----------
    dictionary_ : xarray.DataArray of dims (atom, feature), unit rows
    components_ : ndarray of shape (n_atoms, n_features), the same
    mean_ : ndarray of shape (n_features,)
    history_ : xarray.Dataset over `iteration`
    n_iter_ : int
    n_features_in_ : int
    threshold_ : float
        Smallest coefficient that training has arrived at; 0 where none is learned.

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD
    >>> Y = np.random.default_rng(0).standard_normal((500, 16)).astype("float32")
    >>> model = DBKSVD(n_atoms=32, k=4, n_iter=3).fit(Y)
    >>> codes = model.transform(Y)
    >>> dict(codes.sizes)
    {'sample': 500, 'slot': 4}

    See Also
    --------
    DBKSVD.recipe : an estimator with the parameters that are best for one purpose
    """

    _recipe: str | None = None  # the recipe that its parameters came from

    def __init__(
        self,
        n_atoms: int,
        k: int,
        *,
        batch_size: int = 65536,
        n_iter: int | None = None,
        n_rounds: int | None = None,
        lanczos_steps: int | None = None,
        groups: Any = None,
        encoder: str = "mp",
        nonneg: bool = False,
        refit: bool = False,
        min_coefficient: float = 0.0,
        rtol: float = 0.0,
        center: bool = True,
        init: Any = "data",
        dead_atoms: str = "residual",
        chunk_size: int = 8192,
        validation: Any = 8192,
        device: str = "auto",
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_every: int = 1,
        memory_limit: int | str | None = None,
        momentum: float = 0.6,
        warm_up: bool = True,
        output: str = "codes",
        encode: str = "plain",
        sparsity: str | None = None,
        max_nonzeros: int | None = None,
        growth: float | None = None,
        growth_threshold: float = 1.3,
        frequency_prior: bool = False,
        patience: int | None = None,
        gram: str = "auto",
        whiten: float = 0.0,
        verbose: bool | None = None,
    ) -> None:
        self.n_atoms = n_atoms
        self.k = k
        self.batch_size = batch_size
        self.n_iter = n_iter
        self.n_rounds = n_rounds
        self.lanczos_steps = lanczos_steps
        self.groups = groups
        self.encoder = encoder
        self.nonneg = nonneg
        self.refit = refit
        self.min_coefficient = min_coefficient
        self.rtol = rtol
        self.center = center
        self.init = init
        self.dead_atoms = dead_atoms
        self.chunk_size = chunk_size
        self.validation = validation
        self.device = device
        self.seed = seed
        self.checkpoint = checkpoint
        self.callbacks = callbacks
        self.checkpoint_every = checkpoint_every
        self.memory_limit = memory_limit
        self.momentum = momentum
        self.warm_up = warm_up
        self.encode = encode
        self.sparsity = sparsity
        self.max_nonzeros = max_nonzeros
        self.growth = growth
        self.growth_threshold = growth_threshold
        self.frequency_prior = frequency_prior
        self.patience = patience
        self.gram = gram
        self.whiten = whiten
        self.verbose = verbose
        self.output = output

    @classmethod
    def recipe(cls, name: str, n_atoms: int, k: int, **changes: Any) -> DBKSVD:
        """Return an estimator with the parameters for one purpose; docs/settings.md has the figures.

        The parameters are ordinary ones, which `get_params` and a stored dictionary show. The name is stored too.

        Parameters
        ----------
        name : {"reconstruct", "recover", "read", "paper"}
            See `dbksvd_dask.plan.recipes.RECIPES`.
        n_atoms, k : int
            As for `DBKSVD`.
        **changes
            Other parameters of `DBKSVD`; they win over those of the recipe.

        Examples
        --------
        >>> from dbksvd_dask import DBKSVD
        >>> DBKSVD.recipe("reconstruct", n_atoms=64, k=8, seed=3)
        DBKSVD(k=8, n_atoms=64, refit=True, seed=3, whiten=0.25)  # recipe 'reconstruct'
        """
        find_recipe(name)
        n_atoms = check_integer("n_atoms", n_atoms, 1)
        made = cls(n_atoms, check_k(k, n_atoms), **{**recipe_params(name, n_atoms, k), **changes})
        made._recipe = name
        return made

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        shown = str(super().__repr__(N_CHAR_MAX))
        return shown if self._recipe is None else f"{shown}  # recipe {self._recipe!r}"

    def __sklearn_clone__(self) -> DBKSVD:
        """Return an unfitted copy, as `sklearn.base.clone` makes it, of the same recipe."""
        made = type(self)(**{name: clone(value, safe=False) for name, value in self.get_params(False).items()})
        made._recipe = self._recipe
        return made

    # ------------------------------------------------------------------------------------------ fitting

    def _params(self) -> FitParams:
        """Check this estimator's parameters."""
        check_choice("output", self.output, OUTPUTS)
        values = {name: getattr(self, name) for name in _PARAMS}
        values["init"] = self.init if _is_rule(self.init) else "array"
        if not _is_count(self.validation):
            values["validation"] = 0
        return FitParams.checked(**values)

    def _trainer(
        self, Y: Any, held: Any = None, params: FitParams | None = None, seen: Sequence[Callback] | None = None
    ) -> Trainer:
        from dbksvd_dask.fit.trainer import Trainer

        params = params or self._params()
        source = as_source(Y, params.chunk_size)
        init = None if _is_rule(self.init) else _first_atoms(self.init)
        validation = None
        if not _is_count(self.validation) and held is None:
            validation = as_source(self.validation, params.chunk_size)
            check_width(validation, source.n_features, "validation")
        limit = None if self.memory_limit is None else parse_bytes(self.memory_limit)
        seen = self.callbacks if seen is None else seen
        return Trainer(source, params, init, validation, seen, limit, self._recipe)

    def plan(self, Y: Any) -> MemoryPlan:
        """Peak memory per worker process that `fit` would take on the current scheduler; nothing is computed.

        Parameters
        ----------
        Y : as in `fit`
        """
        return self._trainer(Y).memory_plan()

    def fit(self, Y: Any, y: Any = None, *, resume: bool = False) -> DBKSVD:
        """Learn a dictionary.

        Parameters
        ----------
        Y : ndarray, dask array, xarray.DataArray or path/URL of a Zarr store, (n_samples, n_features)
        y : ignored
        resume : continue from the newest checkpoint in the folder `checkpoint`, if there is one
        """
        return self._fit(Y, resume=resume)

    def _fit(self, Y: Any, *, resume: bool = False, replace: bool = False) -> DBKSVD:
        """Learn a dictionary, in place of the fit in the folder `checkpoint` if that is asked for."""
        from dbksvd_dask.codes import feature_coords
        from dbksvd_dask.progress import with_view

        folder = None if self.checkpoint is None else run_folder(self.checkpoint)
        trainer = self._trainer(Y, seen=with_view(self.callbacks, self.verbose))
        every = check_integer("checkpoint_every", self.checkpoint_every, 1)
        return self._publish(trainer.fit(folder, every, resume, replace), feature_coords(Y))

    def _check(self, Y: Any, *, resume: bool = False, replace: bool = False) -> None:
        """Refuse what `_fit` would refuse, without reading a sample: before a cluster is started or waited for."""
        folder = None if self.checkpoint is None else run_folder(self.checkpoint)
        check_integer("checkpoint_every", self.checkpoint_every, 1)
        self._trainer(Y, seen=()).check(folder, resume, replace)

    def partial_fit(self, Y: Any, y: Any = None) -> DBKSVD:
        """Update the dictionary on one batch, all of whose samples are used at once.

        The first call sets the mean and the first dictionary, unless `fit` or `load` did. With `whiten`, one of
        them must have: a single batch does not tell the covariance.

        Parameters
        ----------
        Y : as in `fit`; one outer batch
        """
        from dbksvd_dask.codes import feature_coords
        from dbksvd_dask.fit.single import batch_params

        state: Dictionary | None = getattr(self, "_fitted", None)
        params = batch_params(self._params(), state)
        source = as_source(Y, params.chunk_size)
        if state is not None:
            check_width(source, state.n_features, "Y")
        trainer = self._trainer(source, 0, params)
        if state is None:
            state = trainer.start()
        state = trainer.step(state, np.arange(source.n_samples, dtype=np.int64))
        return self._publish(state, feature_coords(Y))

    def _publish(self, fitted: Dictionary, coords: dict[str, Any]) -> DBKSVD:
        """Set the fitted attributes; `coords` are those of the features."""
        self._fitted = fitted
        self.components_ = np.array(fitted.atoms)
        self.dictionary_ = xr.DataArray(
            self.components_, dims=("atom", "feature"), coords=coords, name="dictionary"
        )
        self.mean_ = np.zeros(fitted.n_features) if fitted.mean is None else np.array(fitted.mean)
        self.history_ = history_dataset(fitted.history)
        self.n_iter_ = fitted.iteration
        self.threshold_ = fitted.threshold
        self.n_features_in_ = fitted.n_features
        return self

    # ------------------------------------------------------------------------------------------ using

    def to_dictionary(self) -> Dictionary:
        """Return what was fitted as a `Dictionary`, as `open_dictionary` returns that of a run.

        Parameters that decide how samples are encoded are those of the estimator as it is now.
        """
        check_is_fitted(self, "components_")
        params = self._params().to_json()
        decisive = {name: params[name] for name in DECISIVE}
        return replace(self._fitted, params=self._fitted.params | decisive)

    def save(self, path: PathLike, *, overwrite: bool = False) -> str:
        """Write the fitted dictionary to a folder, from which `load` and `open_dictionary` read it.

        Parameters
        ----------
        path : folder or fsspec URL to write
        overwrite : replace the dictionary that is there

        Returns
        -------
        str
            Path of the folder.

        Examples
        --------
        >>> import os, tempfile
        >>> import numpy as np
        >>> from dbksvd_dask import DBKSVD, encode
        >>> Y = np.random.default_rng(0).standard_normal((500, 16)).astype("float32")
        >>> model = DBKSVD(n_atoms=32, k=4, n_iter=3).fit(Y)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = model.save(os.path.join(folder, "dictionary.zarr"))
        ...     again = DBKSVD.load(path)
        ...     codes = encode(Y, path)
        >>> again.k, again.n_iter_
        (4, 3)
        >>> bool((again.transform(Y) == model.transform(Y)).to_array().all())
        True
        >>> bool((codes == model.transform(Y)).to_array().all())
        True
        """
        return save_dictionary(path, self.to_dictionary(), overwrite=overwrite)

    @classmethod
    def load(cls, path: PathLike) -> DBKSVD:
        """Open a dictionary, or the newest checkpoint of a run, as a fitted estimator.

        It encodes as the one that was fitted, and `partial_fit` continues from it. Names of features and what is
        not stored with a dictionary (callbacks, checkpoint, memory_limit, output) are those of a new estimator.

        Parameters
        ----------
        path : folder that `save` wrote, or the folder of a fit

        Examples
        --------
        See `save`.
        """
        stored = open_dictionary(path)
        params = {"n_atoms": stored.n_atoms} | {n: v for n, v in stored.params.items() if n in _PARAMS}
        if "k" not in params:
            raise InputError(
                f"{os.fspath(path)} does not say how many nonzeros a sample has; use encode(Y, path, k=...)"
            )
        checked = FitParams.checked(**params)
        values = {name: getattr(checked, name) for name in params}
        if checked.init == "array":
            values["init"] = stored.atoms  # the first atoms are not kept: fitted again, it starts from these
        model = cls(**values)._publish(stored, {})
        model._recipe = stored.recipe
        return model

    def _encode_plan(self) -> EncodePlan:
        return placed_plan(self.to_dictionary(), self.device, self.chunk_size)

    def _checked_source(self, Y: Any) -> Source:
        check_is_fitted(self, "components_")
        source = as_source(Y, self.chunk_size)
        check_width(source, self.components_.shape[1], "Y")
        return source

    def transform(self, Y: Any) -> Any:
        """Encode samples.

        Parameters
        ----------
        Y : ndarray, dask array, xarray.DataArray or path/URL of a Zarr store, (n_samples, n_features)

        Returns
        -------
        Dataset with `atom` (int32, -1 where empty) and `coefficient` over (`sample`, `slot`); Dask-backed for
        lazy input, with the coordinates of the samples of a labelled one. With ``output="sparse"``, a csr array of
        shape (n_samples, n_atoms).
        """
        from dbksvd_dask.codes import codes_to_csr, label_codes

        source = self._checked_source(Y)
        codes = label_codes(encode_source(source, self.components_, self._encode_plan()), Y)
        return codes_to_csr(codes) if self.output == "sparse" else codes

    def inverse_transform(self, codes: Any) -> Any:
        """Samples from codes.

        Parameters
        ----------
        codes : what `transform` gave: a Dataset, or a csr array of shape (n_samples, n_atoms)

        Returns
        -------
        ndarray (or Dask array for lazy codes) of shape (n_samples, n_features); a DataArray over (`sample`,
        `feature`) with their coordinates if the samples were labelled
        """
        from dbksvd_dask.codes import decode, decode_csr, label_samples

        check_is_fitted(self, "components_")
        D, mean = self.components_, self._fitted.mean
        if sp.issparse(codes):
            return decode_csr(codes, D, mean)
        return label_samples(decode(codes, D, mean), codes, self.dictionary_)

    @available_if(lambda self: self.output == "sparse")  # type: ignore[untyped-decorator]
    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the columns of a csr array: "atom0", "atom1", and so on."""
        check_is_fitted(self, "components_")
        return np.array([f"atom{j}" for j in range(self.components_.shape[0])], dtype=object)

    def score(self, Y: Any, y: Any = None) -> float:
        """Variance explained of the samples by their codes, mean over features."""
        import dask

        from dbksvd_dask.evaluate.metrics import variance_explained
        from dbksvd_dask.graph.encode import build_evaluation

        source = self._checked_source(Y)
        rows = np.arange(source.n_samples, dtype=np.int64)
        size = units.part_rows(source.n_samples, self.chunk_size)
        graph = build_evaluation(source, rows, self.components_, self._encode_plan(), size)
        ((moments, _),) = dask.compute(graph)
        return variance_explained(moments).value

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "components_")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """What a notebook shows: scikit-learn's diagram of the parameters and, once fitted, how far it came."""
        shown: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        if "text/html" in shown and hasattr(self, "components_"):
            shown["text/html"] += fit_html(self._fitted)
        return shown


def history_dataset(history: History) -> xr.Dataset:
    """History of a fit as a Dataset over `iteration`."""
    n = max((len(values) for values in history.values()), default=0)
    variables = {name: ("iteration", np.asarray(values)) for name, values in history.items()}
    return xr.Dataset(variables, coords={"iteration": np.arange(n)})


def _is_rule(init: Any) -> bool:
    """Whether the first dictionary follows from a rule, rather than being given."""
    return isinstance(init, str) and init in INIT_RULES


def _first_atoms(init: Any) -> np.ndarray:
    """Read a given first dictionary: (n_atoms, n_features)."""
    if not isinstance(init, str | os.PathLike):
        return plain_array(init)
    if not paths.exists(init):
        raise InputError(
            f"init={os.fspath(init)!r} is not known; use 'uniform', 'data', or the path of a dictionary or of the "
            "folder of a fit"
        )
    from dbksvd_dask.export.foreign import load_foreign  # rarely needed, and slow to import

    return load_foreign(init).atoms  # one of another tool is transposed and normalised as needed


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


__all__ = ["DBKSVD", "history_dataset"]
