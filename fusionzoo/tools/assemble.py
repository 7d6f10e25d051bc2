"""`fusionzoo assemble`: join models that were trained apart by a late fusion, without training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.config import split_name
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import Usage, run_command
from fusionzoo.config.schema import option
from fusionzoo.console import command_line
from fusionzoo.datasets.checks import list_names
from fusionzoo.datasets.opening.as_trained import SHARED_BY_FILES
from fusionzoo.datasets.opening.complete import TABLE
from fusionzoo.datasets.sources.cell_kinds import is_cell_kind
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError, did_you_mean, keyword_errors
from fusionzoo.fusion import FUSIONS, UNIMODAL, TrainedHead, fixed_rules
from fusionzoo.loading import load
from fusionzoo.model import FusionModel, create_model
from fusionzoo.targets import Number, Target
from fusionzoo.trained_on import TrainedOn
from fusionzoo.training.report import Run

ASSEMBLE = Usage(
    name="assemble",
    purpose="Join models that were trained apart by a late fusion, without training.",
    words=("MODALITY=MODEL", "..."),
    examples=(
        "image=runs/a text=runs/b --out runs/ab",
        "image=runs/a text=runs/b --fusion late_mean --fusion.space prob --out runs/ab",
    ),
    common=("fusion", "out", "plugins"),
    more="Each model lends the modality's encoder and classifier: a model of one modality its"
    " fusion, a model of several its head of that modality.",
)


@dataclass(frozen=True, kw_only=True)
class AssembleConfig:
    """Settings of `fusionzoo assemble`."""

    models: dict[str, str] = option({}, "modality -> model or run folder: `image=runs/a`")
    fusion: Tree = option({"name": "late_mean"}, "late fusion without weights of its own")
    out: str = option("", "model folder to write (required)")
    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )


@dataclass(frozen=True, kw_only=True)
class LentModality:
    """What one model lends: a modality's encoder and classifier."""

    modality: str  # in the joint model
    own_name: str  # in this model
    folder: str
    model: FusionModel

    @property
    def encoder(self) -> Encoder:
        """The modality's encoder."""
        return dict(self.model.named_encoders())[self.own_name]

    @property
    def classifies_alone(self) -> bool:
        """Whether the model has no other modality, so that its answers are this one's."""
        return len(self.model.modalities) == 1

    @property
    def head_settings(self) -> dict[str, Any]:
        """The settings of the `TrainedHead`."""
        shared = {"modality": self.own_name, "num_outputs": self.model.spec["num_outputs"]}
        if self.classifies_alone:
            return {**self.model.spec["fusion"], **shared}
        if self.model.heads is None:
            raise FusionZooError(
                f"{self.folder} has {list_names(list(self.model.modalities))}, and no classifier of"
                f" {self.own_name!r} alone: train it with --train.unimodal true, or a model of this"
                " modality only"
            )
        return {"name": UNIMODAL, "dim": self.model.heads.dim, **shared}

    def head_weights(self) -> dict[str, Tensor]:
        """Return the classifier's weights."""
        if self.classifies_alone:
            return self.model.fusion.state_dict()
        assert self.model.heads is not None
        return self.model.heads.heads[self.own_name].state_dict()

    def temperatures(self) -> Tensor:
        """Return what each logit (K,) is divided by; a head of a joint model was not calibrated."""
        targets, calibration = self.model.answer_targets, self.model.calibration
        known = {} if calibration is None or not self.classifies_alone else calibration.targets
        values = [known[x.name].temperature if x.name in known else None for x in targets]
        return torch.tensor(
            [
                1.0 if value is None else value
                for target, value in zip(targets, values, strict=True)
                for _ in range(target.width)
            ]
        )


