"""Early fusions beside their authors' modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import torch
from einops import rearrange
from torch import Tensor, nn

from .case import CLASSES, DIM, WIDTHS, Answer, Case, Copied, Given

BLOCK = ("Cadene/block.bootstrap.pytorch", "block/models/networks/fusions/fusions.py")
TWO = (20, 30)
SMALL = (6, 5, 4)


def mmdynamics(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    loss, logits = module(vectors, target)
    return {"logits": logits, "loss": loss}


def embedding(_: ModuleType, module: Any, inputs: list[Tensor], __: Tensor) -> Answer:
    """Read a module that takes a list and has no classifier behind its last layer."""
    return {"embedding": module(inputs)}


def slices(chunks: int, rank: int) -> Any:
    """Return a reader of `chunks` pairs of linear layers that have the rank before the width."""

    def read(*layers: nn.Linear) -> Given:
        given = {}
        for name, part in {"weight": "(r s) i -> i (s r)", "bias": "(r s) -> (s r)"}.items():
            tensors = [rearrange(getattr(layer, name), part, r=rank) for layer in layers]
            given[name] = torch.stack(tensors).unflatten(0, (2, chunks))
        return given

    return read


def mcb(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    """Answer by the transforms of today's torch, which has those of the authors no more."""
    parts: dict[str, Any] = {
        "rfft": lambda x, _: torch.view_as_real(torch.fft.rfft(x)),
        "irfft": lambda x, _, signal_sizes: torch.fft.irfft(
            torch.view_as_complex(x), n=signal_sizes[0]
        ),
    }
    with mock.patch.multiple(torch, create=True, **parts):
        return {"embedding": module(vectors)}


def lmf(code: ModuleType) -> nn.Module:
    """Return LMF from where the features enter the product."""
    module = code.LMF(WIDTHS, WIDTHS, WIDTHS[2], (0.0,) * 4, DIM, 4)
    return without_networks(module)


def tfn(code: ModuleType) -> nn.Module:
    """Return TFN from where the features enter the product."""
    module = code.TFN(SMALL, SMALL, SMALL[2], (0.0,) * 4, 24)
    return without_networks(module)


def without_networks(module: Any) -> nn.Module:
    """Take the networks of each modality away."""
    module.audio_subnet = module.video_subnet = module.text_subnet = nn.Identity()
    return module


