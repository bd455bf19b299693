"""Plain versions of every metric: loops, dense arrays, the formula as written."""

import math

import numpy as np
from scipy.optimize import linear_sum_assignment


def dense_codes(atom, coefficient, n_atoms):
    X = np.zeros((atom.shape[0], n_atoms))
    for i in range(atom.shape[0]):
        for s in range(atom.shape[1]):
            if atom[i, s] >= 0:
                X[i, atom[i, s]] += coefficient[i, s]
    return X


def mean_relative_error(Y, R):
    errors = [np.linalg.norm(r) / np.linalg.norm(y) for y, r in zip(Y, R, strict=True) if np.linalg.norm(y) > 0]
    return float(np.mean(errors)) if errors else math.nan


def variance_explained(Y, R, rtol):
    y_var = np.var(Y.astype(np.float64), axis=0)
    r_var = np.var(R.astype(np.float64), axis=0)
    threshold = rtol * y_var.mean()
    quotients = [r_var[j] / y_var[j] for j in range(Y.shape[1]) if y_var[j] > threshold]
    return 1.0 - float(np.mean(quotients)), Y.shape[1] - len(quotients)


def fvu(Y, R):
    Y = Y.astype(np.float64)
    return float(np.sum(R.astype(np.float64) ** 2) / np.sum((Y - Y.mean(axis=0)) ** 2))


def cosine_similarity(Y, Z):
    values = []
    for y, z in zip(Y, Z, strict=True):
        ny, nz = np.linalg.norm(y), np.linalg.norm(z)
        if ny > 0:
            values.append(float(y @ z) / (ny * nz) if nz > 0 else 0.0)
    return float(np.mean(values))


def shrinkage(Y, Z):
    return float(
        np.mean([np.linalg.norm(z) / np.linalg.norm(y) for y, z in zip(Y, Z, strict=True) if np.linalg.norm(y)])
    )


def coherence(D):
    m = D.shape[0]
    signed, absolute = np.full(m, -np.inf), np.zeros(m)
    for j in range(m):
        for other in range(m):
            if other != j:
                g = float(D[j] @ D[other])
                signed[j] = max(signed[j], g)
                absolute[j] = max(absolute[j], abs(g))
    return signed, absolute


def mcc(A, B, absolute=True):
    similarity = A @ B.T
    similarity = np.abs(similarity) if absolute else similarity
    rows, columns = linear_sum_assignment(similarity, maximize=True)
    return float(similarity[rows, columns].mean())


def support_scores(X, X_true, best):
    """Precision, recall, F1 of every learned atom as a detector of its best true atom; 0 when undefined."""
    scores = []
    for j in range(X.shape[1]):
        fires, truth = X[:, j] != 0, X_true[:, best[j]] != 0
        tp = float(np.sum(fires & truth))
        precision = tp / fires.sum() if fires.any() else 0.0
        recall = tp / truth.sum() if truth.any() else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        scores.append((precision, recall, f1))
    return np.array(scores)


def strongest(X, j, sign, n_top):
    """Rows and values of the largest positive ``sign * X[:, j]``, ties to the lower row."""
    ranked = sorted((-sign * X[i, j], i) for i in range(X.shape[0]) if sign * X[i, j] > 0)
    return [i for _, i in ranked[:n_top]], [-v for v, _ in ranked[:n_top]]


def class_differences(X, labels, n_classes):
    """|mean of the class - mean of the rest| of every column, for every class."""
    return np.array([np.abs(X[labels == c].mean(axis=0) - X[labels != c].mean(axis=0)) for c in range(n_classes)])


def class_tf_idf(groups, tokenise):
    """Weight of every word in every group: tf / words of the group * log(1 + mean words / count in all)."""
    counts = [{} for _ in groups]
    for table, texts in zip(counts, groups, strict=True):
        for text in texts:
            for word in tokenise(text):
                table[word] = table.get(word, 0) + 1
    totals = {}
    for table in counts:
        for word, n in table.items():
            totals[word] = totals.get(word, 0) + n
    mean_words = sum(totals.values()) / len(groups)
    return [
        {word: n / sum(table.values()) * math.log(1 + mean_words / totals[word]) for word, n in table.items()}
        for table in counts
    ]


def spearman(a, b):
    """Correlation of ranks; equal values share the mean of their places."""

    def ranks(values):
        return np.array([sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values])

    return np.corrcoef(ranks(a), ranks(b))[0, 1]


def random_codes(rng, n, k, n_atoms, empty=0.2):
    """Codes with distinct atoms per row, signed coefficients, and some empty and some zero slots."""
    atom = np.stack([rng.choice(n_atoms, k, replace=False) for _ in range(n)]).astype(np.int32)
    coefficient = rng.standard_normal((n, k)).astype(np.float32)
    gone = rng.random((n, k)) < empty
    atom[gone] = -1
    coefficient[gone] = 0
    coefficient[rng.random((n, k)) < 0.05] = 0
    return atom, coefficient


def unit_rows(rng, m, d, dtype=np.float64):
    D = rng.standard_normal((m, d))
    return (D / np.linalg.norm(D, axis=1, keepdims=True)).astype(dtype)


def logistic_sums(X, positive, weight, theta):
    """Loss, gradient and Hessian of the weighted log-loss, from the probabilities."""
    A = np.column_stack([X, np.ones(len(X))])
    z = A @ theta
    p = 1 / (1 + np.exp(-z))
    loss = -np.sum(weight * (positive * np.log(p) + ~positive * np.log1p(-p)))
    return loss, A.T @ (weight * (p - positive)), A.T @ (A * (weight * p * (1 - p))[:, None])


def strongest_columns(values, n):
    """Columns of the n largest |values| of each row, strongest first; of equal ones the lower first."""
    return [sorted(range(len(row)), key=lambda t: (-abs(row[t]), t))[:n] for row in values.tolist()]
