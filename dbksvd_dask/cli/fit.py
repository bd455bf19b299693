"""`dbksvd fit`: a dictionary from a store."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from dbksvd_dask import _words
from dbksvd_dask.cli import options, output
from dbksvd_dask.cli.output import watching
from dbksvd_dask.cli.sections import FIT, SectionedCommand
from dbksvd_dask.cli.translate import in_options
from dbksvd_dask.plan.params import FitParams, check_integer, check_k
from dbksvd_dask.plan.recipes import recipe_params
from dbksvd_dask.plan.stopping import WORTH_A_WORD, settled_since

# every parameter of DBKSVD but `checkpoint`, which is RUN, `callbacks` and `verbose`; a test compares
PARAMETERS: dict[str, Any] = {
    "n_atoms": None,
    "k": None,
    **{field.name: field.default for field in fields(FitParams) if field.name not in ("n_atoms", "k")},
    "checkpoint_every": 1,
    "memory_limit": None,
}


@click.command("fit", cls=SectionedCommand, sections=FIT, epilog=options.recipes_help())
@click.argument("store", metavar="STORE", type=click.Path())
@click.argument("run", metavar="RUN", type=click.Path())
@options.recipe_option
@options.parameter_options(PARAMETERS)
@click.option("--resume", is_flag=True, help="Continue the fit in RUN. Options default to those of the run.")
@output.log_option
@click.option("--track", metavar="TOOL:PROJECT", help="Also send the history to trackio, wandb or tensorboard.")
@options.scheduler_options
@click.option("--force", is_flag=True, help="Discard the fit in RUN and start over.")
@output.plan_option
@options.plan_workers_option
@output.json_option
@click.pass_context
def command(ctx: click.Context, /, store: str, run: str, as_json: bool, show_plan: bool, **given: Any) -> None:
    """Learn a dictionary from the samples of STORE, into the folder RUN.

    STORE is what `dbksvd import` or `dbksvd shuffle` wrote, or any Zarr group with a 2-D array `activations`. RUN
    holds the newest two checkpoints; pass it wherever a dictionary is expected. --n-atoms and --k are required;
    everything else has a default. An interrupted fit continues with --resume, to the same dictionary bit for bit;
    --resume with a larger --n-iter extends a fit.

    \b
    dbksvd fit store.zarr run --recipe read --n-atoms 4096 --k 32             # atoms to look at
    dbksvd fit store.zarr run --recipe reconstruct --n-atoms 4096 --k 32      # least error
    dbksvd fit store.zarr run --n-atoms 4096 --k 32 --plan
    dbksvd fit store.zarr run --resume --n-iter 80
    dbksvd fit store.zarr run --n-atoms 16384 --k 64 --scheduler tcp://head:8786 --log run.jsonl
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask.store.runs import run_folder

    where, follow = options.connection(given), (given.pop("log"), given.pop("track"))
    resume, force, recipe = given.pop("resume"), given.pop("force"), given.pop("recipe")
    grid = given.pop("plan_workers")
    options.require_order("fit", store, run)
    run = run_folder(run)
    store = options.seen_by_workers(store, where)
    params = _parameters(ctx, run, given, resume, recipe)
    if show_plan or grid is not None:
        output.report(_plan(store, params, recipe, where, grid), as_json)
        return
    output.report(*_fit(store, run, params, recipe, resume, force, where, follow, as_json))
    output.next_step("encode", store, run, "codes.zarr", as_json=as_json)


def _parameters(
    ctx: click.Context, run: str, given: dict[str, Any], resume: bool, recipe: str | None
) -> dict[str, Any]:
    """Give the parameters of the fit: as given, else of the recipe, of the run that resumes, or the defaults."""
    params = dict(given)
    if resume:
        params |= {name: value for name, value in _stored(run).items() if not _was_given(ctx, name)}
    for name in ("n_atoms", "k"):
        if params[name] is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'.", ctx)
    if recipe is not None:
        n_atoms = check_integer("n_atoms", params["n_atoms"], 1)
        values = recipe_params(recipe, n_atoms, check_k(params["k"], n_atoms))
        params |= {name: value for name, value in values.items() if not _was_given(ctx, name)}
    params["validation"] = options.read_validation(params["validation"])
    return params