@dataclass(frozen=True)
class Outputs:
    """Where a model's logits stand among those of the joint model, and in which unit."""

    order: list[int]
    scale: list[float]
    shift: list[float]

    @classmethod
    def between(cls, first: LentModality, other: LentModality) -> Outputs:
        """Compare what two models answer; a difference that cannot be bridged is an error."""
        wanted, answered = first.model.answer_targets, other.model.answer_targets
        starts: dict[str, tuple[Target, int]] = {}
        start = 0
        for target in answered:
            starts[target.name] = (target, start)
            start += target.width
        names = [target.name for target in wanted]
        if {*names} != {*starts}:
            raise FusionZooError(
                f"{first.folder} answers {list_names(names)}, {other.folder}"
                f" {list_names([*starts])}: only models of the same targets can be joined"
            )
        parts = [cls._of_target(first, other, target, *starts[target.name]) for target in wanted]
        return cls(
            [x for part in parts for x in part.order],
            [x for part in parts for x in part.scale],
            [x for part in parts for x in part.shift],
        )

    @classmethod
    def _of_target(
        cls, first: LentModality, other: LentModality, wanted: Target, found: Target, start: int
    ) -> Outputs:
        both = f"{first.folder} and {other.folder}"
        if wanted.kind != found.kind:
            raise FusionZooError(
                f"{wanted.name!r} is {wanted.kind} in {first.folder} and {found.kind} in"
                f" {other.folder}: only models of the same targets can be joined"
            )
        if lacking := [
            f"only {folder} has {', '.join(sorted(one))}"
            for folder, one in (
                (first.folder, {*wanted.classes} - {*found.classes}),
                (other.folder, {*found.classes} - {*wanted.classes}),
            )
            if one
        ]:
            raise FusionZooError(
                f"{both} were trained on other classes of {wanted.name!r}: {'; '.join(lacking)}."
                " Train both on tables with the same classes"
            )
        places = list(range(start, start + found.width))
        ones, zeros = [1.0] * wanted.width, [0.0] * wanted.width
        if wanted.kind in ("classification", "multilabel"):
            return cls([places[found.classes.index(x)] for x in wanted.classes], ones, zeros)
        if wanted.classes != found.classes:
            raise FusionZooError(
                f"{both} put the levels of {wanted.name!r} in another order:"
                f" {', '.join(wanted.classes)}, and {', '.join(found.classes)}"
            )
        if type(wanted) is Number:
            shift = (found.mean - wanted.mean) / wanted.deviation
            return cls(places, [found.deviation / wanted.deviation], [shift])
        if (wanted.mean, wanted.deviation) != (found.mean, found.deviation):
            raise FusionZooError(f"{both} measure {wanted.name!r} in another unit")
        return cls(places, ones, zeros)

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits (K,) of the part as those of the joint model."""
        return logits[self.order] * torch.tensor(self.scale) + torch.tensor(self.shift)


def assemble_command(args: Sequence[str]) -> int:
    """Run `fusionzoo assemble MODALITY=MODEL ... --out FOLDER`; return its exit code."""
    flags: list[str] = []
    problems: list[str] = []
    before = ""
    for word in args:
        modality, sign, folder = word.partition("=")
        is_value = before.startswith("--") and "=" not in before
        if word.startswith("-") or (is_value and not sign):
            flags.append(word)
        elif not (modality and folder):
            problems.append(f"{word}: expected MODALITY=MODEL, such as image=runs/a")
        elif f"--models.{modality}" in flags:
            problems.append(f"{word}: {modality!r} has a model already")
        else:
            flags += [f"--models.{modality}", folder]
        before = word

    def start(cfg: AssembleConfig) -> int:
        if problems:
            raise FusionZooError(problems[0])
        _, notes = _assemble(cfg.models, cfg.fusion, cfg.out, cfg.plugins)
        for note in notes:
            print(f"note    {note}")
        print(f"model   {cfg.out}   (fusionzoo.load reads it)")
        print(f"next    {command_line('predict')} {cfg.out} FILE --out predictions.csv")
        return 0

    return run_command(AssembleConfig, ASSEMBLE, flags, start)


@keyword_errors
def assemble(
    models: Mapping[str, str | os.PathLike[str] | Run],
    *,
    fusion: str | Mapping[str, Any] = "late_mean",
    out: str | os.PathLike[str],
    plugins: str | Sequence[str] = (),
) -> FusionModel:
    """Join models that were trained apart: `assemble({"image": "runs/a", "text": "runs/b"}, ...)`.

    Nothing is trained: each model (a run, its folder or a model folder) lends the modality's
    encoder and classifier, and `fusion`, a late fusion without weights of its own, joins the
    answers. Writes the model folder `out` and returns the model. Given one modality it answers as
    that modality's model does.
    """
    folders = {name: os.fspath(x.folder if isinstance(x, Run) else x) for name, x in models.items()}
    settings = {"name": fusion} if isinstance(fusion, str) else fusion
    model, notes = _assemble(folders, settings, os.fspath(out), plugins)
    for note in notes:
        print(note)
    return model


def _assemble(
    folders: Mapping[str, str], fusion: Mapping[str, Any], out: str, plugins: str | Sequence[str]
) -> tuple[FusionModel, list[str]]:
    """Build, save and return the joint model, and what is worth saying of it."""
    if not out:
        raise FusionZooError("--out is missing: a folder for the model")
    if len(folders) < 2:
        raise FusionZooError(
            "two models or more are joined: fusionzoo assemble image=runs/a text=runs/b --out"
            " runs/ab"
        )
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise FusionZooError(f"--out {out}: there is something already; name another folder")
    name, settings = split_name(fusion, "fusion")
    _check_fusion(name, settings)
    parts = [_open(modality, folder, plugins) for modality, folder in folders.items()]
    outputs = [Outputs.between(parts[0], part) for part in parts]
    heads = {part.modality: part.head_settings for part in parts}
    first = parts[0].model
    model = create_model(
        {
            "name": name,
            **settings,
            "dim": sum(head["dim"] for head in heads.values()),
            "trained_heads": heads,
        },
        {part.modality: part.encoder for part in parts},
        first.spec["num_outputs"],
        classes=first.classes,
        targets=first.targets,
        kinds={part.modality: part.encoder.kind for part in parts},
    )
    for part, mapping in zip(parts, outputs, strict=True):
        _fill_head(model.fusion.get_submodule(f"trained_heads.{part.modality}"), part, mapping)
    prior = _joint_prior(parts, outputs)
    _set_prior(model, name, prior)
    trained_on, notes = _joint_data(parts)
    model.complete(
        prior=prior,
        standardise={
            part.modality: part.model.standardise[part.own_name]  # type: ignore[misc]
            for part in parts
            if part.own_name in part.model.standardise
        },
        trained_on=trained_on,
        first_weights={
            part.modality: part.model.spec.get("first_weights", {}).get(part.own_name, {})
            for part in parts
        },
    )
    model.eval().save(out)
    return model, [*_lost_thresholds(parts), *notes]


def _check_fusion(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a fusion with weights of its own, before any model is read."""
    FUSIONS[name]
    if name not in fixed_rules():
        raise FusionZooError(
            f"--fusion {name}: it needs training; models that were trained apart are joined by"
            f" {', '.join(fixed_rules())}.{did_you_mean(name, fixed_rules())}"
        )
    for key in ("dim", "linear_skip", "trained_heads"):
        if key in settings:
            raise FusionZooError(f"--fusion.{key}: it follows from the models; leave it out")


