"""One sentence on what an analysis means for the choice of a fusion."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from .emap import Interactions
from .pid import LITTLE, Pair

SYNERGY = 0.2  # share of the information from which on synergy decides
DOMINANT = 0.8  # share of the information from which on a single part decides


def advise_fusion(pairs: Sequence[Pair]) -> str:
    """Return what the decompositions mean for the choice of a fusion."""
    whole = [pair for pair in pairs if "+" in pair.second] or list(pairs)
    pair = max(whole, key=lambda one: one.parts.synergy)
    total, parts = pair.parts.total, pair.parts
    for other in whole:
        number = None if other.limits is None else other.limits.lost(other.parts)
        if other.limits is not None and number is not None:
            told = other.parts.redundancy + other.parts[1 + number]
            known = other.limits.entropy - other.limits[1 + number]
            return (
                f"No advice: the parts of {(other.first, other.second)[number]} tell {told:.2f}"
                f" bits, and a probe of it {known:.2f}; compare with --pid_mode batch."
            )
    between = f"{pair.first} and {pair.second}"
    if total < LITTLE:
        return (
            f"{between} tell {total:.2f} bits about the target: check labels, features or the"
            " number of clusters before choosing a fusion."
        )
    low = pair.low.synergy
    certain = isnan(low) or low > 0
    if parts.synergy >= max(LITTLE, SYNERGY * total) and certain:
        return (
            f"{parts.synergy / total:.0%} of the information is in the combination of {between}:"
            " take a fusion that multiplies or attends (gmu, lmf, concat, an attention fusion);"
            " late fusions and sums of unimodal terms cannot express it."
        )
    alone = max(((one.parts.unique_1, one.first, one) for one in whole), key=lambda entry: entry[0])
    if alone[0] >= DOMINANT * alone[2].parts.total:
        return (
            f"{alone[0] / alone[2].parts.total:.0%} of the information is in {alone[1]} alone:"
            " compare any fusion with that modality by itself."
        )
    if len(whole) == 1 and parts.unique_2 >= DOMINANT * total:
        return (
            f"{parts.unique_2 / total:.0%} of the information is in {pair.second} alone: compare"
            " any fusion with that modality by itself."
        )
    if parts.redundancy >= 0.5 * total:
        return (
            f"{parts.redundancy / total:.0%} of the information of {between} is in each of them:"
            " few parameters suffice (mean, attn_pool, late_mean)."
        )
    return (
        "Each modality tells a part that the other lacks, and little is in the combination: late"
        " fusions and sums suffice (late_mean, mean, concat); compare with gmu."
    )


def advise_model(found: Interactions) -> str:
    """Return what the projection of a model means."""
    if abs(found.gain) < 0.01 * max(abs(found.model), 1e-12):
        return (
            f"Without interactions its {found.metric} stays at {found.additive:.3f}: this model"
            " uses none that matter, so a late fusion may do; the data may still hold some (pid)."
        )
    return (
        f"Interactions change its {found.metric} from {found.additive:.3f} to {found.model:.3f}:"
        " this model needs a fusion that is not a sum of unimodal terms."
    )
