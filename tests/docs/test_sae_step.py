"""The sparse training step of the benchmarks' autoencoders against torch's automatic differentiation."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import sae_step  # noqa: E402
from benchmarks.sae_torch import BatchTopKSAE, TopKSAE, train_sae  # noqa: E402

pytestmark = pytest.mark.interop

FORMS = [
    pytest.param(kind, groups, id=f"{kind.__name__}-{groups}")
    for kind in (TopKSAE, BatchTopKSAE)
    for groups in (None, (8, 16, 36))
]


def two_alike(kind, groups):
    torch.manual_seed(3)
    first = kind(12, 60, 4, groups)
    second = kind(12, 60, 4, groups)
    second.load_state_dict(first.state_dict())
    return first, second


def batches(n):
    rng = np.random.default_rng(0)
    return [(3 * rng.standard_normal((50, 12)) + 1).astype(np.float32) for _ in range(n)]


def torch_step(sae, adam, y):
    """What training means: the gradient of the loss, none along the decoder's rows, and unit rows afterwards."""
    adam.zero_grad()
    sae.loss(torch.from_numpy(y)).backward()
    with torch.no_grad():
        grad = sae.decoder.grad
        grad -= (grad * sae.decoder).sum(1, keepdim=True) * sae.decoder
    adam.step()
    with torch.no_grad():
        sae.decoder /= sae.decoder.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("kind", "groups"), FORMS)
@pytest.mark.parametrize("dead_after", [10**6, 60])
def test_gradients_are_those_of_torch(kind, groups, dead_after, monkeypatch):
    monkeypatch.setattr(sae_step, "DEAD_AFTER", dead_after)
    ours, theirs = two_alike(kind, groups)
    with torch.no_grad():  # dead latents, some of which see something
        for sae in (ours, theirs):
            sae.since[::3] = 10**5
            sae.encoder[::3] *= 0.3
            sae.bias += 0.1
    stepper = sae_step.Stepper(ours)
    y = batches(1)[0]
    stepper.find_gradients(y)
    theirs.loss(torch.from_numpy(y)).backward()
    found = zip(stepper.grads, (theirs.decoder, theirs.encoder, theirs.bias), strict=True)
    for mine, parameter in found:
        true = parameter.grad.numpy().reshape(mine.shape)
        assert np.abs(true).max() > 1e-4
        np.testing.assert_allclose(mine, true, atol=2e-6 * max(1, np.abs(true).max() * 10))
    np.testing.assert_array_equal(ours.since, theirs.since)
    if kind is BatchTopKSAE:
        assert float(ours.threshold) == pytest.approx(float(theirs.threshold), rel=1e-6)


@pytest.mark.parametrize(("kind", "groups"), FORMS)
def test_several_steps_are_those_of_adam(kind, groups, monkeypatch):
    monkeypatch.setattr(sae_step, "DEAD_AFTER", 120)
    ours, theirs = two_alike(kind, groups)
    stepper = sae_step.Stepper(ours)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-3, betas=sae_step.BETAS)
    for y in batches(8):
        stepper.step(y, 1e-3)
        torch_step(theirs, adam, y)
    for mine, true in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), true.detach(), atol=1e-4)


def test_training_lowers_the_loss_and_repeats():
    rng = np.random.default_rng(1)
    rows = (rng.random((400, 20)) < 0.1).astype(np.float32) @ rng.standard_normal((20, 12)).astype(np.float32)
    runs = {n: [train_sae(rows, 40, 4, 1e-2, lambda sae, seen: None, None, 100, n) for _ in "ab"] for n in (1, 60)}
    (short, _), (first, second) = runs[1], runs[60]
    with torch.no_grad():
        y = torch.from_numpy(rows)
        assert first.loss(y) < 0.5 * short.loss(y)
    torch.testing.assert_close(first.decoder, second.decoder, rtol=0, atol=0)
    torch.testing.assert_close(first.decoder.norm(dim=1), torch.ones(40))