def _open(modality: str, folder: str, plugins: str | Sequence[str]) -> LentModality:
    """Load a model and find the modality in it."""
    model = load(folder, plugins=plugins)
    if not (model.classes or model.targets):
        raise FusionZooError(f"{folder} was trained without a target: it has no answer to join")
    stored = model.trained_on.settings if model.trained_on else {}
    names = list(model.modalities)
    if modality in names:
        return LentModality(modality=modality, own_name=modality, folder=folder, model=model)
    if len(names) == 1 and (stored.get("columns") or {}).get(names[0]):
        return LentModality(modality=modality, own_name=names[0], folder=folder, model=model)
    raise FusionZooError(
        f"{folder} has no modality {modality!r}.{did_you_mean(modality, names)} It has:"
        f" {', '.join(names)}."
    )


def _fill_head(head: Any, part: LentModality, outputs: Outputs) -> None:
    """Copy the classifier's weights, and what brings its logits into the joint model's form."""
    assert isinstance(head, TrainedHead)
    head.classifier.load_state_dict(part.head_weights())
    head.order.copy_(torch.tensor(outputs.order))
    head.scale.copy_(torch.tensor(outputs.scale) / part.temperatures()[outputs.order])
    head.shift.copy_(torch.tensor(outputs.shift))


def _joint_prior(parts: Sequence[LentModality], outputs: Sequence[Outputs]) -> Tensor | None:
    """Return exp(mean logits) (K,) of the models' priors; None if one does not know its own."""
    stored = [part.model.spec.get("prior") for part in parts]
    if not all(stored):
        return None
    logits = [
        mapping.apply(torch.tensor(prior).clamp(min=1e-9).log())
        for prior, mapping in zip(stored, outputs, strict=True)
    ]
    return torch.stack(logits).mean(0).exp()


def _set_prior(model: FusionModel, name: str, prior: Tensor | None) -> None:
    """Give `late_poe` with `prior="train"` the class frequencies that it divides by."""
    if model.spec["fusion"].get("prior") != "train":
        return
    if prior is None:
        raise FusionZooError(
            f"--fusion.prior train: a model does not say how frequent its classes were; {name} with"
            " --fusion.prior uniform needs no such thing"
        )
    model.fusion.get_buffer("log_prior").copy_(prior.log().log_softmax(0))


