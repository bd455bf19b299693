"""Options made from the parameters of the library, so that the two cannot drift apart."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.dead_atoms import DEAD_ATOM_RULES
from dbksvd_dask.plan.encoders import ENCODERS
from dbksvd_dask.plan.params import _CHOICES, FitParams
from dbksvd_dask.plan.recipes import RECIPES, unknown_recipe

F = TypeVar("F", bound=Callable[..., Any])

CHOICES = {name: choices for name, choices in _CHOICES.items() if name != "init"}

# a test asks for one per parameter
HELP = {
    "n_atoms": "Number of atoms.",
    "k": "Maximum number of nonzeros per sample.",
    "batch_size": "Samples of one outer batch.",
    "n_iter": "Outer batches; the store is reused when exhausted. Default: 40, or what --growth takes.",
    "n_rounds": "Rounds of one dictionary update. Default: 8, or more with few samples per atom.",
    "lanczos_steps": "Passes over the residual per round. Default: 2, or 1 with few samples per atom.",
    "groups": "Matryoshka groups: sizes such as 64,64,128, or 'exponential'.",
    "encoder": "; ".join(f"{name}: {encoder.meaning}" for name, encoder in ENCODERS.items()) + ".",
    "nonneg": "Allow non-negative coefficients only.",
    "refit": "Least squares on the support that the pursuit found.",
    "min_coefficient": "Stop a pursuit when the next coefficient is below this.",
    "rtol": "Stop a pursuit when the residual falls to this fraction of the sample's norm.",
    "center": "Subtract the mean from every sample.",
    "init": "First dictionary: 'data' (samples), 'uniform' (random), a dictionary, a run, or another tool's.",
    "dead_atoms": "Replacement for an atom that no sample of a batch used; "
    + "; ".join(f"{name}: {rule.meaning}" for name, rule in DEAD_ATOM_RULES.items())
    + ".",
    "chunk_size": "Samples per task.",
    "validation": "Samples held out for validation, or a store of their own.",
    "device": "Where the heavy work runs.",
    "seed": "Seed of all random choices.",
    "momentum": "Fraction of its last change by which an atom is extrapolated before a batch; 0 for none.",
    "warm_up": "Begin with small batches and double them every other iteration up to --batch-size.",
    "encode": "Encode with one pursuit over all atoms, or group by group.",
    "gram": "Form the gram of the dictionary, n_atoms x n_atoms, to encode; auto: up to 16,384 atoms.",
    "sparsity": "Meaning of --k: the maximum number of nonzeros per sample (default), or the mean.",
    "max_nonzeros": "With --sparsity mean, the maximum number of nonzeros per sample. Default: 3 k.",
    "growth": "Grow the dictionary from few atoms by this factor, such as 1.5.",
    "growth_threshold": "While growing, stop a pursuit below this multiple of the coefficient expected by chance.",
    "frequency_prior": "Growing dictionaries: require larger coefficients of atoms that few samples use.",
    "whiten": "Fit and encode in coordinates in which directions vary more alike: 0 for none, 1 for full; "
    "0.5 is best for language models.",
    "patience": "Stop early once the held-out error has not fallen by 0.1 % for this many iterations.",
    "memory_limit": "Refuse a fit planned to take more memory per process, such as 4GB.",
    "checkpoint_every": "Iterations between two checkpoints.",
}


class Groups(click.ParamType):  # type: ignore[type-arg]
    """Sizes of Matryoshka groups, or the word 'exponential'."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read sizes."""
        if not isinstance(value, str) or value == "exponential":
            return value
        try:
            return tuple(int(size) for size in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not 'exponential' or sizes such as 64,64,128", param, ctx)


def array_part(environment: Mapping[str, str]) -> tuple[int, int]:
    """Find the part of an array job in its environment.

    Any range of tasks works: a later, shorter array finishes the remaining work.

    >>> array_part({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "64"})
    (3, 64)
    >>> array_part({"JOB_COMPLETION_INDEX": "2", "N_PARTS": "64"})
    (3, 64)
    """
    try:
        if "SLURM_ARRAY_TASK_ID" in environment:
            task, first, last = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "MAX"))
            return task - first + 1, last - first + 1
        # Kubernetes counts from 0 and does not say how many there are
        return int(environment["JOB_COMPLETION_INDEX"]) + 1, int(environment["N_PARTS"])
    except KeyError as error:
        raise InputError(
            f"--part auto needs {error} in the environment; it is for array jobs of SLURM and indexed jobs of "
            "Kubernetes (set N_PARTS in the pod's env); otherwise write --part 3/64"
        ) from error


