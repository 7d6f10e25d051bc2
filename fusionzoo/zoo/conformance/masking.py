"""A fusion's modalities: missing ones and padding change nothing, present ones matter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusionzoo.structures import Features

from .checks import Checks
from .fusions import (
    DIM,
    OUTPUTS,
    Maker,
    assert_equal,
    build,
    counts_for,
    features,
    full,
    patterns,
    poison,
    rows_of,
    tensors_of,
)

CHECKS: Checks[Maker] = Checks()


@CHECKS.add
def weights_are_shares_of_what_is_present(make: Maker) -> None:
    """Tried: every subset of three modalities; weights at least 0, 0 where absent, summing to 1."""
    out = build(make)(features(patterns(3)))
    if out.weights is None:
        return
    absent = ~patterns(3)
    assert (out.weights[absent] == 0).all(), "an absent modality has weight"
    assert (out.weights >= 0).all(), "a weight is negative"
    sums = out.weights.sum(1)[:-1]
    torch.testing.assert_close(sums, torch.ones_like(sums))


@CHECKS.add
def the_content_of_a_missing_modality_changes_nothing(make: Maker) -> None:
    """Tried: NaN, infinity and 1e30 in everything that is absent or padding; equal to the bit."""
    fusion, inputs = build(make), features(patterns(3))
    expected = fusion(poison(inputs, 0.0))
    for value in (float("nan"), float("inf"), 1e30):
        assert_equal(
            fusion(poison(inputs, value)), expected, f"absent content set to {value}", tolerance=0
        )


@CHECKS.add
def every_subset_of_modalities_gives_finite_outputs(make: Maker) -> None:
    """Tried: all 2^M subsets of 1, 2, 3 and 5 modalities, the empty one included."""
    for modalities in counts_for(make):
        out = build(make, modalities)(features(patterns(modalities)))
        for name, x in tensors_of(out).items():
            bad = (~torch.isfinite(x)).any(-1).nonzero()[:, 0].tolist()
            subset = patterns(modalities)[bad[:1]].tolist()
            assert not bad, f"{name} is not finite for presence {subset}"


@CHECKS.add
def padding_changes_nothing(make: Maker) -> None:
    """Tried: 1e6 in padded tokens, and three more padded tokens at the end."""
    fusion, inputs = build(make), features(full(4))
    expected = fusion(inputs)
    assert_equal(fusion(poison(inputs, 1e6)), expected, "padded tokens set to 1e6")
    longer = {
        name: Features(F.pad(x.tokens, (0, 0, 0, 3), value=7.0), F.pad(x.mask, (0, 3)), x.pooled)
        for name, x in inputs.items()
    }
    assert_equal(fusion(longer), expected, "three padded tokens appended")


@CHECKS.add
def batch_mates_change_nothing(make: Maker) -> None:
    """Tried: every subset of three modalities in one batch, and each row alone."""
    fusion, inputs = build(make), features(patterns(3))
    together = fusion(inputs)
    for row, presence in enumerate(patterns(3).tolist()):
        alone = fusion(rows_of(inputs, slice(row, row + 1)))
        part = {n: x[row : row + 1] for n, x in tensors_of(together).items()}
        for name, x in tensors_of(alone).items():
            message = f"{name} of a sample with presence {presence} depends on its batch"
            torch.testing.assert_close(x, part[name], rtol=1e-10, atol=1e-10, msg=message)


@CHECKS.add
def every_present_modality_matters(make: Maker) -> None:
    """Tried: adding 1 to the first feature of one modality at a time, in 16 rows.

    A fusion may answer some rows without it, if it chooses what to read.
    """
    fusion, inputs = build(make), features(full(16))
    expected = fusion(inputs).logits
    for name, x in inputs.items():
        step = (torch.arange(x.pooled.shape[1]) == 0).to(x.pooled.dtype)  # a norm hides a constant
        other = Features(x.tokens + step, x.mask, x.pooled + step)
        changed = fusion({**inputs, name: other}).logits
        assert not torch.allclose(changed, expected), f"the logits do not depend on {name}"


@CHECKS.add
def the_order_of_the_dict_does_not_matter(make: Maker) -> None:
    """Tried: the same features in a dict of reversed order."""
    fusion, inputs = build(make), features(patterns(3))
    shuffled = dict(reversed(inputs.items()))
    assert_equal(fusion(shuffled), fusion(inputs), "modalities in another order", tolerance=0)


@CHECKS.add
def the_order_of_its_modalities_does_not_matter(make: Maker) -> None:
    """Tried: building it for the reversed order with the same weights, if it says `symmetric`."""
    fusion, inputs = build(make), features(patterns(3))
    if not fusion.symmetric:
        return
    other = make(dict(reversed(fusion.dims.items())), DIM, OUTPUTS).double().eval()
    other.load_state_dict(fusion.state_dict())
    first, second = fusion(inputs), other(inputs)
    if second.weights is not None:
        second = second._replace(weights=second.weights.flip(1))
    assert_equal(second, first, "built for its modalities in reversed order")
