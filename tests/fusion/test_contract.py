"""Every registered fusion keeps the contract; the checks are the public ones."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.cost import random_features
from fusionzoo.fusion import create_fusion, fusion_info, list_fusions
from fusionzoo.fusion.base import RunningMeans
from fusionzoo.testing import fusions, parametrize_with_checks
from fusionzoo.testing.runner import SUITES
from helpers.oracle import WIDTHS

CHECKS = SUITES["fusion"]().checks
GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # inside torch.compile and export


QUICK = ("sum", "late_mean", "attn_pool", "mbt", "mvae_poe")  # the others' long checks are slow
LONG = (  # seconds each
    "missing_modalities_never_cost_more_than_all_knowledge",
    "an_uninformative_modality_can_be_dropped",
    "one_modality_alone_is_enough_to_learn",
)
IN_FLOAT32 = {  # torch's page on autocast lists what CUDA runs in float32
    *("cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "exp", "expm1"),
    *("group_norm", "kl_div", "layer_norm", "log", "log1p", "log2", "log_softmax", "nll_loss"),
    *("norm", "normalize", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softplus", "sum"),
}
COMPILE, EXPORT = "it_compiles_whole", "it_exports_with_free_sizes"
FUSIONS = [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in list_fusions()]


@parametrize_with_checks(
    *list_fusions(), checks=[name for name in CHECKS if name not in (*LONG, COMPILE, EXPORT)]
)
def test_contract(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("check", LONG)  # on top: two of them share a trained fusion
@pytest.mark.parametrize("name", FUSIONS)
def test_long_checks_of_the_contract(check: str, name: str) -> None:
    CHECKS[check](fusions.maker(name))


def beside(*quick: str) -> list[Any]:
    """Return all fusions, of which CI tries some: a regression of one is rare, a sweep is long."""
    slow, nightly = pytest.mark.slow, pytest.mark.nightly
    return [
        x if x in quick else pytest.param(x, marks=slow if x in QUICK else nightly)
        for x in list_fusions()
    ]


@pytest.mark.parametrize("name", beside("sum", "attn_pool"))
def test_it_compiles_whole(name: str) -> None:
    CHECKS[COMPILE](fusions.maker(name))


@pytest.mark.parametrize("name", beside("sum"))
def test_it_runs_in_torch_export_and_onnx_at_any_size(name: str) -> None:
    CHECKS[EXPORT](fusions.maker(name))


class _CudaAutocast(TorchFunctionMode):
    """Run what CUDA's autocast runs in float32 so on the CPU, whose autocast leaves it in bf16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in IN_FLOAT32:
            args = [
                x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
                for x in args
            ]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list_fusions())
