"""`fusionzoo.analyse(data)`: what a data set needs of a fusion, or what a model makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig, EvaluateConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.inference.batches import encode_batches, open_data, open_model
from fusionzoo.inference.evaluate import encode_labels, labelled, tasks_of_model
from fusionzoo.model import FusionModel
from fusionzoo.structures import Features

from .advice import advise_fusion, advise_model
from .config import AnalyseConfig
from .emap import Interactions, interactions
from .pid import Pair
from .probed import decompose_data
from .read import read_features
from .sample_file import check_suffix


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of an analysis: of the data (`pid`), or of a model (`emap`)."""

    source: str
    pairs: tuple[Pair, ...] = ()
    emap: Interactions | None = None
    notes: tuple[str, ...] = ()
    advice: str
    pid_mode: str = "cvx"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = {"source": self.source, "unit": "bits", "advice": self.advice}
        found |= {"notes": list(self.notes)}
        if self.emap is not None:
            return {**found, "emap": self.emap.to_dict()}
        return {**found, "pid_mode": self.pid_mode, "pid": [pair.to_dict() for pair in self.pairs]}


def analyse(
    cfg: AnalyseConfig, model: FusionModel | None = None, dataset: PairedDataset | None = None
) -> Analysis:
    """Analyse the data that `cfg` names, or a model's answers on it if there is a model."""
    has_model = model is not None or bool(cfg.model)
    _check(cfg, has_model=has_model)
    if has_model:
        return _analyse_model(cfg, model, dataset)
    bench = BenchmarkConfig(
        plugins=cfg.plugins,
        data=cfg.data,
        encoders=cfg.encoders,
        folds=cfg.folds,
        encoder_epochs=cfg.encoder_epochs,
        tune=0,
        corruptions=False,
        jobs=cfg.jobs,
        num_workers=cfg.num_workers,
        device=cfg.device,
        seed=cfg.seed,
    )
    setup, notes, ids = read_features(bench, dataset, cfg.clusters)
    mode = cfg.pid_mode
    pairs = tuple(decompose_data(setup, mode, ids))
    source = str(cfg.data.get("root", cfg.data.get("name", ""))) or "data in memory"
    return Analysis(
        source=source,
        pairs=pairs,
        notes=(*notes, *(note for pair in pairs for note in pair.notes)),
        advice=advise_fusion(pairs),
        pid_mode=mode,
    )


def _check(cfg: AnalyseConfig, *, has_model: bool) -> None:
    """Refuse settings that another mode reads."""
    if has_model and (cfg.pid_mode != "cvx" or cfg.by_sample):
        raise FusionZooError(
            "--pid_mode and --by_sample are of data; a model is analysed by emap: leave them out,"
            " or --model"
        )
    if cfg.clusters is not None and cfg.pid_mode != "cvx":
        raise FusionZooError(
            f"--clusters {cfg.clusters}: --pid_mode {cfg.pid_mode} needs no clusters; leave one out"
        )
    if cfg.by_sample and cfg.pid_mode != "sample":
        raise FusionZooError(
            f"--by_sample {cfg.by_sample}: only --pid_mode sample has parts of each sample, not"
            f" {cfg.pid_mode}"
        )
    if cfg.by_sample:
        check_suffix(Path(cfg.by_sample))


def _analyse_model(
    cfg: AnalyseConfig, model: FusionModel | None, dataset: PairedDataset | None
) -> Analysis:
    settings = EvaluateConfig(
        model=cfg.model,
        data=cfg.data,
        split=cfg.split,
        num_workers=cfg.num_workers,
        device=cfg.device,
        plugins=cfg.plugins,
    )
    model = open_model(settings, model)
    opened = labelled(model, open_data(settings, model, dataset))
    complete = opened.present.all(1).nonzero()[:, 0]
    if len(complete) < 2 or len(model.modalities) < 2:
        raise FusionZooError(
            f"{opened.source}: {len(complete)} samples of split {cfg.split!r} have all of"
            f" {', '.join(model.modalities)}, and emap needs at least 2 of 2 modalities"
        )
    generator = torch.Generator().manual_seed(cfg.seed)
    chosen = complete[torch.randperm(len(complete), generator=generator)[: cfg.samples]]
    samples = opened.subset(chosen.sort().values)
    labels = encode_labels(model, samples)
    tasks = tasks_of_model(model, labels)

    def score(logits: Tensor) -> tuple[str, float]:
        return tasks.leading, tasks.metrics(logits.float(), labels)[tasks.leading]

    parts = [x for _, x in encode_batches(model, samples, settings, "encode", by_length=False)]
    features = {name: join_batches([part[name] for part in parts]) for name in parts[0]}
    found = interactions(model.fusion, features, score, completions=cfg.completions, seed=cfg.seed)
    note = f"{len(chosen)} of {len(complete)} complete samples of split {cfg.split!r}"
    return Analysis(source=opened.source, emap=found, notes=(note,), advice=advise_model(found))


def join_batches(parts: list[Features]) -> Features:
    """Put batches together, padded to the most tokens."""
    most = max(x.tokens.shape[1] for x in parts)
    tokens = [torch.nn.functional.pad(x.tokens, (0, 0, 0, most - x.tokens.shape[1])) for x in parts]
    masks = [torch.nn.functional.pad(x.mask, (0, most - x.mask.shape[1])) for x in parts]
    return Features(torch.cat(tokens), torch.cat(masks), torch.cat([x.pooled for x in parts]))
