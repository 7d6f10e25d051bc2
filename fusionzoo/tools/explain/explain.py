"""`fusionzoo explain`: why a model answers as it does, by modality and within each modality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.config import PredictConfig
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import Count, ModelUse, option
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.collate import collate_items, prepare
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError, keyword_errors, one_line
from fusionzoo.ground.console import print_table
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.ground.progress import progress_bar
from fusionzoo.inference import data_settings_of, encode_batches, open_data, open_model
from fusionzoo.inputs.data import Data, configure
from fusionzoo.model.fusion_model import FusionModel, encode_rows
from fusionzoo.model.standardise import standardise
from fusionzoo.structures import Batch, Features, Sample, evaluating
from fusionzoo.training.report import Model, model_of, path_of

from .attribution import MAX_EXACT, Evaluate, Question, Subset, exact_shares, sampled_shares
from .parts import PARTS, PartEffect, Parts, Place, SeveralItems
from .results import Explanation, Explanations, summary_rows

ORDERS = 32  # pairs of random orders, of more than MAX_EXACT modalities or columns
ROWS = 512  # rows of one pass of the fusion: samples times subsets
HELP = """
Explain a model's answers: `fusionzoo explain runs/a my.csv --html why.html`.

What each modality adds to each answer (Shapley values), the answer without it, and what its words,
regions, seconds or columns add. docs/explain.md says how to read it.
"""


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(ModelUse):
    """Settings of `fusionzoo explain`."""

    data: Tree = option({}, "data set and its settings; empty = those of the training")
    split: str = option("all", "train | val | test | all")
    answer: str = option("", "of several targets, the one to explain; empty = the first")
    label: str = option("", "class or label to explain; empty = the one that the model predicts")
    samples: int = option(20, "samples whose words, regions, ... are explained too, at random")
    parts: Count = option(64, "most words, regions or stretches of a value; neighbours are joined")
    background: Count = option(16, "tabular: samples whose cells stand in for those hidden")
    seed: int = option(0, "of the choice of samples, of background and of orders")
    html: str = option("", "page to write, with pictures, texts and players")
    out: str = option("", "file for the figures, .json or .csv (a row per sample)")


@keyword_errors
def explain(model: Model, data: Data = None, **settings: Any) -> Explanations:
    """Explain a model's answers: `explain("runs/a", "my.csv")[0].modalities`.

    Of every sample the exact Shapley value of each modality, and the answer without it; of at most
    `samples` also what each word, region, second, column or step adds. `data` is what `predict`
    takes; without it, the data that the model was trained on. Further settings are those of
    `fusionzoo explain`: `split`, `answer`, `label`, `samples`, `parts`, `background`, `seed`, ...

    The score is the log-odds of the predicted class (or of `label`), or a number in the target's
    units. A modality's value is that of Shapley (1953): its mean effect over all orders in which
    modalities may be added. Beyond 8 modalities it is estimated, with its standard error.
    """
    cfg, spec = configure(ExplainConfig, data, {**settings, "model": path_of(model)})
    return _explain(cfg, model_of(model), spec)


@torch.no_grad()
def _explain(cfg: ExplainConfig, model: FusionModel | None, data: DataSpec | None) -> Explanations:
    use = PredictConfig.of(cfg)
    model = open_model(use, model)
    question = Question.of(model, cfg.answer, cfg.label)
    dataset = open_data(use, model, data)
    rows: list[Explanation] = []
    for batch, features in encode_batches(model, dataset, use, "modalities", by_length=False):
        rows += explain_batch(model, question, batch, features, cfg)
    if not rows:
        raise FusionZooError(f"{dataset.source}: split {cfg.split!r} has no samples to explain")
    explainer = PartsExplainer(model, question, dataset, cfg)
    rows = explainer.add_parts(rows)
    return Explanations(rows, dataset, explainer.methods, explainer.notes)


def explain_batch(
    model: FusionModel,
    question: Question,
    batch: Batch,
    features: Mapping[str, Features],
    cfg: ExplainConfig,
) -> list[Explanation]:
    """Explain the answers to encoded samples by modality."""
    names = list(features)
    chosen = question.choose(fuse_subsets(model, features, [frozenset(names)])[0])

    def evaluate(subsets: Sequence[Subset]) -> Tensor:
        return question.score(fuse_subsets(model, features, subsets), chosen)

    if len(names) <= MAX_EXACT:
        shares = exact_shares(evaluate, names)
    else:
        shares = sampled_shares(lambda _: evaluate, names, ORDERS, cfg.seed)
    fewer = [frozenset(names), *(frozenset(names) - {name} for name in names)]
    logits = fuse_subsets(model, features, fewer)
    answers = [question.decode(x) for x in logits]
    scores = question.score(logits[0], chosen)
    present = batch.present.tolist()
    return [
        Explanation(
            id=sample_id,
            answer=answers[0][row],
            label=question.labels[int(chosen[row])] if question.labels else "",
            unit=question.unit(int(chosen[row])),
            score=float(scores[row]),
            empty=float(shares.empty[row]),
            modalities={name: float(x[row]) for name, x in shares.values.items()},
            errors={name: float(x[row]) for name, x in shares.errors.items()},
            without={
                n: x[row] for n, x, has in zip(names, answers[1:], present[row], strict=True) if has
            },
        )
        for row, sample_id in enumerate(batch.ids)
    ]


def fuse_subsets(
    model: FusionModel, features: Mapping[str, Features], subsets: Sequence[Subset]
) -> Tensor:
    """Return the logits of samples given each subset of modalities: (S, N, K), on the CPU."""
    count = len(next(iter(features.values())).pooled)
    at_once = max(1, ROWS // max(1, count))
    parts = []
    with evaluating(model):
        for first in range(0, len(subsets), at_once):
            chunk = subsets[first : first + at_once]
            repeated = {
                n: _keep_in(x, [n in subset for subset in chunk]) for n, x in features.items()
            }
            logits = model.calibrated_logits(repeated).double().cpu()
            parts.append(logits.unflatten(0, (len(chunk), count)))
    return torch.cat(parts)


def _keep_in(features: Features, keep: list[bool]) -> Features:
    """Repeat features (N, ...) for each subset, present in those that keep them: (S * N, ...)."""
    is_in = torch.tensor(keep, device=features.mask.device).repeat_interleave(len(features.mask))
    repeats = len(keep)
    return Features(
        features.tokens.repeat(repeats, 1, 1),
        features.mask.repeat(repeats, 1) & is_in[:, None],
        features.pooled.repeat(repeats, 1),
    )


class PartsExplainer:
    """Explains the answers to some samples by the parts of their values."""

    def __init__(
        self, model: FusionModel, question: Question, dataset: PairedDataset, cfg: ExplainConfig
    ) -> None:
        self.model, self.question, self.dataset, self.cfg = model, question, dataset, cfg
        self.notes: list[str] = []
        self.kinds = {
            name: PARTS[kind](cfg.parts)
            for name, kind in model.modalities.items()
            if kind in PARTS and dataset.modalities.get(name) == kind
        }
        self.methods = {name: f"{x.method}: {x.hidden_by}" for name, x in self.kinds.items()}
        without = {name: kind for name, kind in model.modalities.items() if kind not in PARTS}
        for name, kind in without.items():
            self.notes.append(f"{name}: values of kind {kind} have no parts to explain")
        self.backgrounds: dict[str, list[Any]] = {}

    def add_parts(self, rows: Sequence[Explanation]) -> list[Explanation]:
        """Return the explanations, at most `cfg.samples` of them with parts."""
        count = min(self.cfg.samples, len(rows)) if self.kinds else 0
        if count <= 0:
            return list(rows)
        generator = torch.Generator().manual_seed(self.cfg.seed)
        drawn = torch.randperm(len(rows), generator=generator)[:count].sort().values.tolist()
        self.backgrounds = {
            name: self._draw_background(name)
            for name, parts in self.kinds.items()
            if parts.method == "shapley"
        }
        position = {sample_id: number for number, sample_id in enumerate(self.dataset.ids)}
        result = list(rows)
        for number in progress_bar(drawn, desc="parts", unit="sample"):
            sample = self.dataset[position[rows[number].id]]
            if sample is not None:
                result[number] = self._with_parts(rows[number], sample)
        if count < len(rows):
            drawn_of = f"{count} of {len(rows):,} samples, drawn at random,"
            self.notes.append(f"{drawn_of} are explained by their parts: --samples")
        return result

    def _with_parts(self, row: Explanation, sample: Sample) -> Explanation:
        batch: Batch = self.model.collate()([sample]).to(self.model.device)
        with evaluating(self.model):
            features = self.model.encode(batch)
        labels = self.question.labels
        chosen = torch.tensor([labels.index(row.label) if labels else 0])
        parts = {}
        for name in self.kinds:
            if sample.values.get(name) is not None:
                parts[name] = self._explain_value(name, sample.values[name], features, chosen)
        return replace(row, parts=parts)

    def _explain_value(
        self, name: str, value: Any, features: Mapping[str, Features], chosen: Tensor
    ) -> list[PartEffect]:
        """Return what each part of a sample's value of a modality adds."""
        kind = self.kinds[name]
        if isinstance(value, list) and value and kind.method == "occlusion":
            kind = SeveralItems(self.cfg.parts)
        places = kind.split(value)

        def score(values: Sequence[Any]) -> Tensor:
            return self.question.score(self._logits(name, values, features), chosen)  # (V,)

        if kind.method == "shapley":
            return self._shapley(kind, places, value, self.backgrounds[name], score)
        hidden = [kind.hide(value, places, [number], None) for number in range(len(places))]
        scores = score([value, *hidden])
        added = (scores[0] - scores[1:]).tolist()
        return [PartEffect(x.name, add, x.span) for x, add in zip(places, added, strict=True)]

    def _shapley(
        self,
        kind: Parts,
        places: Sequence[Place],
        value: Any,
        background: Sequence[Any],
        score: Callable[[Sequence[Any]], Tensor],
    ) -> list[PartEffect]:
        """Return Shapley values of parts, hidden ones taken from rows of the background."""
        players = [str(number) for number in range(len(places))]

        def evaluate_with(others: Sequence[Any]) -> Evaluate:
            def evaluate(subsets: Sequence[Subset]) -> Tensor:
                values = [
                    kind.hide(value, places, [int(p) for p in players if p not in subset], other)
                    for subset in subsets
                    for other in others
                ]
                return score(values).unflatten(0, (len(subsets), len(others)))

            return evaluate

        if len(players) <= MAX_EXACT:
            shares = exact_shares(evaluate_with(background), players)
        else:
            pairs = max(ORDERS, len(background))
            of_pair = [evaluate_with([other]) for other in background]
            shares = sampled_shares(
                lambda pair: of_pair[pair % len(of_pair)], players, pairs, self.cfg.seed
            )
        means = ((float(of[p].mean()) for of in (shares.values, shares.errors)) for p in players)
        return [
            PartEffect(x.name, value, x.span, error)
            for x, (value, error) in zip(places, means, strict=True)
        ]

    def _logits(self, name: str, values: Sequence[Any], features: Mapping[str, Features]) -> Tensor:
        """Return the logits of a sample with each of several values of a modality: (V, K).

        The other modalities' `features` (1, ...) are encoded already. A value that the encoder's
        processor refuses counts as missing.
        """
        model, at_once = self.model, self.cfg.batch_size
        encoder = dict(model.named_encoders())[name]
        processor = encoder.loader_processor(False)
        parts = []
        for first in range(0, len(values), at_once):
            items, present = [], []
            for value in values[first : first + at_once]:
                try:
                    items.append(prepare(processor, value))
                    present.append(True)
                except FusionZooError:
                    items.append([processor.blank()])
                    present.append(False)
            inputs = {name: collate_items(processor, items, processor.blank())}
            is_there = torch.tensor(present)[:, None]
            batch = Batch([""] * len(items), inputs, is_there, None).to(model.device)
            with evaluating(model):
                encoded = {name: encode_rows(encoder, batch.inputs[name], batch.presence()[:, 0])}
                every = {m: _keep_in(x, [True] * len(items)) for m, x in features.items()}
                every |= standardise(encoded, model.standardise)
                parts.append(model.calibrated_logits(every).double().cpu())
        return torch.cat(parts)

    def _draw_background(self, name: str) -> list[Any]:
        """Return values of a modality of other samples: of the training split, if it is there."""
        dataset, where = self.dataset, "the explained data"
        try:
            settings = data_settings_of({}, self.cfg.model, self.model.trained_on)
            training = settings.open({}).split("train")
            if training.modalities.get(name) != self.dataset.modalities[name]:
                raise FusionZooError(f"it has no {name!r}")
            dataset, where = training, "the training split"
        except (FusionZooError, OSError) as error:
            known = self.model.trained_on is not None
            reason = one_line(error) if known else "the model does not say where it is"
            where += f" (the training data cannot be opened: {reason})"
        generator = torch.Generator().manual_seed(self.cfg.seed)
        values: list[Any] = []
        for position in torch.randperm(len(dataset), generator=generator).tolist():
            sample = dataset[position]
            if sample is not None and sample.values.get(name) is not None:
                values.append(sample.values[name])
            if len(values) == self.cfg.background:
                break
        self.notes.append(f"{name}: hidden cells come from {len(values)} samples of {where}")
        return values


def explain_command(args: Sequence[str]) -> int:
    """Run `fusionzoo explain MODEL [DATA] ...`; return 0, or 2 after a user's mistake."""
    return run_command(ExplainConfig, HELP, args, _start, words=("model", "data"))


def _start(cfg: ExplainConfig) -> int:
    load_plugins(cfg.plugins)
    if cfg.out and Path(cfg.out).suffix not in (".json", ".csv"):
        raise FusionZooError(f"--out {cfg.out}: explanations are written as .json or .csv")
    explanations = _explain(cfg, None, None)
    print_table(f"{explanations!r}", *summary_rows(explanations))
    for note in explanations.notes:
        print(f"note: {note}")
    if cfg.out:
        print(f"wrote {explanations.save(cfg.out)}")
    if cfg.html:
        print(f"wrote {explanations.to_html(cfg.html)}")
    return 0
