"""Open the model and the data of an extraction: a model folder, or encoders without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusionzoo.config import EmbedConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.encoders import WRAPPED, Encoder
from fusionzoo.encoders.augment import refuse_augmentation
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.inference import open_for_model, rows_to_read
from fusionzoo.inputs.command import complete_data
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.model.loading import load
from fusionzoo.training.build import choose_encoders, encoders_at_hand

DEFAULT = "concat"
# Fusions whose only weights are linear maps, which are left out here.
FUSIONS: dict[str, dict[str, Any]] = {"concat": {"hidden": [], "presence_bits": False}}
FUSIONS |= {"max": {}, "mean": {}, "sum": {}}


def compose(
    dataset: PairedDataset, encoders: Mapping[str, Any], fusion: Mapping[str, Any] | None = None
) -> FusionModel:
    """Build an untrained model of pretrained encoders: `{"image": {"name": "timm/resnet18"}}`.

    Without `encoders`, those that the data set names; where the hub has to be reached and cannot
    be, those that training would take. The fused vector is the concatenation, mean, sum or maximum
    of the encoders' vectors.
    """
    name, settings = split_name(fusion or {"name": DEFAULT}, "fusion")
    if name not in FUSIONS:
        raise FusionZooError(
            f"--fusion {name}: without training its weights would be random; a model is composed"
            f" with {', '.join(FUSIONS)}.{did_you_mean(name, FUSIONS)} `fusionzoo train` trains"
            " others, and --model names the result"
        )
    if refused := sorted(settings.keys() - {"root_scale"}):
        raise FusionZooError(f"--fusion.{refused[0]}: a composed {name} has no settings")
    chosen = _encoders(dataset, encoders)
    parts = dict(create_model("sum", chosen, 1, dim=1, kinds=dataset.modalities).named_encoders())
    for modality, encoder in parts.items():
        _check_pretrained(modality, encoder)
    widths = {modality: encoder.dim for modality, encoder in parts.items()}
    if name != "concat" and len({*widths.values()}) > 1:
        shown = ", ".join(f"{modality} {width}" for modality, width in widths.items())
        raise FusionZooError(
            f"--fusion {name} needs encoders with vectors of one width, not of several ({shown}):"
            " --fusion concat takes any"
        )
    dim = sum(widths.values()) if name == "concat" else next(iter(widths.values()))
    model = create_model(
        {"name": name, "dim": dim, **FUSIONS[name], **settings}, parts, 1, kinds=dataset.modalities
    )
    _drop_maps(model.fusion)
    for weights in model.fusion.get_submodule("head").parameters():
        nn.init.zeros_(weights)  # idle; random, they would change the digest
    return model.eval()


def _encoders(dataset: PairedDataset, encoders: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoder of each modality to embed, with the widths that follow from the data."""
    for modality in encoders:
        dataset.check_modality(modality)
    built = {modality: x for modality, x in encoders.items() if isinstance(x, Encoder)}
    others = {m: x for m, x in encoders.items() if m not in built}
    settings = {m: {"name": x} if isinstance(x, str) else dict(x) for m, x in others.items()}
    if not encoders:
        settings, notes = encoders_at_hand(dataset, settings)
        print(*notes, sep="\n", end="\n" * bool(notes))
    chosen = {**choose_encoders(dataset, settings), **built}
    return {m: chosen[m] for m in dataset.modalities if m in (encoders or chosen)}


def _check_pretrained(modality: str, encoder: Encoder) -> None:
    """Refuse an encoder with random weights, as far as its settings tell."""
    spec = encoder.spec
    is_users = spec.get("name") == WRAPPED  # a module whose weights the user knows
    has_weights = any(True for _ in encoder.parameters())
    if not has_weights or spec.get("pretrained") or spec.get("weights") or is_users:
        return
    raise FusionZooError(
        f"--encoders.{modality}: the weights of {spec.get('name')} would be random: name a"
        f" pretrained encoder (timm/..., hf/...) or --encoders.{modality}.weights"
    )


def _drop_maps(fusion: nn.Module) -> None:
    """Replace every linear map but the idle head by the identity."""
    for parent in list(fusion.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child is not fusion.head:
                setattr(parent, name, nn.Identity())


def open_data_alone(cfg: EmbedConfig, data: DataSpec | None) -> PairedDataset:
    """Open the data that encoders without training read."""
    spec = complete_data(data or DataSpec(settings=cfg.data), cfg.target)
    spec.show()
    return spec.open()


def open_model_and_data(
    cfg: EmbedConfig, world: World, model: FusionModel | None, data: DataSpec | None
) -> tuple[FusionModel, PairedDataset, dict[str, Any]]:
    """Return the model on its device, the rows to embed, and the data set's settings.

    `model` and `data` replace those that `cfg` names.
    """
    load_plugins(cfg.plugins)
    is_composed = bool(cfg.encoders or cfg.fusion)
    if (cfg.model or model is not None) and is_composed:
        raise FusionZooError(
            "--encoders and --fusion compose a model without training: leave them out, or --model"
        )
    if not cfg.model and model is None and not is_composed:
        raise FusionZooError(
            "--model is missing: a model folder, or a run folder such as runs/a; or give --encoders"
            " and --fusion, to embed without training"
        )
    if model is None and cfg.model:
        model = load(cfg.model, world.device)
    # Labels are written as they stand, so only plain classes are read.
    targets: dict[str, str] | None = None if model is None or model.targets is None else {}
    refuse_augmentation(cfg.data)
    if model is None:
        dataset, settings = open_data_alone(cfg, data), dict(cfg.data)
        model = compose(dataset, cfg.encoders, cfg.fusion)
    else:
        dataset, settings = open_for_model(cfg, model, data, targets)
    rows = rows_to_read(model, dataset, cfg.split, warn=world.main)
    return model.to(world.device), rows, settings
