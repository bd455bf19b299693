"""TopK SAE and Matryoshka SAE in torch; the learning rate is chosen among several, outside the clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.peer_base import Recorder, mean_norm, run
from dbksvd_dask.evaluate.metrics import variance_explained
from dbksvd_dask.kernels.moments import moments
from dbksvd_dask.plan.groups import exponential_groups

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def train(
    recorder: Recorder,
    learning_rate: float,
    groups: Sequence[int] | None = None,
) -> None:
    """Train with one learning rate until the time is up."""
    import torch

    from benchmarks.sae_torch import TopKSAE, train_sae

    torch.set_num_threads(1)
    problem = recorder.problem
    scale = np.sqrt(problem.train.shape[1]) / mean_norm(problem.train)

    def own_encoder(sae: TopKSAE) -> float:
        """Held-out variance explained by the autoencoder itself, no pursuit."""
        with torch.no_grad():
            y = torch.from_numpy(problem.test * np.float32(scale))
            _, values, latents = sae.encode(y)
            rebuilt = sae.decode(values, latents)
            return variance_explained(moments(y.numpy(), (y - rebuilt).numpy())).value

    def after_step(sae: TopKSAE, seen: int) -> None:
        def atoms() -> np.ndarray:
            recorder.notes["ve_own_encoder"] = own_encoder(sae)
            return sae.decoder.detach().numpy()

        recorder.show(atoms, seen)

    train_sae(
        problem.train * np.float32(scale),
        problem.n_atoms,
        problem.k,
        learning_rate,
        after_step,
        groups,
        seed=problem.seed,
    )


def tuned(recorder: Recorder, matryoshka: bool) -> None:
    """Train once with every learning rate for the whole time, and keep the run that ends best.

    Short trials would favour large rates, which are ahead at first and behind later; so the choice costs four
    times the seconds that are reported, in favour of the autoencoder.
    """
    groups = exponential_groups(recorder.problem.n_atoms) if matryoshka else None
    recorder.clock.stop()
    trials = {
        rate: run(partial(train, learning_rate=rate, groups=groups), recorder.problem, recorder.budget)
        for rate in LEARNING_RATES
    }
    best = max(trials, key=lambda rate: trials[rate].points[-1]["ve_omp"])
    kept = trials[best]
    recorder.points, recorder.clock, recorder.latest = kept.points, kept.clock, kept.latest
    ends = {str(rate): trial.points[-1]["ve_omp"] for rate, trial in trials.items()}
    recorder.notes |= kept.notes | {"learning_rates_ve_omp": ends, "learning_rate": best}


def topk(recorder: Recorder) -> None:
    """TopK SAE."""
    tuned(recorder, matryoshka=False)


def matryoshka(recorder: Recorder) -> None:
    """Matryoshka SAE, with the groups of Matryoshka DB-KSVD."""
    tuned(recorder, matryoshka=True)
