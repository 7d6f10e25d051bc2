"""Hybrid fusions beside their authors' modules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .case import CLASSES, DIM, WIDTHS, Answer, Case, Copied, Given

PAIR = (DIM, DIM)


class Encoder(nn.Module):
    """Give features where the authors' module has an encoder, with what it returns beside them."""

    feats_dim = DIM

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor, *_: object) -> tuple[Tensor, ...]:
        return (x,) * self.times


def medfuse(code: ModuleType) -> nn.Module:
    settings = SimpleNamespace(num_classes=CLASSES, labels_set="", fusion_type="lstm")
    return code.Fusion(settings, Encoder(2), Encoder(3))


def medfuse_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    both = [True] * len(vectors[0])
    return {"logits": module(vectors[0], both, vectors[1], both)["lstm"].logit()}


def without_layer(lstm: nn.LSTM) -> Given:
    """Write an LSTM of one layer as a cell."""
    return {name.removesuffix("_l0"): x for name, x in lstm.named_parameters()}


def drfuse(code: ModuleType) -> nn.Module:
    """Return DrFuse from where the features of both encoders enter."""
    module = code.DrFuseModel(DIM, CLASSES, 0.0, 1, 2)
    module.ehr_model = Encoder(3)
    for name in ("cxr_model_feat", "cxr_model_shared", "cxr_model_spec"):
        setattr(module, name, nn.Identity())
    return module


def drfuse_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    module.double()
    records, pictures = (x.double() for x in vectors)
    answer = module(records, pictures, None, records.new_ones(len(records)), None)
    return {"logits": answer["pred_final"].logit()}


def multimodn(code: ModuleType) -> nn.Module:
    from multimodn.decoders import ClassDecoder
    from multimodn.encoders import MLPEncoder

    encoders = [MLPEncoder(DIM, width, (8,)) for width in WIDTHS]
    decoders = [ClassDecoder(DIM, CLASSES, nn.Identity())]
    return code.MultiModN(DIM, encoders, decoders, 1.0, 0.0, device=torch.device("cpu"))


def multimodn_answer(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    """Answer after the last modality; the loss is the sum over an epoch of one batch."""
    state = module.init_state(len(target))
    for encoder, x in zip(module.encoders, vectors, strict=True):
        state = encoder(state, x)
    return {"logits": module.decoders[0](state)}


HYBRID = (
    Case(
        "medfuse",
        "nyuad-cai/MedFuse",
        "models/fusion.py",
        medfuse,
        medfuse_answer,
        {
            "project.1": "projection",
            "cell": Copied(("lstm_fusion_layer",), without_layer),
            "head": "lstm_fused_cls.0",
        },
        widths=PAIR,
        identity=("project.0",),
    ),
    Case(
        "drfuse",
        "dorothy-yao/drfuse",
        "models/drfuse.py",
        drfuse,
        drfuse_answer,
        {
            "shared": Copied(
                ("shared_project",),
                lambda x: {
                    f"{3 * n // 2}.{name}": p
                    for n in (0, 2, 4)
                    for name, p in x[n].named_parameters()
                },
            ),
            "attention": "attn_proj",
            "heads.1": "cxr_model_linear",
            "shared_head": "fuse_model_shared",
            "head": "final_pred_fc",
        },
        widths=PAIR,
        identity=("project.0", "project.1", "project_shared.0", "project_shared.1"),
    ),
    Case(
        "multimodn",
        "EPFLiGHT/MultiModN",
        "multimodn/multimodn.py",
        multimodn,
        multimodn_answer,
        {
            "state": Copied(("init_state.state_value",), lambda x: {"": x[0]}),
            "read.{m}": "encoders.{m}.layers.0",
            "update.{m}": "encoders.{m}.layers.1",
            "head": "decoders.0.fc",
        },
        settings={"hidden": 8},
        prepare={
            name: mock.MagicMock for name in ("torchmetrics", "torchsummary", "multimodn.history")
        },
    ),
)
