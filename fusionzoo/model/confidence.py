"""How sure a model is: temperatures, thresholds of labels, and scores for conformal sets.

`calibration.json` in the model folder is optional: without it, probabilities are those of the
logits as they were trained. `training/calibrate.py` measures what it holds on validation data.

Shapes: `N` samples, `K` logits of all targets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, check_known, first_problem, one_line
from fusionzoo.files import write_json
from fusionzoo.structures import Labels, Prediction
from fusionzoo.targets import AnyOf, OneOf, Target, decode

NAME = "calibration.json"
MAX_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class TargetCalibration:
    """One target, as measured on the validation split."""

    temperature: float | None = None  # its logits are divided by it; None: they stay as they are
    # label -> probability; else 0.5. Of two classes, if chosen: the second -> probability.
    thresholds: dict[str, float] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)  # `Target.misfit` of its samples, sorted

    def limit(self, coverage: float, name: str) -> float:
        """Return the score that a share `coverage` of new samples does not exceed.

        Split conformal prediction: the ceil((n + 1) coverage)-th smallest of n scores (Angelopoulos
        and Bates 2021, arXiv:2107.07511).
        """
        count = len(self.scores)
        rank = math.ceil((count + 1) * coverage - 1e-9)
        if not 0 < rank <= count:
            raise FusionZooError(
                f"--coverage {coverage:g}: target {name!r} has {count:,} validation samples, which"
                f" allow a coverage of at most {count / (count + 1):.4g}"
            )
        return self.scores[rank - 1]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All targets of a model, by name and in the order of its logits."""

    targets: dict[str, TargetCalibration]

    def with_thresholds(
        self, targets: Sequence[Target], threshold: float | None, thresholds: Mapping[str, float]
    ) -> Calibration:
        """Return a calibration that answers the second of two classes from the probability
        `threshold` on, and labels above their `thresholds`; labels left out keep theirs.

        `thresholds` also names the second of two classes, and any label as `tags.sea`.

        Raises:
            FusionZooError: no target of two classes, or several; a label that no target has, or
                several
        """
        chosen = {target.name: dict(self.targets[target.name].thresholds) for target in targets}
        of_two = [x for x in targets if isinstance(x, OneOf) and len(x.classes) == 2]
        if threshold is not None:
            if len(of_two) != 1:
                raise FusionZooError(
                    f"--threshold {threshold:g} is for a model with one target of two classes, and"
                    f" this one has {len(of_two)}: leave it out"
                )
            chosen[of_two[0].name] = {of_two[0].classes[1]: threshold}
        many = [x for x in targets if isinstance(x, AnyOf)]
        pairs = [(x.name, y) for x in many for y in x.classes]
        pairs += [(x.name, x.classes[1]) for x in of_two]
        if thresholds and not pairs:
            raise FusionZooError(
                "--thresholds is for labels of a multilabel target and the second of two classes,"
                " and this model has none: leave it out"
            )
        counts = Counter(label for _, label in pairs)
        places = {label: (name, label) for name, label in pairs if counts[label] == 1}
        places |= {f"{name}.{label}": (name, label) for name, label in pairs}
        for word, value in thresholds.items():
            check_known(word, places, f"--thresholds: the model has no label {word!r}")
            name, label = places[word]
            chosen[name][label] = value
        entries = self.targets.items()
        return Calibration(targets={k: replace(x, thresholds=chosen[k]) for k, x in entries})

    def move(self, targets: Sequence[Target], logits: Tensor, scaled: Tensor) -> Tensor:
        """Move logits (N, K) by the thresholds, so that a label is answered above 0, and the second
        of two classes where it has the larger one; ranks stay. `scaled` (N,): whose temperature
        counts, which are the rows with a modality."""
        parts = []
        for target, part in zip(targets, logits.split([x.width for x in targets], 1), strict=True):
            entry = self.targets[target.name]
            if entry.thresholds:
                limits = [entry.thresholds.get(label, 0.5) for label in target.classes]
                odds = torch.tensor(limits, dtype=torch.float64).logit().to(part)
                part = part - torch.where(scaled, entry.temperature or 1.0, 1.0)[:, None] * odds
            parts.append(part)
        return torch.cat(parts, dim=1)

    def scale(self, targets: Sequence[Target], logits: Tensor) -> Tensor:
        """Divide each target's logits (N, K) by its temperature; without one, not a bit changes."""
        temperatures = [self.targets[target.name].temperature for target in targets]
        if all(x is None for x in temperatures):
            return logits
        parts = logits.split([target.width for target in targets], dim=-1)
        pairs = zip(parts, temperatures, strict=True)
        return torch.cat([part if x is None else part / x for part, x in pairs], dim=-1)

    def decode(self, targets: Sequence[Target], logits: Tensor) -> list[Any]:
        """Return the answers to scaled logits (N, K), by their thresholds."""
        rows = decode(targets, logits)
        if not any(x.thresholds for x in self.targets.values()):
            return rows
        if [target.name for target in targets] == ["target"]:
            return [self._by_threshold("target", row) for row in rows]
        return [{name: self._by_threshold(name, x) for name, x in row.items()} for row in rows]

    def _by_threshold(self, name: str, answer: Any) -> Any:
        thresholds = self.targets[name].thresholds
        if not thresholds:
            return answer
        shares = answer.probabilities
        if isinstance(answer, Prediction):
            ((positive, least),) = thresholds.items()
            (negative,) = shares.keys() - {positive}
            label = positive if shares[positive] >= least else negative
            return Prediction(label, shares[label], shares)
        return Labels([x for x, p in shares.items() if p > thresholds.get(x, 0.5)], shares)

    def regions(
        self, targets: Sequence[Target], logits: Tensor, coverage: float
    ) -> dict[str, list[Any]]:
        """Return columns `set`, or `lower` and `upper`, which hold the truth with this chance.

        Of several targets `<target>.set` and so on. `logits` (N, K) are scaled.
        """
        columns: dict[str, list[Any]] = {}
        parts = logits.double().cpu().split([target.width for target in targets], dim=-1)
        for target, part in zip(targets, parts, strict=True):
            limit = self.targets[target.name].limit(coverage, target.name)
            prefix = f"{target.name}." if len(targets) > 1 else ""
            columns |= {f"{prefix}{name}": x for name, x in target.region(part, limit).items()}
        return columns

    def save(self, folder: Path) -> None:
        """Write the file into a model folder."""
        write_json(folder / NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path, targets: Sequence[Target]) -> Calibration | None:
        """Read the file of a model folder; None if there is none."""
        path = folder / NAME
        if not path.is_file():
            return None
        from pydantic import TypeAdapter, ValidationError

        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
            stored = TypeAdapter(cls).validate_json(path.read_text(encoding="utf-8"), strict=True)
            stored._check(targets)
        except ValidationError as error:
            raise FusionZooError(f"{path}: {first_problem(error)}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from None
        return stored

    def _check(self, targets: Sequence[Target]) -> None:
        """Raise an error unless the entries are those of the model's targets, and finite."""
        names = [target.name for target in targets]
        if list(self.targets) != names:
            raise ValueError(f"it is of {', '.join(self.targets)}, the model of {', '.join(names)}")
        for target in targets:
            entry = self.targets[target.name]
            if entry.temperature is not None and not 0 < entry.temperature < math.inf:
                raise ValueError(f"temperature {entry.temperature} of {target.name!r}")
            numbers = [*entry.scores, *entry.thresholds.values()]
            if not all(map(math.isfinite, numbers)) or entry.scores != sorted(entry.scores):
                raise ValueError(f"scores of {target.name!r} are not finite, or not sorted")
            # Of two classes the second; of several, levels and numbers none.
            is_of_two = isinstance(target, OneOf) and len(target.classes) == 2
            labels = target.classes if isinstance(target, AnyOf) else target.classes[1:] * is_of_two
            if not {*entry.thresholds} <= {*labels}:
                raise ValueError(f"thresholds of labels that {target.name!r} has not")
