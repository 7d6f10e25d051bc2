"""What the data needs: its information by `pid`, and the interactions of the best fusion by `emap`.

Both read cached features. `pid` clusters them; `emap` trains the fusion that validation data
chooses most often once more, on the first fold with the first seed, and evaluates recombined
samples.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.benchmark import jobs
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.pid import (
    CLUSTERS,
    MOST_ROWS,
    FoldFeatures,
    PidInputs,
    advise_fusion,
    advise_model,
    interactions,
)
from fusionzoo.evaluation.pid_probes import (
    BATCH,
    EPOCHS,
    FEWEST_STEPS,
    HIDDEN,
    decompose_data,
)
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import key_of
from fusionzoo.files import write_text
from fusionzoo.structures import Features

from ..bench import Bench, Job, tasks_of
from ..examine import Examiner
from ..schedule import Results, path_of
from .results import CandidateResults, Summary, chosen_fusion

FILE = "needs.json"
VERSION = 5  # raised when a figure is redefined: stored figures are then computed again
NOT_CACHED = "emap would train a fusion with its encoders once more: left out in finetune mode."
SECONDS = 60.0  # of a core, expected, above which an analysis is left out unless asked for
# Measured: pid on 2 to 3 modalities of 64 to 768 numbers, 900 to 4,000 rows, 1 to 5 folds.
SECONDS_PER_PAIR, MULTIPLICATIONS_PER_SECOND = 1.0, 1.2e10
# Measured: probes of 64 to 2,304 numbers, 720 to 4,000 rows, 2 to 30 classes.
SECONDS_PER_PROBE, PROBE_MULTIPLICATIONS = 0.3, 7e10  # the latter a second
PASSES = 3 * 5 / 3  # forward, and backward to weights and inputs; two fits to 2/3 and 1 of the rows
ROUNDS = 4 * 15  # passes of K-means over the rows: restarts times iterations
RECOMBINED = 4e11  # multiplications that `emap` may cost, 10 to 20 s of a core
MOST_SAMPLES, FEWEST_SAMPLES = 300, 50  # of `emap`
MOST_COMPLETIONS, FEWEST_COMPLETIONS = 256, 16
Needs = dict[str, Any]


def analyse_needs(bench: Bench, summary: Summary, results: Results) -> Needs | None:
    """Return the figures of the section; None where analyses are off, or features not cached.

    Read from the report's folder where an earlier run of the same benchmark stored them.
    """
    wanted, probe = bench.cfg.analyses, bench.cfg.mode == "probe"
    if wanted is False or (wanted is None and not probe):
        return None
    choice = chosen_fusion(summary) if probe else None
    chosen = None if choice is None else summary.candidate(choice.name)
    job = None if chosen is None else first_job(chosen, results)
    job_file = "" if job is None else path_of(bench, job).name
    data = [list(bench.features), dict(bench.identity)]
    key = key_of([*data, job_file, wanted, bench.cfg.seed, VERSION])
    path = Path(bench.cfg.out) / FILE
    stored = read_stored(path, key)
    if stored is None:
        stored = {"notes": [] if probe else [NOT_CACHED]}
        for part in (_information(bench), _interactions(bench, chosen, job)):
            stored["notes"] += part.pop("notes", [])
            stored |= part
        write_text(path, json.dumps({"key": key, **stored}, indent=1) + "\n")
    return stored


def read_stored(path: Path, key: str) -> Needs | None:
    """Return what an earlier run of the same benchmark stored."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict) or stored.pop("key", None) != key:
        return None
    return stored


# ---- pid


def _information(bench: Bench) -> Needs:
    """Return redundancy, uniqueness and synergy, and what follows for the choice of a fusion."""
    untrained = bench.trained_alone
    if bench.weights is not None:
        return {"notes": ["Redundancy and synergy take no weights of samples: left out."]}
    if not bench.features:
        return {"notes": ["Redundancy and synergy are those of cached features: there are none."]}
    if bench.scheme is not None:
        return {"notes": ["Redundancy and synergy need one class for each sample: left out."]}
    seconds = clustering_seconds(bench, fixed=not untrained) + probe_seconds(bench)
    if bench.cfg.analyses is None and seconds > SECONDS:
        said = f"Redundancy and synergy would take about {seconds:.0f} s: `--analyses true`."
        return {"notes": [said]}
    notes = []
    if bench.from_splits and bench.cross_validated:
        notes.append("Redundancy and synergy are those of the first split.")
    if untrained:
        notes.append(
            f"The encoders of {', '.join(untrained)} were trained alone on the labels, which may"
            " lose what only a combination tells."
        )
    try:
        setup = setup_of(bench, fixed=not untrained)
        pairs = decompose_data(setup)
    except FusionZooError as error:
        return {"notes": [f"Redundancy and synergy: {error}."]}
    notes += [note for pair in pairs for note in pair.notes]
    return {"pid": [x.to_dict() for x in pairs], "advice": advise_fusion(pairs), "notes": notes}


def setup_of(bench: Bench, *, fixed: bool, clusters: int | None = None) -> PidInputs:
    """Return what `pid` decomposes: the cached features and classes of all folds.

    Of splits that may test the same samples, the first: errors over folds need disjoint ones.
    """
    return PidInputs(
        folds=[_fold(bench, number) for number in range(_num_folds(bench))],
        classes=len(bench.classes),
        clusters=clusters,
        seed=bench.cfg.seed,
        fixed=fixed,
    )


