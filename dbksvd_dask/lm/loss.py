"""Loss recovered: what the model loses when an activation is replaced by its reconstruction.

With the cross-entropy of the intact model, of a reconstruction and of an ablation (the activation set to zero, or
to its mean), the loss recovered is (ablated - reconstructed) / (ablated - intact): 1 for the identity, 0 for the
ablation itself. Zero ablation is lenient, as few activations are near zero; the mean is the stricter reference.
The ratio means something only where ablation does harm: an untrained model may predict better without the
activation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dbksvd_dask.errors import InputError
from dbksvd_dask.events import Callback, JobProgress, emit
from dbksvd_dask.lm.model import (
    Hook,
    LanguageModel,
    check_ids,
    first_of,
    hooked,
    open_model,
    standing_in,
    with_first,
)
from dbksvd_dask.lm.reconstruct import Reconstruct, open_reconstruction, require_width
from dbksvd_dask.lm.texts import Texts, read_texts
from dbksvd_dask.lm.windows import BATCHES_PER_BLOCK, Windows, make_windows, padded, plan_batches, plan_blocks
from dbksvd_dask.progress import with_view

logger = logging.getLogger(__name__)

# An ablation is a reference where it raises the loss by more than this many standard errors.
CLEAR = 2.0
# Logits computed at a time: 256 MB, a few times that with what is made of them.
TILE_NUMBERS = 1 << 26


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error over windows."""

    value: float
    error: float

    def __str__(self) -> str:
        """As 3.567 ± 0.012."""
        return f"{self.value:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Replaced:
    """What replacing an activation does to the model.

    Attributes
    ----------
    loss : Estimate
        Cross-entropy per token, in nats.
    kl : Estimate
        Kullback-Leibler divergence from the intact model's distribution, per token, in nats.
    harm : Estimate
        Cross-entropy less that of the intact model, per token; the error is that of the difference.
    of_zero, of_mean : Estimate
        Loss recovered, by the zero-ablated and by the mean-ablated model.
    """

    loss: Estimate
    kl: Estimate
    harm: Estimate
    of_zero: Estimate
    of_mean: Estimate


