"""Whole numbers in proportion to weights that sum up exactly. Knows no layers and no heads."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor


def apportion(weights: Sequence[float | Fraction], total: int, most: Sequence[int]) -> list[int]:
    """`total` shared in proportion to `weights`, none above its `most`; what these cannot take goes to the others.

    Rounded by the largest remainder, ties to the earlier. Weights are finite and not negative; where all that are left
    are 0, they count alike. Where `total` is more than all can take, each gets its most.
    """
    if total >= sum(most):
        return list(most)
    exact = [Fraction(weight) for weight in weights]
    shares = [Fraction(limit) for limit in most]
    still = list(range(len(exact)))
    while True:
        left = total - sum(shares[i] for i in range(len(exact)) if i not in still)
        weight = sum(exact[i] for i in still)
        wanted = {i: left * exact[i] / weight if weight else Fraction(left, len(still)) for i in still}
        over = [i for i in still if wanted[i] > most[i]]
        if not over:
            break
        still = [i for i in still if i not in over]
    for i in still:
        shares[i] = wanted[i]
    whole = [floor(share) for share in shares]
    order = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    takers = [i for i in order if whole[i] < most[i]]
    for i in takers[: total - sum(whole)]:
        whole[i] += 1
    return whole
