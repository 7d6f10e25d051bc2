"""The candidates of a benchmark, by name, and their settings.

A candidate is a fusion (`gmu`), one modality (`alone:text`), a fusion under training strategies
(`gmu + mla`), or a model that is fitted once, of one modality (`linear probe of text`) or of
everything (`kernel sum on everything`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.errors import FusionZooError, check_known, did_you_mean
from fusionzoo.fusion import FUSIONS, Fusion, create_fusion, fusion_info, list_fusions
from fusionzoo.model.fusion_model import refuse_other_answers
from fusionzoo.training.balance import BALANCE
from fusionzoo.zoo.cards import FAMILIES

from .bench import Bench, Job, Settings

ALONE = "alone:"  # prefix of the candidates that see one modality
LOGISTIC = "logistic regression on everything"  # linear baselines on all features
RIDGE = "ridge regression on everything"
LINEAR = (LOGISTIC, RIDGE)
TREES, KERNELS = "boosted trees on everything", "kernel sum on everything"
TABULAR = "tabular foundation model on everything"
EVERYTHING = (*LINEAR, TREES, KERNELS, TABULAR)  # fitted once on all features: the rows to beat
BASELINES = {"linear": LINEAR, "trees": (TREES,), "kernels": (KERNELS,), "tabular": (TABULAR,)}
HEADS = "alone"  # word of --baselines for a trained head of each modality
PROBE = "linear probe of "  # prefix of the linear models of one modality
_PLUS = " + "


class Candidate(NamedTuple):
    """What a candidate's name says."""

    base: str  # a fusion, `alone:<modality>`, `linear probe of <modality>` or one of EVERYTHING
    balance: tuple[str, ...] = ()  # training strategies

    @property
    def name(self) -> str:
        """The name in tables, which `parse` reads."""
        return _PLUS.join([self.base, "+".join(self.balance)] if self.balance else [self.base])


def parse(name: str) -> Candidate:
    """Read a candidate's name.

    >>> parse("gmu + mla+umt")
    Candidate(base='gmu', balance=('mla', 'umt'))
    """
    base, _, balance = name.partition(_PLUS)
    return Candidate(base, tuple(balance.split("+")) if balance else ())


def list_candidates(cfg: BenchmarkConfig, bench: Bench) -> tuple[list[str], list[str]]:
    """Return the names of all candidates, and notes on the fusions that were left out."""
    fusions = select_fusions(cfg.fusions, len(bench.modalities))
    notes: list[str] = []
    if bench.scheme is not None:
        fusions, notes = _fit_for_targets(fusions, cfg)
    chosen = baseline_words(cfg)
    singles = [f"{ALONE}{name}" for name in bench.modalities if HEADS in chosen]
    names = [
        Candidate(base, balance).name
        for base in (*singles, *fusions)
        for balance in (((),) if base.startswith(ALONE) else select_balance(cfg.balance))
    ]
    probes = [f"{PROBE}{name}" for name in bench.modalities if "linear" in chosen]
    return [*names, *probes, *select_baselines(cfg, bench)], notes


def baseline_words(cfg: BenchmarkConfig) -> list[str]:
    """Resolve `alone,linear`, `all` or `none`: what fusion is compared with, by words.

    `alone` is a trained head of each modality, `linear` a linear probe of each and one of
    everything; `trees`, `kernels` and `tabular` are models of everything.
    """
    known = [HEADS, *BASELINES]
    words = word_list(cfg.baselines)
    for word in words:
        check_known(word, [*known, "all", "none"], f"--baselines: unknown {word!r}", "There are")
    return known if "all" in words else [word for word in known if word in words]


def select_baselines(cfg: BenchmarkConfig, bench: Bench) -> list[str]:
    """Return the models that are fitted on everything."""
    words = baseline_words(cfg)
    numbers = any(target.standard_kind() == "regression" for target in bench.scheme or ())
    of_other_targets = LOGISTIC if numbers else RIDGE
    return [
        name
        for word, names in BASELINES.items()
        for name in names
        if word in words and name != of_other_targets
    ]


def select_fusions(names: str | Sequence[str], num_modalities: int) -> list[str]:
    """Resolve names of fusions and families, `"mbt,late"` or a list; an unknown one is an error."""
    fusions: list[str] = []
    for word in word_list(names):
        if word == "all" or word in FAMILIES:
            family = list_fusions(None if word == "all" else word)
            fusions += [name for name in family if fusion_info(name).at_least <= num_modalities]
        elif word not in FUSIONS:
            hint = did_you_mean(word, [*list_fusions(), *FAMILIES, "all"])
            raise FusionZooError(f"unknown fusion {word!r}.{hint} `fusionzoo zoo` lists all.")
        else:
            fusions.append(word)
    for name in fusions:
        least = fusion_info(name).at_least
        if least > num_modalities:
            raise FusionZooError(f"{name} needs {least} modalities; the data has {num_modalities}")
    return list(dict.fromkeys(fusions))


def select_balance(names: str | Sequence[str]) -> list[tuple[str, ...]]:
    """Resolve `none,mla,ogm_ge+umt`: the training strategies of each row; none is ()."""
    rows: list[tuple[str, ...]] = []
    for word in word_list(names):
        row = () if word in ("none", "") else tuple(name.strip() for name in word.split("+"))
        for name in row:
            problem = f"--balance: unknown training strategy {name!r}"
            check_known(name, [*BALANCE, "none"], problem, "There are")
        rows.append(row)
    return list(dict.fromkeys(rows))


