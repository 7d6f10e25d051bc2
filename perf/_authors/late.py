"""Late fusions beside their authors' modules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .case import CLASSES, DIM, EPOCH, WIDTHS, Answer, Case


def tmc(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    with mock.patch.object(torch.Tensor, "cuda", lambda x: x):  # the loss is written for a GPU
        _, evidence, loss = module(dict(enumerate(vectors)), target, EPOCH)
    return {"logits": evidence.log1p(), "loss": loss}


def averaged(losses: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    evidences, evidence = module(vectors)
    cpu = torch.device("cpu")
    loss = losses.get_loss(evidences, evidence, target, EPOCH, CLASSES, 50, 1, cpu)
    return {"logits": evidence.log1p(), "loss": loss}


def qmf(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    return {"logits": module(*vectors)[0]}  # the loss is part of the training script


def images() -> ModuleType:
    """Return a module in place of the encoders, which here give the vectors themselves."""
    stand_in = ModuleType("models.image")
    stand_in.ImageEncoder = lambda _: nn.Identity()  # type: ignore[attr-defined]
    return stand_in


class Classifier(nn.Module):
    """Give logits and features where the authors' module has an encoder with a classifier."""

    def __init__(self, _: object) -> None:
        super().__init__()
        self.clf = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return self.clf(x), x


def classifiers() -> Any:
    return SimpleNamespace(
        BertEncoder=None, BertClf=Classifier, ImageEncoder=None, ImageClf=Classifier
    )


def pdf(code: ModuleType) -> nn.Module:
    """Return PDF with layers as wide as these features instead of those of BERT and ResNet."""
    of_features = {DIM: DIM, 768: DIM, 2 * 768: 2 * DIM, 6144: DIM, 2 * 6144: 2 * DIM}
    linear = nn.Linear

    def narrow(width_in: int, width_out: int) -> nn.Linear:
        return linear(of_features[width_in], of_features.get(width_out, width_out))

    with mock.patch.object(nn, "Linear", narrow):
        return code.MultimodalLateFusionClf_pdf(SimpleNamespace(df=True))


def pdf_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    text, image = vectors
    return {"logits": module(text, None, None, image, "pdf_test")[0]}


QMF_SETTINGS = SimpleNamespace(
    img_hidden_sz=20, num_image_embeds=1, hidden=[], dropout=0.0, n_classes=CLASSES
)
LISTS = [[width] for width in WIDTHS]
LATE = (
    Case(
        "tmc",
        "hanmenghan/TMC",
        "TMC ICLR/model.py",
        lambda code: code.TMC(CLASSES, len(WIDTHS), LISTS, 50),
        tmc,
        {"heads.{m}": "Classifiers.{m}.fc.0"},
    ),
    Case(
        "ecml",
        "jiajunsi/RCML",
        "model.py",
        lambda code: code.RCML(len(WIDTHS), LISTS, CLASSES),
        averaged,
        {"heads.{m}": "EvidenceCollectors.{m}.net.0"},
    ),
    Case(
        "dbf",
        "bezirganyan/DBF_uncertainty",
        "model.py",
        lambda code: code.DBFModel(len(WIDTHS), LISTS, CLASSES, aggregation="dbf"),
        averaged,
        {"heads.{m}": "EvidenceCollectors.{m}.net.0"},
    ),
    Case(
        "qmf",
        "QingyangZhang/QMF",
        "RGBD-scene-recognition/models/QMF.py",
        lambda code: code.QMF(QMF_SETTINGS),
        qmf,
        {"heads.0": "clf_rgb.0", "heads.1": "clf_depth.0"},  # `clf_depth_rgb` gives no answer
        widths=(20, 20),
        prepare={"models.image": images},
    ),
    Case(
        "pdf",
        "Yinan-Xia/PDF",
        "src/models/latefusion_pdf.py",
        pdf,
        pdf_answer,
        {
            "heads.0": "txtclf.clf",
            "heads.1": "imgclf.clf",
            **{
                f"confidence.{m}.{2 * n}": f"ConfidNet_{name}.{n}"
                for m, name in enumerate(("txt", "img"))
                for n in (0, 1, 2)
            },
        },
        widths=(DIM, DIM),
        settings={"linear_confidence": True},
        prepare={"src.models.bert": classifiers, "src.models.image": classifiers},
    ),
)
