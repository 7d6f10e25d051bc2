"""Build a model of encoders and a fusion by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import split_name
from .encoders import Encoder, adopt, create_encoder, shared_checkpoints
from .errors import FusionZooError
from .fusion import Fusion, create_fusion
from .model import FusionModel, Raw
from .targets import Target


def create_model(
    fusion: str | Raw = "gmu",
    encoders: Mapping[str, str | Raw | Encoder] | None = None,
    num_outputs: int | None = None,
    *,
    classes: Sequence[str] = (),
    targets: Sequence[Target] | None = None,
    dim: int = 128,
    kinds: Mapping[str, str] | None = None,
    assets: Path | None = None,
) -> FusionModel:
    """Build a model: `create_model("gmu", {"image": "timm/resnet18", "text": "chars"}, 10)`.

    A component is a name or `{"name": ..., **settings}`; an encoder may also be one that was built
    in Python, such as `wrap_encoder` makes of a module. `kinds` says what a modality holds whose
    name is not a kind (`{"xray": "image"}`). `targets` are what the model answers if that is not
    one class of `classes`; none at all gives it one idle output. `assets` is a model folder to read
    processors from.
    """
    if not encoders:
        raise FusionZooError("a model needs at least one encoder: encoders={'image': ...}")
    if num_outputs is None:
        widths = [one.width for one in targets or ()]
        num_outputs = len(classes) if targets is None else max(1, sum(widths))
    if num_outputs < 1:
        raise FusionZooError("a model needs num_outputs, or the names of its classes")
    with shared_checkpoints():
        built = {
            modality: _build_encoder(modality, encoder, (kinds or {}).get(modality), assets)
            for modality, encoder in encoders.items()
        }
    given = {"dim": dim, **_component(fusion)}
    name, settings = split_name(given, "fusion")
    dims = {modality: encoder.dim for modality, encoder in built.items()}
    head = create_fusion(name, dims, settings.pop("dim"), num_outputs, **settings)
    spec = {
        "num_outputs": num_outputs,
        "fusion": given,
        "encoders": {m: e.spec for m, e in built.items()},
    }
    spec["kinds"] = {m: e.kind for m, e in built.items()}
    if targets is not None:
        spec["targets"] = [one.spec for one in targets]
        refuse_other_answers(name, head)
    return FusionModel(built, head, spec, classes)


def _build_encoder(
    modality: str, encoder: str | Raw | Encoder, kind: str | None, assets: Path | None
) -> Encoder:
    if isinstance(encoder, Encoder):
        return adopt(encoder, modality, kind)
    name, settings = split_name(_component(encoder), f"encoders.{modality}")
    settings.setdefault("kind", kind)
    if assets is not None:
        settings |= {"assets": assets / modality}
    return create_encoder(modality, name, **settings)


def refuse_other_answers(name: str, fusion: Fusion) -> None:
    """Stop where a fusion's logits are those of one class, and other targets are asked for."""
    if fusion.classes_only:
        raise FusionZooError(
            f"fusion {name!r} joins the probabilities of classes: it learns objective"
            " 'classification' of one column `target`, without missing labels, and no other"
        )


def _component(given: str | Raw) -> dict[str, Any]:
    return {"name": given} if isinstance(given, str) else dict(given)
