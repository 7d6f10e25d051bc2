"""Hybrid fusions beside their authors' modules."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fusionzoo.fusion import Fusion, create_fusion

from .case import CLASSES, DIM, WIDTHS, Answer, Case, Copied, Given, features_of, same_names

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
    part = {name: import_module(f"multimodn.{name}") for name in ("encoders", "decoders")}
    encoders = [part["encoders"].MLPEncoder(DIM, width, (8,)) for width in WIDTHS]
    decoders = [part["decoders"].ClassDecoder(DIM, CLASSES, nn.Identity())]
    return code.MultiModN(DIM, encoders, decoders, 1.0, 0.0, device=torch.device("cpu"))


def multimodn_answer(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    """Answer after the last modality; the loss is part of the training loop."""
    state = module.init_state(len(target))
    for encoder, x in zip(module.encoders, vectors, strict=True):
        state = encoder(state, x)
    return {"logits": module.decoders[0](state)}


def misa(code: ModuleType) -> nn.Module:
    """Return MISA from where the last states of its LSTMs enter."""
    names = ("embedding_size", "visual_size", "acoustic_size")
    sizes = {name: width // 4 for name, width in zip(names, QUARTERS, strict=True)}
    settings = SimpleNamespace(
        **sizes,
        **{"num_classes": DIM, "hidden_size": DIM, "dropout": 0.0, "activation": nn.ReLU},
        **{"rnncell": "lstm", "use_bert": False, "use_cmd_sim": True, "word2id": {"": 0}},
    )
    module = code.MISA(settings)
    module.embed = nn.Identity()
    return module


def misa_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    """Answer without the parts that differ: activation and norm of the maps, and transformer."""

    def states(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        return x.unflatten(1, (2, -1)).transpose(0, 1).chunk(2, dim=-1)

    module.extract_features = states
    for letter in "tva":
        setattr(module, f"project_{letter}", getattr(module, f"project_{letter}")[0])
    module.transformer_encoder = nn.Identity()
    text, picture, sound = vectors
    answer = module(text, picture, sound, torch.ones(len(text)), None, None, None)
    return {"embedding without norms and transformer": answer}


def i2moe(code: ModuleType) -> nn.Module:
    """Return I2MoE with experts that concatenate."""
    dims = {str(m): width for m, width in enumerate(PAIR)}
    expert = Listed(create_fusion("concat", dims, DIM, CLASSES))
    return code.InteractionMoE(len(PAIR), expert, False, DIM, 24)


class Listed(nn.Module):
    """Call a fusion of ours with a list of vectors."""

    def __init__(self, fusion: Fusion) -> None:
        super().__init__()
        self.fusion = fusion

    def forward(self, vectors: list[Tensor]) -> Tensor:
        return self.fusion(features_of(vectors)).logits


def with_bits(layer: nn.Linear) -> Given:
    """Write a layer as one that also reads the presence bits, by weights of 0."""
    zeros = layer.weight.new_zeros(len(layer.weight), len(PAIR))
    return {"weight": torch.cat([layer.weight, zeros], dim=1), "bias": layer.bias}


def i2moe_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    return {"logits": module.inference(vectors)[2]}


class Gaussian(nn.Linear):
    """Give the mean and the log variance of a Gaussian by one layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).chunk(2, dim=-1)


def mvae_poe(code: ModuleType) -> nn.Module:
    """Return MVAE with linear encoders, and without decoders, which its answer does not read."""
    module = code.MVAE(DIM)
    module.image_encoder, module.text_encoder = (Gaussian(width, 2 * DIM) for width in PAIR)
    module.image_decoder = module.text_decoder = nn.Identity()
    return module


def mvae_poe_answer(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    return {"embedding": module.infer(*vectors)[0]}


QUARTERS = (20, 24, 12)  # four states of each LSTM
HYBRID = (
    Case(
        "misa",
        "declare-lab/MISA",
        "src/models.py",
        misa,
        misa_answer,
        {
            "project.{m}": Copied(("project_{letter}",), lambda x: same_names(x[0])),
            "private.{m}": Copied(("private_{letter}",), lambda x: same_names(x[0])),
            "shared": "shared.shared_1",
            "decode.{m}": "recon_{letter}.recon_{letter}_1",
            "join.0": "fusion.fusion_layer_1",
            "join.3": "fusion.fusion_layer_3",
        },
        widths=QUARTERS,
        prepare={"transformers": mock.MagicMock, "utils": mock.MagicMock},
        zero=("block.attention.out", "block.mlp.3"),
        letters="tva",
    ),
    Case(
        "i2moe",
        "Raina-Xin/I2MoE",
        "src/imoe/InteractionMoE.py",
        i2moe,
        i2moe_answer,
        {
            **{f"experts.{e}": f"interaction_experts.{e}.fusion_model.fusion" for e in range(4)},
            "router.0": Copied(("reweight.mlp.network.0",), with_bits),
            "router.3": "reweight.mlp.network.3",
        },
        widths=PAIR,
        settings={"router_width": 24},
        identity=("project.0", "project.1"),
    ),
    Case(
        "mvae_poe",
        "mhw32/multimodal-vae-public",
        "mnist/model.py",
        mvae_poe,
        mvae_poe_answer,
        {"experts.0": "image_encoder", "experts.1": "text_encoder"},
        widths=PAIR,
    ),
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