def _was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT


def _stored(run: str) -> dict[str, Any]:
    """Parameters of the fit in a folder; none when there is no fit yet."""
    from dbksvd_dask.store.runs import latest_checkpoint, readable_checkpoint

    if latest_checkpoint(run) is None:
        return {}
    _, found, _ = readable_checkpoint(run)  # the fit tells which are damaged
    stored = {name: value for name, value in found.params.items() if name in PARAMETERS}
    if stored.get("init") == "array":
        stored["init"] = found.atoms  # only its being an array counts: the fit continues from the checkpoint
    return stored


def _fit(
    store: str,
    run: str,
    params: dict[str, Any],
    recipe: str | None,
    resume: bool,
    force: bool,
    where: dict[str, Any],
    follow: tuple[str | None, str | None],
    as_json: bool,
) -> tuple[dict[str, Any], bool, str]:
    """Run the fit; what to report."""
    from dbksvd_dask import cluster
    from dbksvd_dask.store.reader import open_rows

    open_rows(store)  # a missing store needs no cluster
    if options.is_elsewhere(where):
        with options.quietly():
            model = _model(recipe, **params, checkpoint=run)
            model._check(store, resume=resume, replace=force and not resume)
    began = time.perf_counter()
    with cluster.connect(**where), watching(as_json, *follow) as callbacks:
        model = _model(recipe, **params, checkpoint=run, callbacks=callbacks)
        model._fit(store, resume=resume, replace=force and not resume)
    seconds = time.perf_counter() - began
    last = _words.plain({name: float(values[-1]) for name, values in model.history_.items()})
    result = {"path": run, "n_iter": model.n_iter_, "n_atoms": model.n_atoms, "k": model.k, "seconds": seconds}
    return result | {"last": last}, as_json, _describe(run, model, last, seconds)


def _model(recipe: str | None, **params: Any) -> Any:
    """Make the estimator; all of its parameters are given, the recipe is a name to store."""
    from dbksvd_dask.model import DBKSVD

    return DBKSVD(**params) if recipe is None else DBKSVD.recipe(recipe, **params)


def _describe(run: str, model: Any, last: dict[str, float | None], seconds: float) -> str:
    """One line for people: of the held-out samples if there are any, otherwise of the last batch."""
    held = last.get("validation_relative_error") is not None
    figures = [
        f"{label} {last[name]:.4f}"
        for label, name in (
            *(
                ()
                if held
                else ((f"relative error{' of whitened samples' * (model.whiten > 0)}", "relative_error"),)
            ),
            ("held-out relative error", "validation_relative_error"),
            ("held-out variance explained", "validation_variance_explained"),
        )
        if last.get(name) is not None
    ]
    done = f"{model.n_iter_} iteration{'s' * (model.n_iter_ != 1)} in {_words.format_seconds(seconds)}"
    told = f"; {', '.join(figures)}" if figures else ""  # samples that are all alike have no error
    return f"{run}: {model.n_atoms} atoms, k={model.k}, {done}{told}{_settled(model)}"


def _settled(model: Any) -> str:
    """Say since when little has changed; nothing of a fit whose error was still falling."""
    params = model._params()
    history = {name: values.values.tolist() for name, values in model.history_.items()}
    since = settled_since(params, history)
    if 0 < since <= model.n_iter_ - min(WORTH_A_WORD, params.patience or WORTH_A_WORD):
        stopped = f"; stopped before iteration {params.n_iter}" if model.n_iter_ < params.n_iter else ""
        return f"{stopped}; little has changed since iteration {since}"
    return ""