class Part(click.ParamType):  # type: ignore[type-arg]
    """One part of several, such as 3/8; or 'auto', in an array job."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a part."""
        if not isinstance(value, str):
            return value
        if value == "auto":
            return array_part(os.environ)
        i, slash, n = value.partition("/")
        if not (slash and i.isdigit() and n.isdigit()):
            self.fail(f"{value!r} is not a part; write 3/8 for the third of eight, or auto", param, ctx)
        return int(i), int(n)


def part_option(function: F) -> F:
    """Add --part: one share of a job."""
    text = "Do one part, such as 3/8. The last part to end publishes the result. auto: the part of this array job."
    return click.option("--part", type=Part(), default=None, help=text)(function)


class WorkerGrid(click.ParamType):  # type: ignore[type-arg]
    """Workers and threads of each, such as 16x8."""

    name = "WxT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the two numbers."""
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", value)
        if found is None:
            self.fail(f"{value!r} is not a cluster; write 16x8 for 16 workers with 8 threads each", param, ctx)
        return int(found[1]), int(found[2])


class RecipeName(click.ParamType):  # type: ignore[type-arg]
    """Name of a recipe."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check a name."""
        if value not in RECIPES:
            self.fail(f"{value!r} {unknown_recipe(value)}", param, ctx)
        return str(value)


def recipe_option(function: F) -> F:
    """Add --recipe: the parameters for one purpose."""
    text = f"Parameters for one purpose: {', '.join(RECIPES)} (see below). Explicit options override it."
    return click.option("--recipe", type=RecipeName(), help=text)(function)


def recipes_help() -> str:
    """List the recipes below the options of a command."""
    lines = [f"  {name:<12} {recipe.purpose}" for name, recipe in RECIPES.items()]
    return "\b\n" + "\n".join(["Recipes (--plan shows their parameters):", *lines])