@dataclass(frozen=True)
class LossRecovered:
    """Losses at one hook.

    Attributes
    ----------
    hook : str
    n_tokens : int
        Tokens whose prediction was measured.
    n_windows : int
    intact : Estimate
        Cross-entropy of the model as it is.
    zero, mean : Replaced
        Activations set to zero, and to their mean.
    reconstructions : dict of str to Replaced
    """

    hook: str
    n_tokens: int
    n_windows: int
    intact: Estimate
    zero: Replaced
    mean: Replaced
    reconstructions: dict[str, Replaced]

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Ablations, "zero" or "mean", that do not clearly harm the model: loss recovered by them says nothing."""
        ablations = {"zero": self.zero.harm, "mean": self.mean.harm}
        # of a single window there is no error
        clear = {name: harm.value > CLEAR * np.nan_to_num(harm.error) for name, harm in ablations.items()}
        return tuple(name for name in ablations if not clear[name])

    def doubts(self) -> list[str]:
        """Return one sentence for each of `doubtful`."""
        found = {"zero": self.zero, "mean": self.mean}
        return [
            f"{name} ablation has a loss of {found[name].loss}, the intact model {self.intact}: it does not "
            "clearly harm the model, so the loss recovered by it means nothing; use a trained model, more texts "
            "or another hook"
            for name in self.doubtful
        ]


def ratio(top: npt.NDArray[Any], bottom: npt.NDArray[Any]) -> Estimate:
    """Estimate sum(top) / sum(bottom) and its standard error, from one pair per window.

    Tokens of a window are not independent, windows are taken to be: the error is that of the linearised ratio.

    >>> ratio(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0]))
    Estimate(value=2.0, error=0.5773502691896257)
    """
    total, n = float(bottom.sum()), len(bottom)
    if total == 0:
        return Estimate(float("nan"), float("nan"))
    value = float(top.sum()) / total
    spread = float(((top - value * bottom) ** 2).sum())
    return Estimate(value, float(np.sqrt(spread * n / (n - 1))) / abs(total) if n > 1 else float("nan"))


def loss_recovered(
    model: LanguageModel | str,
    texts: Texts | str | Iterable[str],
    hook: str | Hook,
    reconstructions: Any,
    *,
    mean: npt.NDArray[Any] | None = None,
    context: int = 256,
    bos: str = "drop",
    long: str = "split",
    n_tokens: int | None = None,
    seed: int | None = None,
    batch_tokens: int = 2048,
    callbacks: Iterable[Callback] = (),
    verbose: bool | None = None,
) -> LossRecovered:
    """Measure the loss of a model with reconstructed activations.

    Activations are replaced at every token that has a row in a captured store (not at the beginning token unless
    `bos` is "keep"), and the loss is that of the predictions made there.

    Parameters
    ----------
    model : LanguageModel, or path of a model
    texts : Texts, iterable of str, or path of texts; not those the dictionary was fitted on
    hook : str
        Such as "resid:8".
    reconstructions : callable, dictionary, path, or mapping of name to one of them
        A callable is given float32 rows (n, n_features) and returns the same shape, as ndarray or tensor; anything
        else is what `open_reconstruction` takes: a Dictionary, a fitted estimator, the path of a run or of a
        SAELens folder.
    mean : ndarray of shape (n_features,), optional
        For mean ablation; default: the mean over these texts, for which they are run twice.
    context, bos, long, n_tokens, seed, batch_tokens, callbacks, verbose
        As for `capture_activations`.

    Returns
    -------
    LossRecovered
        A warning is logged where an ablation does not clearly harm the model (`LossRecovered.doubtful`).
    """
    opened = model if isinstance(model, LanguageModel) else open_model(model)
    place = opened.hook(hook)
    named = _named(reconstructions)
    for name, one in named.items():
        require_width(one, opened.n_features, name)
    given = texts if isinstance(texts, Texts) else read_texts(texts)
    order = None if seed is None else np.random.default_rng(seed).permutation(len(given.texts))
    windows = make_windows(
        opened.tokenizer, given.texts, context=context, bos=bos, long=long, n_rows=n_tokens, order=order
    )
    check_ids(opened, windows.ids, int(windows.lengths.max(initial=0)))
    if int((windows.lengths - 1 - windows.skip).max()) < 1:
        raise InputError("no window has two tokens, so there is nothing to predict; give longer texts")
    opened.check_logits()
    measure = Measurement(opened, windows, place, batch_tokens, with_view(callbacks, verbose))
    centre = measure.mean() if mean is None else np.asarray(mean, np.float32)
    if centre.shape != (opened.n_features,):
        raise InputError(f"mean has shape {centre.shape}; it must be ({opened.n_features},), one activation")
    ablations: list[Reconstruct] = [np.zeros_like, lambda rows: np.broadcast_to(centre, rows.shape)]
    found = measure.run([*ablations, *named.values()], list(named))
    for doubt in found.doubts():
        logger.warning("%s: %s", found.hook, doubt)
    return found


def _named(given: Any) -> dict[str, Reconstruct]:
    if isinstance(given, Mapping):
        return {str(name): open_reconstruction(one) for name, one in given.items()}
    return {"reconstruction": open_reconstruction(given)}


class Measurement:
    """Losses of one hook over windows; see `loss_recovered`."""

    def __init__(
        self,
        model: LanguageModel,
        windows: Windows,
        hook: Hook,
        batch_tokens: int,
        callbacks: tuple[Callback, ...],
    ) -> None:
        self.model, self.windows, self.hook, self.callbacks = model, windows, hook, callbacks
        blocks = plan_blocks(windows.lengths, BATCHES_PER_BLOCK * batch_tokens)
        self.batches = [
            [a + w for w in batch] for a, b in blocks for batch in plan_batches(windows.lengths[a:b], batch_tokens)
        ]

    def _inputs(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, mask, and which tokens have a row: (n_windows, longest) each."""
        ids, mask = padded(self.windows, batch, self.model.pad_id)
        kept = (mask > 0) & (np.arange(mask.shape[1]) >= self.windows.skip)
        return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(kept).to(self.model.device)

    def mean(self) -> npt.NDArray[np.float32]:
        """Return the mean activation over all rows, (n_features,)."""
        total, done = np.zeros(self.model.n_features), 0
        for batch in self.batches:
            ids, mask, kept = self._inputs(batch)
            rows = self.model.activations(ids, mask, [self.hook])[self.hook][kept]
            total += rows.double().sum(0).cpu().numpy()
            done += len(rows)
            emit(self.callbacks, JobProgress("mean", done, self.windows.n_rows, "tokens"))
        out: npt.NDArray[np.float32] = (total / self.windows.n_rows).astype(np.float32)
        return out

    def run(self, functions: Sequence[Reconstruct], names: Sequence[str]) -> LossRecovered:
        """Measure the intact model and every replacement: zero, mean, then those that have `names`."""
        sums = np.zeros((len(self.windows.pieces), 1 + 2 * len(functions)))
        done = 0
        for batch in self.batches:
            sums[batch] = self._batch(batch, functions)
            done += int((self.windows.lengths[batch] - self.windows.skip).sum())
            emit(self.callbacks, JobProgress("loss", done, self.windows.n_rows, "tokens"))
        counts = np.maximum(self.windows.lengths - 1 - self.windows.skip, 0)
        return self._result(sums[counts > 0], counts[counts > 0].astype(float), names)

    def _batch(self, batch: list[int], functions: Sequence[Reconstruct]) -> npt.NDArray[np.float64]:
        """Return for each window the sums of the intact loss, then of loss and divergence of each replacement."""
        ids, mask, kept = self._inputs(batch)
        with torch.inference_mode():
            hidden, around, activation = self._intact(ids, mask)
            rows = activation[kept].float().cpu().numpy()
            states = [hidden]
            for function in functions:
                changed = activation.clone()
                changed[kept] = _as_tensor(function(rows), rows.shape).to(changed)
                states.append(self._replaced(ids, mask, around, changed))
            return self._losses(ids, mask, states)

    def _intact(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Return the last hidden states, what the block before the replacement returned, and the activation."""
        hook = self.hook
        seen: dict[str, Any] = {}
        before = hook.layer if hook.kind == "resid" else hook.layer - 1
        pairs = [(self.model.module(hook), lambda m, i, output: seen.__setitem__("at", first_of(output)))]
        if before >= 0:
            pairs.append((self.model.blocks[before], lambda m, i, output: seen.__setitem__("before", output)))
        with hooked(pairs):
            hidden = self.model.last_hidden(ids, mask)
        return hidden, seen.get("before"), seen["at"]

    def _replaced(self, ids: torch.Tensor, mask: torch.Tensor, around: Any, changed: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states with another activation; blocks before it are not computed again."""
        hook, blocks = self.hook, self.model.blocks
        with contextlib.ExitStack() as stack:
            if hook.kind == "resid":
                stack.enter_context(standing_in(blocks[: hook.layer + 1], with_first(around, changed)))
            else:
                stack.enter_context(standing_in(blocks[: hook.layer], around))
                put = (self.model.module(hook), lambda m, i, output: with_first(output, changed))
                stack.enter_context(hooked([put]))
            return self.model.last_hidden(ids, mask)

    def _losses(
        self, ids: torch.Tensor, mask: torch.Tensor, states: list[torch.Tensor]
    ) -> npt.NDArray[np.float64]:
        length = mask.sum(1)
        position = torch.arange(mask.shape[1])
        predicts = (position >= self.windows.skip) & (position < length[:, None] - 1)
        window, at = torch.nonzero(predicts, as_tuple=True)
        target = ids[window, at + 1].to(self.model.device)
        out = np.zeros((len(ids), 2 * len(states) - 1))
        flat = [state[window, at] for state in states]
        for part in _tiles(len(window), max(1, TILE_NUMBERS // self.model.n_embeddings)):
            numbers = self._tile([state[part] for state in flat], target[part])
            np.add.at(out, window[part].numpy(), numbers)
        return out

    def _tile(self, states: list[torch.Tensor], target: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the intact loss of each token, then loss and divergence of each replacement."""
        intact = torch.log_softmax(self.model.logits(states[0]), -1)
        columns = [-_picked(intact, target)]
        weight = intact.exp()
        for state in states[1:]:
            other = torch.log_softmax(self.model.logits(state), -1)
            columns.append(-_picked(other, target))
            # in place: arrays of a vocabulary each are what this costs, besides the product
            columns.append(torch.sub(intact, other, out=other).mul_(weight).sum(-1))
        out: npt.NDArray[np.float64] = torch.stack(columns, 1).double().cpu().numpy()
        return out

    def _result(self, sums: npt.NDArray[Any], counts: npt.NDArray[Any], names: Sequence[str]) -> LossRecovered:
        intact, loss, kl = sums[:, 0], sums[:, 1::2], sums[:, 2::2]
        zero, mean = loss[:, 0], loss[:, 1]
        replaced = [
            Replaced(
                ratio(loss[:, i], counts),
                ratio(kl[:, i], counts),
                ratio(loss[:, i] - intact, counts),
                ratio(zero - loss[:, i], zero - intact),
                ratio(mean - loss[:, i], mean - intact),
            )
            for i in range(loss.shape[1])
        ]
        given = dict(zip(names, replaced[2:], strict=True))
        shape = (str(self.hook), int(counts.sum()), len(counts))
        return LossRecovered(*shape, ratio(intact, counts), replaced[0], replaced[1], given)


def _picked(logs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logs.gather(1, target[:, None])[:, 0]


def _tiles(n: int, size: int) -> Iterator[slice]:
    return (slice(a, a + size) for a in range(0, n, size))


def _as_tensor(rows: Any, shape: tuple[int, ...]) -> torch.Tensor:
    found = rows.detach() if isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows, np.float32))
    if tuple(found.shape) != shape:
        raise InputError(f"a reconstruction returned shape {tuple(found.shape)} for rows of shape {shape}")
    return found
