"""What a model and its export share: logits become answers by targets, thresholds and types."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.structures import Sample, check_finite
from fusionzoo.targets import OneOf, Target, decode

from .confidence import NAME as CALIBRATION
from .confidence import Calibration, TargetCalibration
from .trained_on import TrainedOn

if TYPE_CHECKING:
    from fusionzoo.datasets import PairedDataset


class Answering:
    """What logits mean, and what the data were like that a model learnt from."""

    classes: list[str]
    targets: list[Target] | None  # None: one class of `classes`
    calibration: Calibration | None  # of the answers; None: as they were trained
    trained_on: TrainedOn | None  # None: not known

    @property
    @abstractmethod
    def modalities(self) -> Mapping[str, str]:
        """Modality -> kind, in the order of the batch's columns."""

    @abstractmethod
    def collate(self) -> Any:
        """Return the picklable function that turns a list of samples into the model's batch."""

    @property
    def answer_targets(self) -> list[Target]:
        """What the model answers: its targets, else one class of `classes`, as target `target`."""
        return [OneOf("target", tuple(self.classes))] if self.targets is None else self.targets

    @property
    def types_of_labels(self) -> Mapping[str, str]:
        """Target -> what its labels were in the training data, before they were read as text."""
        return {} if self.trained_on is None else self.trained_on.types

    @property
    def data_settings(self) -> Mapping[str, Any]:
        """The settings of the training data, as `--data` has them; empty where not known."""
        return {} if self.trained_on is None else self.trained_on.settings

    def with_thresholds(self, threshold: float | None, thresholds: Mapping[str, float]) -> Self:
        """Return this model, or one with the same weights that answers by other thresholds, see
        `Calibration.with_thresholds`."""
        if threshold is None and not thresholds:
            return self
        targets = self.answer_targets
        measured = self.calibration or Calibration(
            targets={target.name: TargetCalibration() for target in targets}
        )
        model = copy(self)
        model.calibration = measured.with_thresholds(targets, threshold, thresholds)
        return model

    def open_samples(self, samples: Sequence[Any]) -> RawSamples | PairedDataset:
        """Return samples that are decoded when they are asked for."""
        from fusionzoo.datasets import PairedDataset
        from fusionzoo.datasets.opening.raw_rows import holds_rows, open_rows

        if isinstance(samples, PairedDataset):
            return samples.read_as(self.data_settings)
        if isinstance(samples, Mapping | str):
            raise FusionZooError("give a list of samples: [{'image': 'cat.png', 'text': ...}]")
        stored = self.data_settings
        if holds_rows(samples, stored, self.modalities):
            return open_rows(samples, stored, self.modalities)
        return RawSamples(self, [*samples])

    def sample(self, raw: Any, number: int = 0) -> Sample:
        """Decode a raw sample; `number` is its place in messages, and its id."""
        from fusionzoo.datasets.opening.raw_rows import read_value

        if isinstance(raw, Sample):
            return raw
        for name in raw:
            problem = f"sample {number}: the model has no modality {name!r}"
            check_known(name, self.modalities, problem)
        values = {
            name: read_value(name, kind, raw.get(name), self.data_settings)
            for name, kind in self.modalities.items()
        }
        return Sample(str(number), "", None, values)

    def decode(self, logits: Tensor, ids: Sequence[str] | None = None) -> list[Any]:
        """Return the answers to logits (B, K), divided by the temperatures, if any: see `predict`;
        labels are text.

        Raises:
            FusionZooError: an answer is no finite number; the sample is named by `ids` or number
        """
        check_finite(logits, ids=ids)
        if self.calibration is not None:
            return self.calibration.decode(self.answer_targets, logits)
        return decode(self.answer_targets, logits)

    def save_facts(self, folder: Path) -> None:
        """Write calibration.json and trained_on.safetensors into a folder, each if it is known."""
        if self.calibration is not None:
            self.calibration.save(folder)
        else:
            (folder / CALIBRATION).unlink(missing_ok=True)
        if self.trained_on is not None:
            self.trained_on.without_folders().save(folder)


class RawSamples:
    """Raw samples, each decoded when it is asked for."""

    def __init__(self, model: Answering, raw: Sequence[Any]) -> None:
        self.model, self.raw = model, raw

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, place: int) -> Sample:
        return self.model.sample(self.raw[place], place)

    def by_length(self) -> list[int]:
        """Return the samples' positions, those with the longest texts first."""
        lengths = [
            sum(len(x) for x in values.values() if isinstance(x, str))
            for values in (x.values if isinstance(x, Sample) else x for x in self.raw)
        ]
        return sorted(range(len(lengths)), key=lambda place: -lengths[place])