def parameter_options(defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Give a command one option per parameter, of the same name and default.

    Parameters
    ----------
    defaults : parameter -> default, in the order in which the help lists them
    """

    def decorate(function: F) -> F:
        for name, default in reversed(list(defaults.items())):
            function = _option(name, default)(function)
        return function

    return decorate


def _option(name: str, default: Any) -> Callable[[F], F]:
    flag, text = "--" + name.replace("_", "-"), HELP.get(name)
    hint = str(FitParams.__annotations__.get(name, type(default).__name__))
    if "bool" in hint:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=default, show_default=True, help=text)
    kind: Any = {"groups": Groups(), "init": str, "validation": str, "memory_limit": str}.get(name)
    if name in CHOICES:
        kind = click.Choice(CHOICES[name])
    elif kind is None:
        kind = float if "float" in hint else int
    shown = default is not None
    return click.option(flag, name, type=kind, default=default, show_default=shown, help=text)


_WORKERS = [
    click.option("--workers", type=click.IntRange(1), help="Start this many worker processes here."),
    click.option("--scheduler", metavar="ADDRESS", help="Use a running Dask cluster: tcp://host:8786."),
    click.option("--wait-for", type=click.IntRange(1), metavar="N", help="Start once the cluster has N workers."),
]
_THREADS = [click.option("--threads", type=click.IntRange(1), help="Threads of this process, or of each worker.")]
_TLS = [
    click.option("--tls-ca", type=click.Path(), help="Certificate of the cluster's authority (PEM)."),
    click.option("--tls-cert", type=click.Path(), help="Certificate of this client (PEM)."),
    click.option("--tls-key", type=click.Path(), help="Key of this client, if in a separate file (PEM)."),
]


def scheduler_options(function: F) -> F:
    """Add the options that say where a command runs; see `cluster.connect`."""
    for option in reversed([*_WORKERS, *_THREADS, *_TLS]):
        function = option(function)
    return function


def worker_options(function: F) -> F:
    """Add the options that let workers do a job which otherwise needs no Dask."""
    for option in reversed([*_WORKERS, *_TLS]):
        function = option(function)
    return function


def workers_of(options: dict[str, Any]) -> AbstractContextManager[Any] | None:
    """Take the `worker_options` out of a command's options; return what uses the workers for a block, if any."""
    names = ("workers", "scheduler", "wait_for", "tls_ca", "tls_cert", "tls_key")
    given = {name: options.pop(name) for name in names}
    if all(value is None for value in given.values()):
        return None  # without loading Dask
    from dbksvd_dask import cluster

    return cluster.connect(**connection({**given, "threads": None}))


def connection(options: dict[str, Any]) -> dict[str, Any]:
    """Take the scheduler options out of a command's options, as `cluster.connect` wants them."""
    import dask

    from dbksvd_dask.cluster import TLSFiles

    if logging.getLogger().level > logging.INFO:  # workers that come and leave are logged only with -v
        dask.config.set({"logging.distributed": "warning"})

    ca, cert, key = (options.pop(f"tls_{name}") for name in ("ca", "cert", "key"))
    if (ca is None) != (cert is None) or (key is not None and ca is None):
        raise InputError(
            "a tls:// scheduler needs both --tls-ca and --tls-cert (and --tls-key for a separate key)"
        )
    where: dict[str, Any] = {name: options.pop(name) for name in ("workers", "scheduler", "threads", "wait_for")}
    return where | {"tls": None if ca is None else TLSFiles(ca, cert, key)}


def is_elsewhere(where: Mapping[str, Any]) -> bool:
    """Return whether a command runs on other processes: whatever it refuses, it refuses before they are there."""
    return where["workers"] is not None or where["scheduler"] is not None


def plan_workers_option(function: F) -> F:
    """Add --plan-workers: a cluster to plan for."""
    text = "Plan for a cluster that is not running yet: 16x8."
    return click.option("--plan-workers", type=WorkerGrid(), help=text)(function)


@contextlib.contextmanager
def planned_at(where: Mapping[str, Any], grid: tuple[int, int] | None) -> Iterator[bool]:
    """Plan for where a command would run, starting no workers; give whether that is a cluster.

    Parameters
    ----------
    where : from `connection`
    grid : workers and threads of each, of a cluster that is not running
    """
    from dask.system import CPU_COUNT

    from dbksvd_dask import cluster
    from dbksvd_dask.graph.run import planned_workers, worker_threads

    if grid is None and where["workers"] is not None:
        grid = where["workers"], where["threads"] or max(1, CPU_COUNT // where["workers"])
    here = {**where, "workers": None, "wait_for": None} if grid else where
    with cluster.connect(**here), planned_workers(*grid) if grid else contextlib.nullcontext():
        if not worker_threads():
            raise InputError(
                f"{where['scheduler']} has no workers yet; start some with `dask worker {where['scheduler']}`, "
                "wait for N of them with --wait-for N, or plan without them: --plan-workers 16x8"
            )
        yield grid is not None or where["scheduler"] is not None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep warnings of a check to itself: the work that follows gives them again."""
    logger = logging.getLogger("dbksvd_dask")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def seen_by_workers(path: str, where: Mapping[str, Any]) -> str:
    """Give a path as other processes, in other folders, find it."""
    return os.path.abspath(path) if is_elsewhere(where) and "://" not in path else path


def require_order(command: str, store: str, run: str) -> None:
    """Refuse STORE and RUN that were given the other way round; only local paths are looked at.

    Parameters
    ----------
    command : such as "fit"; for the line to type
    """
    if "://" in run or "://" in store:
        return
    if _is_store(run) and not _is_store(store):
        raise InputError(
            f"{run} is a store and {store} is not: STORE comes before RUN; type `dbksvd {command} {run} {store}`"
        )


def _is_store(path: str) -> bool:
    from dbksvd_dask.errors import DBKSVDError
    from dbksvd_dask.store.reader import open_rows

    try:
        open_rows(path)
    except (DBKSVDError, OSError):
        return False
    return True


def read_validation(value: str) -> Any:
    """Turn what --validation says into what `DBKSVD(validation=...)` takes: a count, or a store."""
    text = str(value)
    if text.lstrip("-").isdigit():
        return int(text)
    if "://" not in text and not os.path.exists(text):
        raise InputError(f"--validation {text} is neither a number of samples nor an existing store")
    return text


def text_options(function: F) -> F:
    """Add the options that say how texts are read and cut into windows."""
    for option in reversed(
        [
            click.option("--column", help="Column of the texts in a table.  [default: text, prompt, ...]"),
            click.option("--lines", is_flag=True, help="Treat every line of a .txt file as a separate text."),
            click.option("--context", type=click.IntRange(1), default=256, show_default=True, help=_CONTEXT),
            click.option(
                "--bos", type=click.Choice(["drop", "keep", "none"]), default="drop", show_default=True, help=_BOS
            ),
            click.option(
                "--long", type=click.Choice(["split", "cut"]), default="split", show_default=True, help=_LONG
            ),
        ]
    ):
        function = option(function)
    return function


_CONTEXT = "Maximum number of tokens per window, including the start token."
_BOS = "Start token of a window: drop its row, keep it, or add no start token."
_LONG = "Texts longer than a window: split them, or keep only the first window."


def model_options(function: F) -> F:
    """Add the options that say how a language model runs."""
    kinds = ["float32", "bfloat16", "float16", "auto"]
    for option in reversed(
        [
            click.option(
                "--batch-tokens",
                type=click.IntRange(1),
                default=2048,
                show_default=True,
                help="Maximum number of tokens per forward pass.",
            ),
            click.option(
                "--model-dtype",
                type=click.Choice(kinds),
                default="float32",
                show_default=True,
                help="Data type in which the model computes.",
            ),
            click.option("--device", default="cpu", show_default=True, help="Device of the model, such as cuda."),
        ]
    ):
        function = option(function)
    return function