def _plan(
    store: str, params: dict[str, Any], recipe: str | None, where: dict[str, Any], grid: tuple[int, int] | None
) -> dict[str, Any]:
    """What the fit would take: here, on the running cluster, or on one of `grid` = (workers, threads of each)."""
    from dbksvd_dask.fit.start import MEAN_ROWS
    from dbksvd_dask.fit.task_plan import plan_tasks
    from dbksvd_dask.graph.run import worker_threads
    from dbksvd_dask.jobs.estimate import FitWork
    from dbksvd_dask.plan.screening import n_passes, uses_gram
    from dbksvd_dask.store.reader import open_rows

    reader = open_rows(store)
    with options.planned_at(where, grid) as elsewhere:
        trainer = _model(recipe, **params)._trainer(store)
        planned, threads = trainer.memory_plan(), list(worker_threads().values())
        tasks = plan_tasks(trainer.context, worker_threads() if grid or where["workers"] else None)
    p, stream, width = trainer.params, trainer.stream, reader.n_features
    gram = uses_gram(p.gram, p.encoder, p.n_atoms)
    first = min(stream.n_train, MEAN_ROWS)
    work = FitWork(
        n_features=width,
        n_atoms=p.n_atoms,
        n_iter=p.n_iter,
        trained=stream.rows_before(p.n_iter),
        held=int(trainer.held_out.rows.size),
        mean_rows=first * (p.center and not trainer.policy.learns_mean),
        covariance_rows=first * (p.whiten > 0),
        stored_itemsize=reader.stored.itemsize,
        passes=1 if gram else n_passes(p.slots, p.n_atoms),
        gram=gram,
    )
    return {
        "store": reader.path,
        "rows": reader.n_samples,
        "features": width,
        "atoms": p.n_atoms,
        "k": p.k,
        "recipe": recipe,
        "parameters": {name: value for name, value in p.to_json().items() if name not in ("n_atoms", "k")},
        "iterations": p.n_iter,
        "batch_rows": stream.rows_per_batch,
        "workers": tasks.workers,
        "threads": tasks.threads,
        "chunks_per_batch": tasks.chunks,
        "tasks_per_batch": tasks.tasks,
        "tasks_per_worker": tasks.tasks_per_worker,
        "advice": in_options(tasks.advice, command) or None,
        "passes": work.trained / stream.n_train,
        "validation_rows": work.held,
        "read_bytes": work.read_bytes,
        "written_bytes": 2 * p.n_atoms * width * trainer.dtype.itemsize,
        "gram_bytes": gram * p.n_atoms**2 * trainer.dtype.itemsize,
        "products_per_sample": work.passes,
        "memory_bytes": planned.total,
        "memory": planned.describe(),
        **(
            _on_cluster(work, trainer, reader, threads, tasks)
            if elsewhere
            else _on_this_machine(work, trainer, reader)
        ),
    }


def _on_this_machine(work: Any, trainer: Any, reader: Any) -> dict[str, Any]:
    """Estimate the time of a fit on the cores of this machine."""
    from dbksvd_dask.jobs.estimate import START_UP, fit_seconds

    return {
        "estimated_seconds": fit_seconds(work, reader, trainer.dtype),
        "estimated_for": "the cores of this machine",
        "not_estimated": START_UP,
    }


def _on_cluster(work: Any, trainer: Any, reader: Any, threads: list[int], tasks: Any) -> dict[str, Any]:
    """Estimate the time of a fit on workers with these threads, and what they send each other."""
    from dask.system import CPU_COUNT

    from dbksvd_dask.jobs import estimate

    p = trainer.params
    workers = estimate.Workers(len(threads), sum(threads) // len(threads))
    atom_bytes = work.n_features * trainer.dtype.itemsize
    batch = estimate.BatchShape(tasks.chunks, p.n_rounds, p.lanczos_steps, atom_bytes, tasks.tasks)
    speed = estimate.product_speed(work.n_features, p.n_atoms, trainer.dtype) / CPU_COUNT
    spent = estimate.cluster_seconds(work, batch, workers, speed, estimate.read_speed(reader))
    return {
        "received_bytes": p.n_iter * estimate.moved_bytes(work, batch, workers),
        "estimated_seconds": sum(spent.values()),
        "estimated_parts": ", ".join(f"{name} {_words.format_seconds(value)}" for name, value in spent.items()),
        "estimated_for": estimate.ASSUMED,
        "not_estimated": estimate.START_UP,
    }