def _lost_thresholds(parts: Sequence[LentModality]) -> list[str]:
    """Say which models chose thresholds of their own for labels, which the joint one has not."""
    return [
        f"{part.folder}: its thresholds of labels are not those of the joint model, which names the"
        " labels above 0.5"
        for part in parts
        if part.model.calibration is not None
        and any(x.thresholds for x in part.model.calibration.targets.values())
    ]


def _joint_data(parts: Sequence[LentModality]) -> tuple[TrainedOn | None, list[str]]:
    """Merge what the models remember of their data; also say what was left out."""
    known = [part.model.trained_on for part in parts]
    if any(x is None for x in known):
        return None, ["one of the models does not say what data it was trained on, so name columns"]
    settings, notes = _joint_settings(parts)
    numbered = any(x.numbered for x in known if x)
    ids = {
        split: torch.cat([x.ids[split] for x in known if x]).unique()
        for split in ("train", "val")
        # Without ids of their own, samples of several tables cannot be told apart.
        if not numbered and all(x and split in x.ids for x in known)
    }
    return TrainedOn(settings=settings, ids=ids, numbered=numbered), notes


def _has_numbers(part: LentModality) -> bool:
    return part.encoder.kind not in ("image", "text", "audio") or part.model.targets is not None


def _add_cell_kinds(
    kinds: dict[str, Any], part: LentModality, own_kinds: Mapping[str, Any], columns: Sequence[str]
) -> None:
    """Add what the cells of a modality's columns are: `{"weight": "number kg"}`."""
    for name in columns:
        kind = str(own_kinds.get(name, ""))
        if is_cell_kind(kind) and kinds.setdefault(name, kind) != kind:
            raise FusionZooError(
                f"{part.folder} read {name!r} as {kind}, another of the models as {kinds[name]}, so"
                " no table can be read for both: train them with the same --data.kinds"
            )


def _joint_settings(parts: Sequence[LentModality]) -> tuple[dict[str, Any], list[str]]:
    """Merge the settings of the data: columns and kinds by modality, others where they agree."""
    stored = [dict(part.model.trained_on.settings) for part in parts if part.model.trained_on]
    notes: list[str] = []
    columns: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    roles: list[dict[str, Any]] = []
    for part, settings in zip(parts, stored, strict=True):
        own_columns = dict(settings.pop("columns", None) or {})
        own_kinds = dict(settings.pop("kinds", None) or {})
        settings.pop("modalities", None)
        settings.pop("augment", None)
        if part.own_name in own_columns:
            columns[part.modality] = own_columns[part.own_name]
        if part.own_name in own_kinds:
            kinds[part.modality] = own_kinds[part.own_name]
        _add_cell_kinds(kinds, part, own_kinds, word_list(own_columns.get(part.own_name) or []))
        taken = part.model.modalities
        roles.append({key: value for key, value in own_columns.items() if key not in taken})
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for settings in stored for key in settings):
        values = [settings.get(key) for settings in stored]
        if key == "decimal":  # nothing to a model that reads and answers no numbers
            values = [x for x, y in zip(values, parts, strict=True) if _has_numbers(y)] or values
        if all(value == values[0] for value in values):
            merged[key] = values[0]
        elif key in SHARED_BY_FILES and key not in ("group_column", "weight_column"):
            every = zip(parts, stored, strict=True)
            shown = ", ".join(f"{x.folder} {settings.get(key)!r}" for x, settings in every)
            raise FusionZooError(
                f"the models read tables with another --data.{key} ({shown}), so no table can be"
                " read for both: train them with the same"
            )
        else:
            notes.append(
                f"the models differ in --data.{key}, which the joint one does not remember"
            )
    for role in dict.fromkeys(key for columns_of in roles for key in columns_of):
        words = {str(columns_of[role]) for columns_of in roles if role in columns_of}
        if len(words) == 1:
            columns[role] = next(columns_of[role] for columns_of in roles if role in columns_of)
        else:
            notes.append(
                f"the models differ in the column of {role} ({', '.join(sorted(words))}), which the"
                f" joint one does not remember: --data.columns.{role} names it"
            )
    if merged.get("name") == TABLE:
        merged |= {"columns": columns, "kinds": kinds}
    return merged, notes