def apart(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    return {"embedding": module(*vectors)}


def score(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    """Return what TFN maps to between -3 and 3, computed in double precision."""
    with mock.patch.object(torch, "FloatTensor", torch.DoubleTensor):
        bounded = module.double()(*(x.double() for x in vectors))
    return {"embedding": ((bounded + 3) / 6).logit()}


def mmtm(_: ModuleType, module: Any, tokens: list[Tensor], __: Tensor) -> Answer:
    """Return the mean of the means of the gated tokens."""
    gated = module(*(x.mT for x in tokens))  # channels come first
    return {"embedding": torch.stack([x.mean(2) for x in gated]).mean(0)}


EARLY = (
    Case(
        "mmdynamics",
        "TencentAILabHealthcare/mmdynamics",
        "model.py",
        lambda code: code.MMDynamic(list(WIDTHS), [DIM], CLASSES, 0.0),
        mmdynamics,
        {
            "gates.{m}": "FeatureInforEncoder.{m}.clf.0",
            "encode.{m}": "FeatureEncoder.{m}.clf.0",
            "heads.{m}": "TCPClassifierLayer.{m}.clf.0",
            "confidence.{m}": "TCPConfidenceLayer.{m}.clf.0",
            "head": "MMClasifier.0.clf.0",
        },
        settings={"dropout": 0.0},
    ),
    Case(
        "mutan",
        *BLOCK,
        lambda code: code.Mutan(TWO, DIM, mm_dim=12, rank=3),
        embedding,
        {
            "factors.maps.{m}": "linear{m}",
            "slices": Copied(("merge_linear0", "merge_linear1"), slices(1, 3)),
            "out": "linear_out",
        },
        widths=TWO,
        settings={"width": 12, "rank": 3},
    ),
    Case(
        "block",
        *BLOCK,
        lambda code: code.Block(TWO, DIM, mm_dim=10, chunks=3, rank=3),
        embedding,
        {
            "factors.maps.{m}": "linear{m}",
            "slices.0": Copied(
                tuple(f"merge_linears{m}.{q}" for m in (0, 1) for q in (0, 1)), slices(2, 3)
            ),
            "slices.1": Copied(("merge_linears0.2", "merge_linears1.2"), slices(1, 3)),
            "out": "linear_out",
        },
        widths=TWO,
        settings={"width": 10, "chunks": 3, "rank": 3},
    ),
    Case(
        "mlb",
        *BLOCK,
        lambda code: code.MLB(TWO, DIM, mm_dim=24, activ_input="tanh", activ_output=""),
        embedding,
        {"factors.maps.{m}": "linear{m}", "out": "linear_out"},
        widths=TWO,
        settings={"width": 24},
    ),
    Case(
        "mfb",
        *BLOCK,
        lambda code: code.MFB(TWO, DIM, 8, 3, activ_input="", activ_output="", normalize=True),
        embedding,
        {"factors.maps.{m}": "linear{m}", "out": "linear_out"},
        widths=TWO,
        settings={"width": 8, "k": 3},
    ),
    Case(
        "mfh",
        *BLOCK,
        lambda code: code.MFH(TWO, DIM, 8, 3, activ_input="", activ_output="", normalize=True),
        embedding,
        {
            "factors.0.maps.{m}": "linear{m}_0",
            "factors.1.maps.{m}": "linear{m}_1",
            "out": "linear_out",
        },
        widths=TWO,
        settings={"width": 8, "k": 3},
    ),
    Case(
        "mcb",
        *BLOCK,
        lambda code: code.MCB(TWO, DIM, mm_dim=64, activ_output=""),
        mcb,
        {
            "bucket_{m}": "mcb.sketch{letter}.h",
            "sign_{m}": "mcb.sketch{letter}.s",
            "out": "linear_out",
        },
        widths=TWO,
        settings={"sketch_dim": 64, "normalise": False, "with_one": False},
        letters="12",
    ),
    Case(
        "lmf",
        "Justin1904/Low-rank-Multimodal-Fusion",
        "model.py",
        lmf,
        apart,
        {
            "factors": Copied(
                ("audio_factor", "video_factor", "text_factor"),
                lambda *factors: {str(m): x for m, x in enumerate(factors)},
            ),
            "rank_weights": Copied(("fusion_weights",), lambda x: {"": x[0]}),
            "bias": Copied(("fusion_bias",), lambda x: {"": x[0]}),
        },
        settings={"rank": 4},
    ),
    Case(
        "tfn",
        "Justin1904/TensorFusionNetworks",
        "model.py",
        tfn,
        score,
        {f"mlp.{2 * n - 1}": f"post_fusion_layer_{n}" for n in (1, 2, 3)},
        widths=SMALL,
        dim=1,
        settings={"hidden": 24},
    ),
    Case(
        "mmtm",
        "haamoon/mmtm",
        "mmtm.py",
        lambda code: code.MMTM(DIM, DIM, 4),
        mmtm,
        {"squeeze": "fc_squeeze", "excite.0": "fc_visual", "excite.1": "fc_skeleton"},
        widths=(DIM, DIM),
        lengths=(7, 4),
        settings={"ratio": 4, "gate": 1.0},
        prepare={"models.auxiliary.resnet.resnet": mock.MagicMock},
        identity=("project.0", "project.1"),
    ),
    Case(
        "embracenet",
        "idearibosome/embracenet",
        "embracenet_pytorch/embracenet.py",
        lambda code: code.EmbraceNet("cpu", WIDTHS, DIM),
        embedding,
        {"project.{m}": "docking_{m}"},
        training=True,  # both draw; evaluation draws in the authors' module alone
    ),
)