def test_it_trains_under_the_autocast_of_cuda(name: str) -> None:
    fusion = create_fusion(name, {"image": 8, "text": 12}, 16, 3)
    x = random_features({"image": (5, 8), "text": (4, 12)}, 6)
    with torch.autocast("cpu", torch.bfloat16), _CudaAutocast():
        output = fusion(x)
    (output.logits.float().square().sum() + output.embedding.float().square().sum()).backward()
    gradients = [p.grad for p in fusion.parameters() if p.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert gradients or not list(fusion.parameters())


@pytest.mark.parametrize("name", FUSIONS)
def test_only_what_can_express_synergy_learns_exclusive_or(name: str) -> None:
    """A threshold on a sum of unimodal terms is right on at most three of the four cases."""
    reached = fusions.accuracy(fusions.maker(name), "xor")
    if fusion_info(name).synergy:
        assert reached > 0.95
    else:
        assert reached < 0.8


# A product keeps the factor of an absent modality's mean, so it is not the smaller fusion.
SYMMETRIC = [
    name
    for name in list_fusions()
    if fusion_info(name).cls.symmetric  # type: ignore[attr-defined]
    and not any(isinstance(m, RunningMeans) for m in fusions.build(fusion_info(name).cls).modules())
]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_with_a_modality_absent_it_is_the_fusion_of_the_others(name: str) -> None:
    three, two = (fusions.build(fusions.maker(name), count) for count in (3, 2))
    own = {k: v for k, v in three.state_dict().items() if k in two.state_dict()}
    two.load_state_dict(own)
    given = fusions.features(torch.tensor([[True, True, False], [True, False, False]]))
    found, wanted = three(given), two({m: given[m] for m in two.dims})
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.embedding, wanted.embedding, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", list_fusions())
def test_golden_numbers(name: str) -> None:
    spec = importlib.util.spec_from_file_location("make", GOLDEN / "make.py")
    assert spec and spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    path = GOLDEN / "fusion" / f"{name}.json"
    assert path.is_file(), f"no golden numbers: make golden NAME={name}"
    wanted, found = json.loads(path.read_text()), make.numbers(name)
    assert found["parameters"] == wanted["parameters"]
    for key in ("mean", "std", "values"):
        assert found[key] == pytest.approx(wanted[key], abs=1e-5), key


@pytest.mark.parametrize("name", list_fusions())
def test_the_file_is_named_after_the_entry_and_says_what_it_is(name: str) -> None:
    entry = fusion_info(name)
    assert Path(inspect.getfile(entry.cls)).stem == name
    assert Path(inspect.getfile(entry.cls)).parent.name == entry.family
    assert entry.summary.endswith(".")
    assert entry.reads in ("pooled", "tokens")
    assert "Shapes" in (inspect.getdoc(entry.cls) or "")


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("gmv", {}, "unknown fusion 'gmv'. Did you mean 'gmu'?"),
        ("lmf", {"ranks": 3}, "has no setting 'ranks'. Did you mean 'rank'?"),
        ("lmf", {"rank": 0}, "rank=0; it must be a number of at least 1"),
        ("mbt", {"num_heads": 3}, "num_heads=3 does not divide dim=8"),
        ("mbt", {"num_layers": 2, "fusion_layer": 3}, "fusion_layer=3; it must be a number"),
        ("cross_attention", {"query": "imag"}, "'imag' is no modality. Did you mean 'image'?"),
        ("gmu", {"gate": "tanh"}, "gate='tanh': input should be 'softmax'"),
        ("mult", {"width": 31, "num_heads": 1}, "width=31 is odd"),
        ("mult", {"num_heads": 4}, "num_heads=4 does not divide dim=30"),
        ("gated_xattn", {"base": "txt"}, "base='txt' is no modality. Did you mean 'text'?"),
        ("flex_moe", {"num_experts": 6}, "3 modalities have 7 combinations"),
        ("fuse_moe", {"top_k": 17}, "top_k=17; it must be a number of at least 1"),
        ("mca", {"sizes": [4]}, "sizes holds 4, which is not within 2 to 3"),
        ("mca", {"channel_tokens": 0}, "channel_tokens=0; it must be a number of"),
        ("i2moe", {"base": "late_stacking"}, "base='late_stacking' is trained in phases"),
        ("i2moe", {"base": "missing_tokens"}, "base='missing_tokens' wraps another fusion"),
        ("i2moe", {"base": "mbtt"}, "unknown fusion 'mbtt'"),
        ("i2moe", {"base": "mbt", "base_options": {"layers": 2}}, "has no setting 'layers'"),
        ("i2moe", {"max_modalities": 2}, "3 modalities take 20 passes through 'concat' per trai"),
        ("i2moe", {"temperature": 0.0}, "temperature=0.0"),
        ("dynmm", {"branches": [["imag"]]}, "'imag' is no modality. Did you mean 'image'"),
        ("dynmm", {"branches": [["image"], ["image"]]}, "each a different subset"),
        ("dynmm", {"costs": [0.5]}, "it needs one above 0 to 1 for each of 4 branches"),
        ("dynmm", {"temperature": 0.0}, "temperature=0.0"),
        ("dynmm", {"branch_share": 0.9, "soft_share": 0.2}, "their sum below 1"),
        ("momke", {"num_layers": 0}, "num_layers=0"),
        ("momke", {"expert_share": 1.0}, "expert_share=1.0"),
        ("dbf", {"kappa": 0.5}, "kappa=0.5"),
        ("dbf", {"conflict": -1.0}, "conflict=-1.0"),
        ("drfuse", {"aug_missing": 1.5}, "aug_missing=1.5"),
        ("healnet", {"num_latents": 0}, "num_latents=0; it must be a number of"),
        ("multiway", {"num_layers": 2, "fused_layers": 3}, "fused_layers=3; it must be"),
        ("multimodn", {"hidden": 0}, "hidden=0, encode="),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    name: str, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(FusionZooError) as caught:
        create_fusion(name, WIDTHS, 8, 4, **settings)
    assert says in str(caught.value)


def test_features_that_do_not_fit_are_one_clear_error() -> None:
    fusion = create_fusion("concat", {"image": 5, "text": 7}, 8, 3).double()
    given = fusions.features(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(FusionZooError, match="no features of modality 'text'"):
        fusion({"image": given["image"]})
    with pytest.raises(FusionZooError, match="features of 'text' are 5 wide"):
        fusion({**given, "text": given["image"]})