def _fit_for_targets(fusions: Sequence[str], cfg: BenchmarkConfig) -> tuple[list[str], list[str]]:
    """Leave out fusions that join probabilities of classes; an error if one was asked for."""
    built = {name: _build_small(name, settings_of(cfg, name)) for name in fusions}
    left_out = [name for name, fusion in built.items() if fusion.classes_only]
    for name in word_list(cfg.fusions):
        if name in left_out:
            refuse_other_answers(name, built[name])
    note = f"Left out, because they join probabilities of classes: {', '.join(left_out)}."
    return [name for name in fusions if name not in left_out], [note] if left_out else []


def _build_small(fusion: str, settings: Settings) -> Fusion:
    """Build a narrow fusion, to ask what it can answer."""
    arguments = {"dim": 8, **settings, "num_outputs": 2}
    with torch.random.fork_rng(devices=[]):
        return create_fusion(fusion, {"a": 8, "b": 8, "c": 8}, **arguments)


def settings_of(cfg: BenchmarkConfig, candidate: str) -> Settings:
    """Merge the common settings that a candidate's fusion has with those of its own."""
    if is_fitted(candidate):
        return {}
    base = parse(candidate).base
    name = fusion_of(candidate)
    info = fusion_info(name)
    known = {"dim", *info.parameters}
    common = {key: value for key, value in cfg.fusion.items() if key in known}
    if base.startswith(ALONE):
        common["hidden"] = ()  # a linear head: the strongest probe of one encoder that we measured
        common.pop("linear_skip", None)  # it is linear already
    specific = dict(cfg.settings.get(base, {}))
    for key in specific:
        if not info.open_ended:
            check_known(key, sorted(known), f"--settings.{base}.{key}: {name} has no such setting")
    settings = common | specific
    return settings if base.startswith(ALONE) else info.to_train(settings)


def check_settings(cfg: BenchmarkConfig, candidates: Sequence[str]) -> None:
    """Raise an error for a setting that no candidate has, before anything is computed."""
    for name in cfg.settings:
        if name not in FUSIONS and not name.startswith(ALONE):
            hint = did_you_mean(name, candidates)
            raise FusionZooError(f"--settings.{name}: unknown fusion{hint}")
    fusions = [fusion_of(name) for name in candidates if not is_fitted(name)]
    for key in cfg.fusion:
        if not any(key in {"dim", *fusion_info(n).parameters} for n in [*list_fusions(), *fusions]):
            raise FusionZooError(f"--fusion.{key}: no fusion has this setting")
    for name in candidates:
        settings = settings_of(cfg, name)
        if not is_fitted(name) and fusion_info(fusion_of(name)).open_ended:
            _build_small(fusion_of(name), settings)  # what it passes settings on to checks them
    trained = {name for row in select_balance(cfg.balance) for name in row}
    for name in cfg.balance_settings:
        if name not in trained:
            raise FusionZooError(f"--balance_settings.{name}: --balance does not name it")
    for name in trained:
        if cfg.refit and getattr(BALANCE[name].cls, "validates", False):
            raise FusionZooError(f"--refit: {name} validates on samples apart: --refit false")
    optim = cfg.optim
    if "plateau" in (optim.schedule, *optim.modality_schedule.values()):
        raise FusionZooError("--optim.schedule plateau: here seeds share a rate; choose another")
    for key in ("unfreeze_at_epoch", "gradual_unfreeze"):
        if getattr(optim, key):
            raise FusionZooError(f"--optim.{key} is a setting of train.py; benchmark.py has none")


def modalities_of(bench: Bench, candidate: str) -> list[str]:
    """Return the modalities that a candidate sees."""
    only = single_modality(candidate)
    return list(bench.modalities) if only is None else [only]


def fusion_of(candidate: str) -> str:
    """Return the fusion of a candidate; a single modality's head is that of `concat`."""
    base = parse(candidate).base
    return "concat" if base.startswith(ALONE) else base


def reads_tokens(candidate: str) -> bool:
    """Whether a candidate reads tokens, or pooled vectors only."""
    if is_fitted(candidate):
        return False
    return fusion_info(fusion_of(candidate)).reads == "tokens"


def is_costly(candidate: str) -> bool:
    """Whether a candidate takes ten times as long as most: it reads tokens, or is fitted with
    more than a linear model."""
    return reads_tokens(candidate) or parse(candidate).base in (TREES, KERNELS, TABULAR)


def features_read(bench: Bench, job: Job) -> dict[str, Any]:
    """Return what identifies the features that a job reads; nothing where none are cached.

    Pooled vectors are the same however many tokens are kept beside them: a benchmark of fusions
    that read nothing else goes on when one that reads tokens is added.
    """
    descriptions = bench.features[job.fold] if bench.features else {}
    left_out = () if reads_tokens(job.candidate) else ("max_tokens",)
    return {
        modality: {key: value for key, value in description.items() if key not in left_out}
        for modality, description in descriptions.items()
    }


def single_modality(candidate: str) -> str | None:
    """Return the one modality that a candidate sees; None for all.

    >>> single_modality("linear probe of text"), single_modality("alone:a")
    ('text', 'a')
    """
    base = parse(candidate).base
    return next((base.removeprefix(x) for x in (ALONE, PROBE) if base.startswith(x)), None)


def is_single(candidate: str) -> bool:
    """Whether a candidate sees one modality."""
    return single_modality(candidate) is not None


def is_fitted(candidate: str) -> bool:
    """Whether a candidate is fitted once, by scikit-learn or TabICL: no seeds, tuning, control."""
    base = parse(candidate).base
    return base in EVERYTHING or base.startswith(PROBE)


def single_title(candidate: str) -> str:
    """Name a single modality in a sentence.

    >>> single_title("alone:text"), single_title("linear probe of text")
    ('text alone', 'text alone (its linear probe)')
    """
    probe = parse(candidate).base.startswith(PROBE)
    return f"{single_modality(candidate)} alone{' (its linear probe)' * probe}"
