"""Plain version of absorption: one word at a time, the definition of SAEBench as written."""


def absorbed(codes, cosine, projection, own):
    """Return (fraction, full) of one sample: lists of floats, its projection on the probe, atoms of the class."""
    carried = [a * c for a, c in zip(codes, cosine, strict=True)]
    mine = sum(carried[j] for j in own)
    absorbers = [
        p for j, (p, c) in enumerate(zip(carried, cosine, strict=True)) if j not in own and c >= 0.1 and p > 0
    ]
    theirs = sum(sorted(absorbers, reverse=True)[:3])
    if projection <= 0 or mine >= projection or theirs / projection < 0.4:
        fraction = 0.0
    elif mine <= 0:
        fraction = 1.0
    else:
        taken = min(theirs, projection - mine)
        fraction = taken / (taken + mine)
    top = max(range(len(carried)), key=lambda j: carried[j])
    full = (
        all(abs(codes[j]) < 1e-8 for j in own)
        and cosine[top] >= 0.025
        and projection > 0
        and carried[top] / projection >= 0.4
    )
    return fraction, full


def split_atoms(scores, min_gain):
    """Return how many atoms a class keeps, from the F1 scores of probes with 1, 2, ... atoms."""
    best, kept = float("-inf"), 0
    for k, score in enumerate(scores, 1):
        if not score > best + min_gain:
            return kept
        best, kept = score, k
    return kept
