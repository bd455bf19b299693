"""One pass of Newton's method for weighted binary logistic regression."""

import math

import numpy as np

from dbksvd_dask.kernels._jit import jit


@jit
def newton_sums(X, positive, weight, theta, gradient, hessian):
    """Write gradient and Hessian of the log-loss at `theta` (without the penalty) and return the loss.

    Plain formula, with ``z_i = X_i . theta[:-1] + theta[-1]`` and ``p_i = 1 / (1 + exp(-z_i))``::

        loss = sum_i w_i log(1 + exp(-s_i z_i)),  s_i = 1 if positive[i] else -1
        gradient = sum_i w_i (p_i - positive_i) [X_i, 1]
        hessian = sum_i w_i p_i (1 - p_i) [X_i, 1]^T [X_i, 1]

    Parameters
    ----------
    X : float64 ndarray of shape (n, k)
    positive : bool ndarray of shape (n,)
    weight : float64 ndarray of shape (n,)
    theta, gradient : float64 ndarray of shape (k + 1,)
    hessian : float64 ndarray of shape (k + 1, k + 1)
    """
    k = X.shape[1]
    gradient[:] = 0.0
    hessian[:] = 0.0
    loss = 0.0
    for i in range(X.shape[0]):
        z = theta[k]
        for a in range(k):
            z += X[i, a] * theta[a]
        # exp of a negative number only: no overflow for a far-off sample
        e = math.exp(-abs(z))
        p = 1.0 / (1.0 + e) if z >= 0.0 else e / (1.0 + e)
        wrong_side = (z < 0.0) == positive[i]
        loss += weight[i] * (math.log1p(e) + (abs(z) if wrong_side else 0.0))
        g = weight[i] * (p - np.float64(positive[i]))
        h = weight[i] * e / ((1.0 + e) * (1.0 + e))
        for a in range(k):
            gradient[a] += g * X[i, a]
            for b in range(a + 1):
                hessian[a, b] += h * X[i, a] * X[i, b]
            hessian[k, a] += h * X[i, a]
        gradient[k] += g
        hessian[k, k] += h
    for a in range(k + 1):
        for b in range(a):
            hessian[b, a] = hessian[a, b]
    return loss


@jit
def lasso_step(gradient, hessian, theta, penalty, max_sweeps, tolerance):
    """Minimise ``gradient . s + s . hessian . s / 2 + sum_j penalty_j |theta_j + s_j|`` by coordinate descent.

    Parameters
    ----------
    gradient, theta, penalty : float64 ndarray of shape (n,)
    hessian : float64 ndarray of shape (n, n)
    max_sweeps : int
    tolerance : float
        Sweeps end when none has moved a coordinate by more than this share of the largest.

    Returns
    -------
    float64 ndarray of shape (n,)
        The step s.
    """
    n = theta.shape[0]
    step = np.zeros(n)
    slope = gradient.copy()  # of the quadratic at the step
    for _ in range(max_sweeps):
        moved = 0.0
        largest = 0.0
        for j in range(n):
            curvature = hessian[j, j] + 1e-12
            here = theta[j] + step[j]
            target = here - slope[j] / curvature
            new = math.copysign(max(abs(target) - penalty[j] / curvature, 0.0), target)
            change = new - here
            if change != 0.0:
                step[j] += change
                for i in range(n):
                    slope[i] += hessian[i, j] * change
            moved = max(moved, abs(change))
            largest = max(largest, abs(new))
        if moved <= tolerance * largest:
            break
    return step
