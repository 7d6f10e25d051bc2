"""Shapley values of players whose scores are known by subset; the number that is explained.

Shapes: `N` samples, `S` subsets of the players, `K` logits of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.evaluation.shapley import shapley, subsets
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target

Subset = frozenset[str]
Evaluate = Callable[[Sequence[Subset]], Tensor]  # subsets of the players -> scores (S, N) float64
MAX_EXACT = 8  # players; more have their Shapley values estimated


class Shares(NamedTuple):
    """Shapley values, which sum to the score of all players minus that of none."""

    values: dict[str, Tensor]  # player -> (N,) float64
    errors: dict[str, Tensor]  # their standard errors (N,), 0 where they are exact
    empty: Tensor  # the score of no player, (N,)


def exact_shares(evaluate: Evaluate, players: Sequence[str]) -> Shares:
    """Compute Shapley values (1953) from the scores of all 2^P subsets."""
    every = subsets(players)
    scores = dict(zip(every, evaluate(every), strict=True))
    values = shapley(scores, players)
    errors = {name: torch.zeros_like(x) for name, x in values.items()}
    return Shares(values, errors, scores[frozenset()])


def sampled_shares(
    evaluate: Callable[[int], Evaluate], players: Sequence[str], pairs: int, seed: int = 0
) -> Shares:
    """Estimate Shapley values: what each player adds, averaged over random orders of them.

    Orders come in pairs, one the reverse of the other, which lowers the variance (Castro et al.
    2009; Mitchell et al. 2022, arXiv:2104.12199). The standard errors are those of the mean over
    `pairs` pairs. `evaluate(n)` returns what evaluates pair n.
    """
    generator = torch.Generator().manual_seed(seed)
    added: dict[str, list[Tensor]] = {name: [] for name in players}
    empties = []
    for number in range(pairs):
        order = [players[i] for i in torch.randperm(len(players), generator=generator).tolist()]
        chains = [frozenset(x[:size]) for x in (order, order[::-1]) for size in range(len(x) + 1)]
        forward, reverse = evaluate(number)(chains).chunk(2)
        steps = zip(order, forward.diff(dim=0), reverse.diff(dim=0).flip(0), strict=True)
        for name, first, second in steps:
            added[name].append((first + second) / 2)
        empties.append(forward[0])
    stacked = {name: torch.stack(steps) for name, steps in added.items()}
    return Shares(
        {name: x.mean(0) for name, x in stacked.items()},
        {name: x.std(0) / math.sqrt(pairs) for name, x in stacked.items()},
        torch.stack(empties).mean(0),
    )


@dataclass(frozen=True)
class Question:
    """Which number of a model's answer is explained: its score.

    - one class: the log-odds of the class, log p / (1 - p); without `label` of the predicted one;
    - labels: the log-odds of a label; without `label` of the most probable one;
    - a number: the prediction, in the data's units;
    - a level: the mean of the levels, weighted by their probabilities.
    """

    target: Target
    first: int  # of the target's logits among all
    label: str = ""

    @classmethod
    def of(cls, model: FusionModel, answer: str, label: str) -> Question:
        """Choose the target `answer` of a model (empty: the first), and check the label."""
        if not (model.classes or model.targets):
            raise FusionZooError("this model was trained without a target: nothing to explain")
        targets = model.answer_targets
        names = [target.name for target in targets]
        if answer:
            problem = f"--answer {answer}: the model has no such target"
            check_known(answer, names, problem, "It answers")
        place = names.index(answer) if answer else 0
        target = targets[place]
        question = cls(target, sum(x.width for x in targets[:place]), label)
        labels = question.labels
        if label and not labels:
            raise FusionZooError(f"--label {label}: {target.name!r} has no classes or labels")
        if label:
            problem = f"--label {label}: target {target.name!r} has no such class or label"
            check_known(label, labels, problem)
        if isinstance(target, OneOf) and len(target.classes) < 2:
            raise FusionZooError(f"the model knows one class, {labels[0]!r}: nothing to explain")
        return question

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes or labels of which one is explained; of a number or level none."""
        return self.target.classes if isinstance(self.target, OneOf | AnyOf) else ()

    def logits_of_target(self, logits: Tensor) -> Tensor:
        """Return the target's logits of all of a model's: (..., K) -> (..., width)."""
        return logits[..., self.first : self.first + self.target.width].double()

    def choose(self, logits: Tensor) -> Tensor:
        """Return the index of the explained class or label of each row: (N, K) -> (N,) int64."""
        of_target = self.logits_of_target(logits)
        if self.label:
            return torch.full((len(of_target),), self.target.classes.index(self.label))
        return of_target.argmax(-1).cpu()

    def score(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the explained number: (..., N, K), indices (N,) -> (..., N) float64."""
        of_target = self.logits_of_target(logits).cpu()
        if isinstance(self.target, Number):
            numbers = self.target.predicted(of_target.flatten(0, -2))
            return numbers.unflatten(0, of_target.shape[:-1])
        if isinstance(self.target, Level):
            levels = torch.tensor([float(x) for x in self.target.classes], dtype=torch.float64)
            above = of_target.sigmoid().cumprod(-1)  # P(level > k)
            return levels[0] + (above * levels.diff()).sum(-1)
        index = chosen.expand(of_target.shape[:-1])[..., None]
        logit = of_target.gather(-1, index)[..., 0]
        if isinstance(self.target, AnyOf):
            return logit
        return logit - of_target.scatter(-1, index, -math.inf).logsumexp(-1)

    def unit(self, chosen: int) -> str:
        """Return what the score of a row is, in words."""
        labels = self.labels
        return f"log-odds of {labels[chosen]!r}" if labels else f"units of {self.target.name}"

    def decode(self, logits: Tensor) -> list[Any]:
        """Return the answer of each row, (N, K)."""
        return self.target.decode(self.logits_of_target(logits).cpu())
