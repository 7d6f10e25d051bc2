"""Diagnosing and re-learning: move encoders that overfit back towards their initial weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fusionzoo.datasets.loader import make_loader
from fusionzoo.machine.distributed import from_main, gather
from fusionzoo.machine.fsdp import reshard, shard_like, sharded
from fusionzoo.structures import Batch, StepContext, evaluating

from ..optim import autocast
from .base import BALANCE, Balance, RunningTrainer, StrategyInputs, pooled_of

MOMENTA = ("exp_avg", "momentum_buffer")  # names under which optimisers keep their direction
RESTARTS = 10  # of K-means


class Rows(NamedTuple):
    """What is clustered of one modality in one split."""

    features: NDArray[np.float64]  # (N, D)
    present: NDArray[np.bool_]  # (N,)
    target: NDArray[np.int64]  # (N,)
    weights: NDArray[np.float64]  # (N,) how much each sample counts

    def used(self) -> Rows:
        """Return the rows that have the modality and count."""
        rows = self.present & (self.weights > 0)
        return Rows(self.features[rows], rows[rows], self.target[rows], self.weights[rows])


@BALANCE.register(family="schedule", paper="Wei et al. 2024, ECCV, arXiv:2407.09705")
class Relearn(Balance):
    """Pull each encoder towards its initial weights, the more, the more it overfits.

    After every `every` epochs, at most `times` times: the features of up to `rows` samples of the
    training and of the validation split, each scaled to [-1, 1], are clustered by K-means; P =
    share of samples in a cluster's most frequent class, each counting by its weight, w_m =
    tanh(strength |P_train - P_val|), and theta_m <- w_m theta0_m + (1 - w_m) theta_m, theta0_m the
    (pretrained) weights at the start. Heads and fusion stay. The optimiser's momenta of moved
    weights are scaled by 1 - w_m, and their moving average moves likewise (both ours). A pass over
    both splits at each time, in evaluation mode and without augmentation; K-means takes the best of
    ten starts with a fixed seed.

    Missing: modality m is clustered over rows that have it; with fewer than two for each cluster in
    either split w_m is 0.
    Pitfall: encoders are moved back too where validation is the purer split; running statistics of
    batch norm stay. The initial weights are kept on the CPU and in checkpoints, which grow by them.
    Use when: one encoder overfits and another is undertrained; not for frozen encoders.

    Settings:
        every: epochs between two times, at least 1
        times: how often at most, at least 0; 0 switches it off
        strength: lambda, at least 0; 0 switches it off
        rows: samples of each split that are clustered, at least 1
        clusters: number of clusters, at least 2; None for as many as classes
        restart: whether the learning-rate schedule of a moved encoder starts anew, with its
            warm-up, for the steps that remain; those of the others go on

    Shapes: features[name].pooled (N, D), classes (N,) -> w (M,)
    """

    encoders_only = True
    validates = True
    raw_inputs = False
    resets: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        every: int = 20,
        times: int = 3,
        strength: float = 3.0,
        rows: int = 20_000,
        clusters: int | None = None,
        restart: bool = False,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(every >= 1, f"every={every}; it must be at least 1")
        self.require(times >= 0, f"times={times}; it must be at least 0")
        self.require(strength >= 0, f"strength={strength:g}; it must be at least 0")
        self.require(rows >= 1, f"rows={rows}; it must be at least 1")
        self.clusters = self.fusion.num_outputs if clusters is None else clusters
        self.require(self.clusters >= 2, f"clusters={self.clusters}; it must be at least 2")
        self.require_classes(inputs.targets)
        self.every, self.times, self.strength, self.rows = every, times, strength, rows
        self.restart = restart
        self.restart_epochs: dict[str, int] = {}
        self.register_buffer("resets", torch.tensor(0))
        # No buffers, which every step would copy and DDP broadcast: `get_extra_state`.
        self.initial = torch.cat(
            [torch.zeros(0)]
            + [p.detach().flatten().cpu() for ps in self._learning().values() for p in ps]
        )

    def _learning(self) -> dict[str, list[nn.Parameter]]:
        """Return the trainable parameters of each encoder."""
        return {
            name: [p for p in encoder.parameters() if p.requires_grad]
            for name, encoder in self.model.named_encoders()
        }

    def get_extra_state(self) -> Tensor:
        """Return what checkpoints keep: the initial weights of all encoders.

        With `restart`, the epochs of the restarts follow, one per modality, 0 for none.
        """
        if not self.restart:
            return self.initial
        epochs = [float(self.restart_epochs.get(name, 0)) for name in self.widths]
        return torch.cat([self.initial, self.initial.new_tensor(epochs)])

    def set_extra_state(self, state: Tensor) -> None:
        """Take the initial weights and the epochs of restarts from a checkpoint."""
        count = len(self.initial)
        self.initial = state[:count].detach().cpu().clone()
        epochs = map(int, state[count:].tolist())
        self.restart_epochs = {n: x for n, x in zip(self.widths, epochs, strict=False) if x}

    def restarts(self) -> Mapping[str, int]:
        """Return modality -> epoch of the last restart of its schedule."""
        return self.restart_epochs

    def active(self, context: StepContext) -> bool:
        return bool(self.times and self.strength) and super().active(context)

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        epochs_done = int(context.epoch) - ceil(self.start)
        due = epochs_done > 0 and epochs_done % self.every == 0 and int(self.resets) < self.times
        if not (due and len(self.initial)):
            return
        splits = [self._features(trainer, loaders, part) for part in ("train", "val")]
        shares = [0.0] * len(self.widths)
        if self.world.main:
            shares = [
                self.share(*(split[name] for split in splits), seed=number)
                for number, name in enumerate(self.widths)
            ]
        by_modality = dict(zip(self.widths, from_main(shares, self.world), strict=True))
        self.move(by_modality, trainer)
        if self.restart:
            self.restart_epochs |= {n: int(context.epoch) for n, x in by_modality.items() if x}
        self.resets += 1

    @torch.no_grad()
    def _features(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], part: str
    ) -> dict[str, Rows]:
        """Return pooled features, presence, classes and weights of a split, in order of ids."""
        module, device = trainer.module, self.world.device
        trainer.share_statistics()
        ids: list[str] = []
        parts: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in self.widths}
        with evaluating(module):
            for number, batch in enumerate(self._batches(loaders, part)):
                batch = batch.to(device)
                with autocast(trainer.cfg.train, device):
                    if number == 0 and sharded(module):
                        module(batch)  # FSDP's first pass must go through all of it
                    features = module.model.encode(batch)
                ids += batch.ids
                target, weight = batch.target, batch.weight
                assert target is not None
                weight = torch.ones(len(target)) if weight is None else weight
                for name, rows in parts.items():
                    x, present = pooled_of(features, name)
                    columns = (x.double(), present, target, weight.double())
                    rows.append(tuple(column.cpu() for column in columns))
        # By id, so that K-means reads the same rows from any number of processes.
        order = torch.from_numpy(np.argsort(list(chain(*gather(ids, self.world))), kind="stable"))
        by_modality: dict[str, Rows] = {}
        for name, rows in parts.items():
            gathered = zip(*chain(*gather(rows, self.world)), strict=True)
            sorted_columns = [torch.cat(column)[order].numpy() for column in gathered]
            by_modality[name] = Rows(*sorted_columns)
        return by_modality

    def _batches(self, loaders: Mapping[str, Any], part: str) -> Iterator[Batch]:
        """Yield this process's batches of a split, as many as every other process has."""
        loader = loaders["val"]  # whose samples are not augmented
        dataset = loaders[part].dataset
        generator = self.draw(int(self.resets), int(part == "val"))
        rows = torch.randperm(len(dataset), generator=generator)[: self.rows].sort().values
        shares = np.array_split(rows.numpy(), self.world.size)
        size = int(getattr(loader.batch_sampler, "batch_size", 0) or 1)
        batches = np.array_split(shares[self.world.rank], ceil(len(shares[0]) / size))
        keys = [batch.tolist() for batch in batches]
        yield from make_loader(dataset, keys, loader.collate_fn, num_workers=loader.num_workers)

    def share(self, train: Rows, val: Rows, *, seed: int = 0) -> float:
        """Return w of a modality: its rows in both splits."""
        purities = []
        for rows in (train.used(), val.used()):
            if len(rows.target) < 2 * self.clusters:
                return 0.0
            start = self.draw(int(self.resets), seed).initial_seed() % 2**32
            purities.append(purity(rows, self.clusters, start))
        return float(np.tanh(self.strength * abs(purities[0] - purities[1])))

    @torch.no_grad()
    def move(self, shares: Mapping[str, float], trainer: RunningTrainer) -> None:
        """Move each encoder's weights by its share of the way to the initial ones."""
        reshard(trainer.module)
        learning = self._learning()
        initial = iter(self.initial.split([p.numel() for ps in learning.values() for p in ps]))
        names = {id(p): name for name, p in trainer.module.named_parameters()}
        for modality, parameters in learning.items():
            share = shares[modality]
            for parameter, flat in zip(parameters, initial, strict=False):
                if not share:
                    continue
                full = flat.view(parameter.shape).to(parameter.device, parameter.dtype)
                goal = shard_like(full, parameter)
                parameter.lerp_(goal, share)
                if trainer.ema is not None:
                    trainer.ema.means[names[id(parameter)]].lerp_(goal, share)
                for key, value in trainer.optimizer.state.get(parameter, {}).items():
                    if key in MOMENTA and isinstance(value, Tensor):
                        value.mul_(1 - share)


def purity(rows: Rows, clusters: int, seed: int) -> float:
    """Return the share of rows, by their weights, in the most frequent class of their cluster."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import minmax_scale

    means = KMeans(clusters, n_init=RESTARTS, random_state=seed)
    with warnings.catch_warnings():  # fewer distinct rows than clusters: some stay empty
        warnings.simplefilter("ignore", ConvergenceWarning)
        scaled = minmax_scale(rows.features, (-1, 1))
        codes = means.fit_predict(scaled, sample_weight=rows.weights)
    table = np.zeros((clusters, int(rows.target.max()) + 1))
    np.add.at(table, (codes, rows.target), rows.weights)
    return float(table.max(1).sum() / rows.weights.sum())