def _num_folds(bench: Bench) -> int:
    return 1 if bench.from_splits else len(bench.folds)


def _fold(bench: Bench, number: int) -> FoldFeatures:
    """Return the cached features and classes of a fold."""
    stored = {name: load_features(bench.features[number][name]) for name in bench.modalities}
    rows = bench.folds[number]
    return FoldFeatures(
        features={name: x.pooled.double().numpy() for name, x in stored.items()},
        present={name: x.present.numpy() for name, x in stored.items()},
        target=bench.targets.numpy().astype(np.int64),
        train=rows.train.numpy(),
        test=rows.test.numpy(),
    )


def clustering_seconds(bench: Bench, *, fixed: bool) -> float:
    """Estimate how long `pid` takes on one core: K-means of every pair of sources, for each number
    of clusters; where labels shaped the features, in every fold."""
    widths = _widths_of_pairs(bench)
    rows = min(len(bench.targets), MOST_ROWS)
    times = 1 if fixed else _num_folds(bench)
    multiplications = sum(widths) * rows * sum(CLUSTERS) * ROUNDS
    return times * (len(widths) * SECONDS_PER_PAIR + multiplications / MULTIPLICATIONS_PER_SECOND)


def probe_seconds(bench: Bench) -> float:
    """Estimate how long the probes of every pair's two sources take on one core, in every fold."""
    widths = _widths_of_pairs(bench)
    rows = min(len(bench.targets), MOST_ROWS)
    steps = max(EPOCHS * rows / BATCH, FEWEST_STEPS)
    multiplications = sum(widths) * steps * BATCH * HIDDEN * PASSES
    by_fold = 2 * len(widths) * SECONDS_PER_PROBE + multiplications / PROBE_MULTIPLICATIONS
    return _num_folds(bench) * by_fold


def _widths_of_pairs(bench: Bench) -> list[int]:
    """Return the width of both sources of each pair: two modalities, or one and all others."""
    widths = [bench.dims[a] + bench.dims[b] for a, b in combinations(bench.modalities, 2)]
    if len(bench.modalities) > 2:
        widths += [sum(bench.dims.values())] * len(bench.modalities)
    return widths


# ---- emap


def first_job(chosen: CandidateResults, results: Results) -> Job | None:
    """Return the job of a candidate on the first fold, with its first seed only."""
    for result in results.reported:
        job = result.job
        if job.candidate == chosen.name and job.fold == 0 and not job.shuffled:
            return job._replace(seeds=job.seeds[:1])
    return None


def _interactions(bench: Bench, chosen: CandidateResults | None, job: Job | None) -> Needs:
    """Return how much of the score of the fusion chosen on validation data needs interactions."""
    if chosen is None or job is None:
        return {}
    if bench.weights is not None:
        return {"notes": ["emap takes no weights of samples: left out."]}
    seconds = chosen.facts.get("seconds", 0.0)
    if bench.cfg.analyses is None and seconds > SECONDS:
        said = f"emap would train {chosen.name} again for about {seconds:.0f} s: `--analyses true`."
        return {"notes": [said]}
    (model,), feed = jobs.build(bench, job)
    trained = jobs.train(bench, job, [model], feed)
    model.load_state_dict(jobs.tested_weights(bench, job, trained)[0])
    model.eval()
    fold = bench.folds[0]
    features = Examiner(bench, job, feed).test_features(model)
    present = torch.stack([x.mask.any(1) for x in features.values()])
    complete = present.all(0).nonzero()[:, 0]
    if len(features) < 2 or len(complete) < FEWEST_SAMPLES:
        return {"notes": [f"emap: {len(complete)} complete test samples, too few."]}
    samples, completions = affordable(len(features), len(complete), chosen.facts.get("macs", 1.0))
    order = torch.randperm(len(complete), generator=torch.Generator().manual_seed(bench.cfg.seed))
    rows = complete[order[:samples]].sort().values
    labels, tasks = bench.targets[fold.test][rows], tasks_of(bench, fold.train)

    def score(logits: Tensor) -> tuple[str, float]:
        return tasks.leading, tasks.metrics(logits.float(), labels)[tasks.leading]

    taken = {name: Features(*(part[rows] for part in x)) for name, x in features.items()}
    projected = interactions(
        model.fusion.cpu(), taken, score, completions=completions, seed=bench.cfg.seed
    )
    figures = {"fusion": chosen.name, "advice": advise_model(projected), **projected.to_dict()}
    return {"emap": figures}


def affordable(modalities: int, complete: int, macs: float) -> tuple[int, int]:
    """Return samples and completions of `emap` within `RECOMBINED` multiplications."""
    rows = RECOMBINED / max(macs, 1.0)
    if modalities == 2:  # all pairs
        return min(complete, MOST_SAMPLES, max(FEWEST_SAMPLES, math.isqrt(int(rows)))), 1
    samples = min(complete, MOST_SAMPLES)
    completions = int(rows / (samples * (modalities + 1)))
    return samples, min(MOST_COMPLETIONS, max(FEWEST_COMPLETIONS, completions))
