"""Plain versions of the probes of tasks: loops, dense arrays, the definition as written."""

import numpy as np


def rank_columns(X, positive):
    """Columns by difference of class means after division by the mean absolute nonzero entry."""
    scores = []
    for j in range(X.shape[1]):
        nonzero = [abs(v) for v in X[:, j] if v != 0]
        size = sum(nonzero) / (len(nonzero) + 1e-6)
        scaled = [v / (size + 1e-6) for v in X[:, j]]
        on = [v for v, p in zip(scaled, positive, strict=True) if p]
        off = [v for v, p in zip(scaled, positive, strict=True) if not p]
        scores.append(abs(sum(on) / len(on) - sum(off) / len(off)))
    return sorted(range(X.shape[1]), key=lambda j: (-scores[j], j))


def roc_auc(score, positive):
    """Pairs in which the positive is ahead; ties count half."""
    wins = pairs = 0
    for s, p in zip(score, positive, strict=True):
        for t, q in zip(score, positive, strict=True):
            if p and not q:
                pairs += 1
                wins += 1.0 if s > t else 0.5 if s == t else 0.0
    return wins / pairs


def lasso_loss(X, positive, coef, intercept, C):
    """What a logistic regression with an L1 penalty minimises."""
    total = 0.0
    for x, p in zip(X, positive, strict=True):
        z = sum(a * b for a, b in zip(x, coef, strict=True)) + intercept
        total += np.log1p(np.exp(-z if p else z))
    return C * total + sum(abs(c) for c in coef)
