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
