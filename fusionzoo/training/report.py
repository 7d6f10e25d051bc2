"""Report a run: data summary, learning-rate groups, metrics.json, final table, model folder."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from fusionzoo.config import RunConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.naming import IN_MEMORY, UNNAMED, data_title
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.evaluation.measure import POSITIVE, WEIGHTED_BY, Answers, terms
from fusionzoo.evaluation.statistics import effective_size, share_interval
from fusionzoo.files import whole_lines, write_json
from fusionzoo.ground.console import command_line
from fusionzoo.ground.plugins import plugin_list
from fusionzoo.machine.devices import same_randomness
from fusionzoo.machine.distributed import from_main, gather
from fusionzoo.machine.fsdp import full_state_dict, sharded
from fusionzoo.model.confidence import Calibration
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load
from fusionzoo.model.trained_on import Row, RunResults, TrainedOn
from fusionzoo.structures import Batch

from .calibrate import calibratable, calibrate, calibration_rows, measure
from .checkpoint import State
from .fit import Metrics, collect_answers, metrics_of
from .floors import FLOORS, LINEAR, Floors
from .gain import GAIN, alone, best_line, linear_on, paired_gain, single_lines
from .multitask import Tasks
from .optim import describe, group_rows
from .tracker import Tracker, environment
from .trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUSION = "fusion"  # its curve
SHORT = 24  # characters of an encoder's name in the final table; of longer ones its library stands
FUSED, TRAINED = "fusion: ", "trained: "  # before the name of a model of several modalities, of one
Curves = dict[str, list[Any]]  # what is drawn -> a value per epoch, None where there is none


def show_data(dataset: PairedDataset, dropped: Sequence[str], tracker: Tracker) -> None:
    """Print the data summary, and settings dropped with the modalities that they belong to."""
    if tracker.world.main:
        tracker.say(*data_summary(dataset))
    if dropped:
        tracker.say(f"unused settings, left out by --data.modalities: {', '.join(dropped)}")


def show_groups(folder: Path, trainer: Trainer, tracker: Tracker) -> None:
    """Print the table of learning-rate groups, and write it to groups.json."""
    unfreezing = trainer.freeze_plan.unfreezing
    groups = trainer.optimizer.param_groups
    described = describe(groups, trainer.module.model, trainer.cfg.optim, unfreezing)
    tracker.table("Learning-rate groups", *group_rows(described))
    if tracker.world.main:
        write_json(folder / "groups.json", described)


def check_saving(folder: Path, trainer: Trainer) -> None:
    """Save the model before its first step and load it again, so that no run ends with a folder
    that nothing can read; called by all processes, for they may share the weights."""
    model, world, scratch = trainer.module.model, trainer.world, folder / "check"
    weights = full_state_dict(model) if sharded(trainer.module) else None
    problem = None
    if world.main:
        try:
            with same_randomness(world.device):
                load(model.save(scratch, weights))
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            problem = reason.replace(f"{scratch}/", "")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    problem = from_main(problem, world)
    if problem:
        raise FusionZooError(
            "this model could be trained, but not saved and loaded again, so the run is not"
            f" started: {problem}"
        )


def test_model(
    trainer: Trainer, loader: DataLoader[Batch], val: Answers | None, floors: Floors | None = None
) -> tuple[Metrics, Calibration | None, dict[str, dict[str, float]]]:
    """Evaluate on the test split; fit temperatures, thresholds and conformal scores to the answers
    to the validation split, unless `--train.calibrate none`. Return the metrics, these, and their
    figures on the test split."""
    split: Any = loader.dataset
    module = trainer.module
    each_alone = len(module.model.encoders) > 1 and module.tasks.has_target
    test = collect_answers(trainer, loader, each_alone)
    metrics = metrics_of(module.tasks, test, slow=True)
    metrics |= _beside(module.tasks, test, metrics["unimodal"], floors or Floors(), split)
    if positive := module.tasks.positive:
        metrics[POSITIVE] = positive
    if (column := getattr(split, "weight_column", None)) is not None:
        metrics[WEIGHTED_BY] = column
    targets = module.model.answer_targets
    mode = trainer.cfg.train.calibrate
    if val is None or mode == "none" or not any(target.width for target in targets):
        return metrics, None, {}
    logits, labels, weights = calibratable(val)
    calibration = calibrate(targets, logits, labels, mode, weights)
    return metrics, calibration, measure(calibration, targets, *calibratable(test))


def _beside(
    tasks: Tasks, test: Answers, unimodal: Metrics, floors: Floors, split: Any
) -> dict[str, Any]:
    """Return the metrics of the floors, and the gain over the best modality alone."""
    place = {key: row for row, key in enumerate(floors.ids)}
    rows = [place[key] for key in test.ids] if place else []
    of_all, of_one = (
        {x: y[rows] for x, y in part.items()} for part in (floors.of_all, floors.of_one)
    )
    beside = {
        key: {x: tasks.metrics(y, test.target, test.weights, slow=True) for x, y in part.items()}
        for key, part in ((FLOORS, of_all), (LINEAR, of_one))
    }
    if len(unimodal) > 1:
        logits = {alone(x): y for x, y in test.alone.items()}
        logits |= {linear_on(x): y for x, y in of_one.items()}
        best = best_line(tasks, single_lines(tasks, unimodal, beside[LINEAR]))
        beside[GAIN] = paired_gain(tasks, test, best, logits[best], split)
    return {key: part for key, part in beside.items() if part}


def save_model(
    folder: Path,
    trainer: Trainer,
    splits: Mapping[str, PairedDataset],
    calibration: Calibration | None,
    state: State,
    test: Mapping[str, Any],
) -> None:
    """Write the model folder; called by all processes, for they may share the weights.

    It holds the results of the test split, which its model card shows.
    """
    module, model = trainer.module, trainer.module.model
    strategies = list(module.balance.values())
    prefixes = {size for strategy in strategies for size in getattr(strategy, "prefixes", ())}
    projections: list[Any] = [strategy.project for strategy in strategies if strategy.aligns]
    model.complete(
        align=projections[-1] if projections else None,
        matryoshka=sorted(prefixes),
        heads=module.heads if any(True for _ in module.heads.parameters()) else None,
        calibration=calibration,
    )
    weights = full_state_dict(model) if sharded(module) else None
    if trainer.world.main:
        results = results_of(trainer, splits, state, test)
        model.complete(trained_on=TrainedOn.of(trainer.cfg.data, splits, results))
        model.save(folder / "model", weights)


def results_of(
    trainer: Trainer,
    splits: Mapping[str, PairedDataset],
    state: State,
    test: Mapping[str, Any],
) -> RunResults:
    """Return what the model card shows of the test split: given all modalities, and each alone."""
    tasks, modalities = trainer.module.tasks, list(trainer.module.model.modalities)
    titles = {name: title for name, title in tasks.shown if name in test}

    def row(given: list[str], samples: int, metrics: Mapping[str, float]) -> Row:
        is_share = {"accuracy"} if tasks.plain else set()
        size = _size_of_interval(splits["test"], given, samples)
        figures = {name: metrics[name] for name in titles if name in metrics}
        return Row(
            given=given,
            samples=samples,
            metrics={
                name: [x, *(share_interval(x, size) if name in is_share else ())]
                for name, x in figures.items()
            },
        )

    alone = test.get("given_only", {}) if len(modalities) > 1 else {}
    identity = json.dumps(state.data, sort_keys=True)
    return RunResults(
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
        samples={name: len(split) for name, split in splits.items()},
        best_epoch=state.best["epoch"],
        select=trainer.cfg.train.select,
        titles=titles,
        seeds=len(state.best.get("seeds", [0])),
        rows=[
            row(modalities, len(splits["test"]), test),
            *(
                row([name], test["where_present"][name]["samples"], metrics)
                for name, metrics in alone.items()
            ),
        ],
    )


def _size_of_interval(split: PairedDataset, given: Sequence[str], samples: int) -> int:
    """Return how many independent samples the figures given some modalities count as."""
    if split.weights is None:
        return samples
    columns = [list(split.modalities).index(name) for name in given]
    weights = split.weights[split.present[:, columns].any(1)]
    return effective_size(weights.double().numpy())


def out_of_memory(trainer: Trainer) -> FusionZooError:
    """Say what to make smaller: the batch, or the largest encoder."""
    sizes = {name: sum(p.numel() for p in ps) for name, ps in trainer.encoders.items()}
    largest = max(sizes, key=sizes.__getitem__)
    return FusionZooError(
        f"{trainer.world.device} is out of memory: --train.batch_size is"
        f" {trainer.cfg.train.batch_size} (a smaller one with --train.accumulate learns the same),"
        f" the largest encoder is {largest} with {sizes[largest]:,} parameters;"
        " --train.checkpointing and --train.amp bf16 save memory"
    )


def write_results(
    folder: Path,
    trainer: Trainer,
    state: State,
    test: Mapping[str, Any],
    calibrated: Mapping[str, Mapping[str, float]],
    tracker: Tracker,
) -> dict[str, Any]:
    """Write metrics.json (on the main process), and return what it holds."""
    tasks = trainer.module.tasks
    notes = {x: test[x] for x in (POSITIVE, WEIGHTED_BY, FLOORS, LINEAR, GAIN) if x in test}
    groups = ("unimodal", "given_only", "where_present", *notes)
    shared = {name: x for name, x in test.items() if name not in groups}
    results: dict[str, Any] = {
        "train": {"loss": state.best["train_loss"]},
        "val": {name: state.best[name] for name in shared if name in state.best},
        "test": shared,
        "unimodal": test["unimodal"],
        "given_only": test.get("given_only", {}),
        "where_present": test.get("where_present", {}),
        **({"calibration": dict(calibrated)} if calibrated else {}),
        **notes,
        "best_epoch": state.best["epoch"],
        "select": trainer.cfg.train.select,
        **{key: x for key, x in state.best.items() if key in ("refit", "seeds", "average_linear")},
        "throughput": {
            "samples_per_second": trainer.rows / tracker.busy if tracker.busy else None,
            "seconds": {part: round(time, 2) for part, time in tracker.seconds.items()},
        },
        "environment": environment(tracker.world),
    }
    header, rows = result_rows(tasks, _model_line(trainer), results)
    names = [name for name, _ in tasks.shown if name in shared]
    results["table"] = {"header": header, "rows": rows, "metrics": names}
    if tracker.world.main:
        write_json(folder / "metrics.json", results)
    return results


def show_results(
    folder: Path, cfg: RunConfig, tasks: Tasks, results: Mapping[str, Any], tracker: Tracker
) -> None:
    """Print what each modality and the fusion reach, where the model is, and what to run next."""
    refit = results.get("refit")
    again = f", trained anew on {refit['samples']:,} samples of train and val" if refit else ""
    tracker.table(
        f"Test split, {chosen_weights(results)}{again}",
        results["table"]["header"],
        results["table"]["rows"],
    )
    if "calibration" in results:
        title = "Probabilities on the test split, before -> after calibration on validation data"
        tracker.table(title, *calibration_rows(results["calibration"]))
    if GAIN in results:
        tracker.say(f"gain    {results[GAIN]['words']}")
    epochs = cfg.train.epochs
    if results["best_epoch"] == epochs > 1 and results.get("select") != "last":
        tracker.say(f"the best epoch is the last: --train.epochs {2 * epochs} may be better")
    if better := better_floors(tasks, results):
        tracker.say(
            f"Better here than the trained model: {', '.join(better)}. More rows may change that;"
            f" `{command_line('benchmark')}` tells chance from gain"
        )
    heads = {name: x["unimodal"] for name, x in results["where_present"].items() if x["unimodal"]}
    short = falls_short(tasks, heads, results["given_only"])
    if short and "modality_dropout" not in cfg.balance:
        tracker.say(
            f"Given {' or '.join(short)} only, the fusion falls far short of that modality's own"
            " head: --balance modality_dropout trains it for missing modalities"
        )
    tracker.say(f"model   {folder / 'model'}   (fusionzoo.load reads it)")
    first, *others = next_steps(folder, cfg, has_target=tasks.has_target)
    tracker.say(f"next    {first}", *(f"        {step}" for step in others))
    if cfg.log == "tensorboard":
        logs = folder / ("seeds" if "seeds" in results else "tensorboard")
        tracker.say(f"        tensorboard --logdir {logs}")
    elif cfg.log == "none":
        tracker.say("curves  --log tensorboard draws them; metrics.jsonl has their figures")


def better_floors(tasks: Tasks, results: Mapping[str, Any]) -> list[str]:
    """Name the floors whose leading metric is visibly better than the model's, and by how much."""
    name, test = tasks.leading, results["test"]
    return [
        f"{line} ({tasks.gain(name, figures, test)})"
        for line, figures in results.get(FLOORS, {}).items()
        if tasks.leading_value(figures) > tasks.leading_value(test)
        and f"{figures[name]:.3f}" != f"{test[name]:.3f}"
    ]


def chosen_weights(results: Mapping[str, Any]) -> str:
    """Say which weights of the model the results of a run are of, and by which terms."""
    return f"{_chosen_epochs(results)}{terms(results)}"


def _chosen_epochs(results: Mapping[str, Any]) -> str:
    is_last = results.get("select") == "last"  # a trial of an earlier version does not say
    if "seeds" in results:
        each = "its last epoch" if is_last else "its best epoch by validation"
        return f"{len(results['seeds'])} seeds joined, each of {each}"
    if is_last:
        return f"last epoch, {results['best_epoch']}"
    return f"best epoch {results['best_epoch']} by validation"


def next_steps(folder: Path, cfg: RunConfig, *, has_target: bool) -> list[str]:
    """Return what to run after a training: commands, or calls if the data were in memory."""
    calls = "predict", "evaluate", "report", "embed"
    if cfg.data["name"] == IN_MEMORY or data_title(cfg.data) == UNNAMED:
        chosen = calls if has_target else calls[3:]
        ends = {"embed": 'data, out="embeddings.parquet"', "report": "data=data"}
        return [f'fusionzoo.{x}("{folder}", {ends.get(x, "data")})' for x in chosen]
    root = cfg.data.get("root")
    # A data set without a file is the one that the run remembers, with its settings.
    file = shlex.quote(str(root)) if root else "--split test"
    plugins = ",".join(plugin_list(cfg.plugins))
    flags = f" --plugins {plugins}" if plugins else ""
    commands = [
        f"fusionzoo predict {folder} {file} --out predictions.csv{flags}",
        f"fusionzoo evaluate {folder}{flags}",
        f"fusionzoo report {folder} --html{flags}",
        f"{command_line('embed')} {folder} --out embeddings.parquet{flags}",
    ]
    return commands if has_target else commands[3:]


def report_failures(dataset: PairedDataset, tracker: Tracker) -> None:
    """Warn of files that could not be read, on any process."""
    shards = gather(dataset.failures(), tracker.world)
    failed = {failure for shard in shards for failure in shard}
    if failed:
        examples = ", ".join(f"{key} ({modality})" for key, modality in sorted(failed)[:5])
        tracker.say(f"warning: {len(failed)} values could not be decoded: {examples} ...")


def _model_line(trainer: Trainer) -> str:
    """Return what the final table calls the model: where nothing is fused, by its encoder."""
    encoders = [str(encoder.spec["name"]) for _, encoder in trainer.module.model.named_encoders()]
    if len(encoders) > 1:
        return f"{FUSED}{trainer.cfg.fusion['name']}"
    return f"{TRAINED}{encoders[0] if len(encoders[0]) <= SHORT else encoders[0].partition('/')[0]}"


def result_rows(
    tasks: Tasks, model: str, results: Mapping[str, Any]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the final table: each modality's own head, the fusion given each
    modality only, the model given all, its gain.

    What some samples lack is measured among those that have it, and the line says how many."""
    test, unimodal = results["test"], results["unimodal"]
    shown = [(name, title) for name, title in tasks.shown if name in test]
    singles = single_lines(tasks, unimodal, results.get(LINEAR, {}))
    lines = dict(singles)
    for name, metrics in results["given_only"].items():
        present = results["where_present"][name]
        among = ""
        if present["samples"] < present["of"]:
            among = f", {present['samples']:,} with it"
            if present["unimodal"]:
                lines[f"{alone(name)}{among}"] = present["unimodal"]
        lines[f"fusion given {name} only{among}"] = metrics
    lines |= results.get(FLOORS, {})
    lines |= {model: test}
    lines |= {f"seed {x['seed']} alone": x["test"] for x in results.get("seeds", ())}
    rows = [
        (line, *(f"{metrics[name]:.3f}" for name, _ in shown)) for line, metrics in lines.items()
    ]
    if len(unimodal) > 1:
        best = best_line(tasks, singles)
        gains = [tasks.gain(name, test, singles[best]) for name, _ in shown]
        rows.append((f"gain over {best}", *gains))
    return ("", *(title for _, title in shown)), rows


def falls_short(
    tasks: Tasks, unimodal: Mapping[str, Any], given_only: Mapping[str, Any]
) -> list[str]:
    """Name the modalities given which alone the fusion is more than 10 points worse than that
    modality's own head on the same samples; of an error, more than a tenth worse."""
    short = []
    for name in (x for x in unimodal if x in given_only):
        head, fusion = (tasks.leading_value(m[name]) for m in (unimodal, given_only))
        if head - fusion > (0.1 if tasks.higher else 0.1 * abs(head)):
            short.append(name)
    return short


@dataclass
class Run:
    """What training left in a run folder; in a notebook it shows its table.

    `exit_code` is 0 for a finished run, 130 (Ctrl-C) or 75 (another signal) for one that was
    stopped, which has a history and neither model nor metrics.
    """

    folder: Path
    exit_code: int = 0

    @cached_property
    def model(self) -> FusionModel:
        """The model of the epoch that was kept, in evaluation mode, on the CPU."""
        return load(self.folder)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds: `train`, `val`, `test`, `unimodal`, ...; {} of a stopped run."""
        file = self.folder / "metrics.json"
        if self.exit_code or not file.is_file():
            return {}
        metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict for each epoch, as metrics.jsonl has them: `epoch`, `step`, `train`, `val`."""
        return self._events("epoch")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """One dict for each logged step (every `log_every`): `step`, `loss`, `lr`, `grad_norm`."""
        return self._events("step")

    def _events(self, kind: str) -> list[dict[str, Any]]:
        events = map(json.loads, whole_lines(self.folder / "metrics.jsonl"))
        return [event for event in events if event["event"] == kind]

    def table(self) -> str:
        """Return the final table as Markdown: each modality alone, the fusion, the gain."""
        header, rows = self.results()
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def plot(self) -> Figure:
        """Draw the losses and the validation metric of every epoch (needs matplotlib)."""
        with explained("run.plot() needs pip install 'fusionzoo[notebooks]'", ImportError):
            from matplotlib.figure import Figure

        class NotebookFigure(Figure):
            """Shows itself where matplotlib.pyplot was not imported."""

            def _repr_png_(self) -> bytes:
                picture = BytesIO()
                self.savefig(picture, format="png")
                return picture.getvalue()

        epochs, losses, name, scores = self.curves()
        figure = NotebookFigure(figsize=(9, 3.2), layout="constrained")
        left, *others = figure.subplots(1, 2 if scores else 1, squeeze=False)[0]
        for label, values in losses.items():
            left.plot(epochs, values, label=label)
        left.set(xlabel="epoch", ylabel="loss")
        left.legend()
        if not others:
            return figure
        (right,) = others
        for label, values in scores.items():
            right.plot(epochs, values, label=label, linestyle="-" if label == FUSION else "--")
        right.set(xlabel="epoch", ylabel=f"validation {name}")
        right.legend()
        return figure

    def curves(self) -> tuple[list[int], Curves, str, Curves]:
        """Return the epochs, the losses of each, the metric that the run's table shows first (else
        the loss), and its values on validation data: of the fusion, of each modality alone."""
        history = self.history
        epochs = [event["epoch"] for event in history]
        losses = {"train": [event["train"]["loss"] for event in history]}
        shown = self.metrics.get("table", {}).get("metrics", [])
        last = history[-1]["val"] if history else {}
        names = [*shown, *last, "loss"]
        name = next(n for n in names if n != "loss" or n == names[-1])
        if not last:
            return epochs, losses, name, {}
        losses["validation"] = [event["val"]["loss"] for event in history]
        scores = {FUSION: [event["val"][name] for event in history]}
        for modality in last["unimodal"]:
            values = [event["val"]["unimodal"][modality].get(name) for event in history]
            scores[f"{modality} alone"] = values
        return epochs, losses, name, scores

    def results(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the final table, see `table`."""
        if "table" not in self.metrics:
            raise FusionZooError(f"{self.folder} holds no results: the run was stopped, or goes on")
        return self.metrics["table"]["header"], self.metrics["table"]["rows"]

    def _repr_html_(self) -> str:
        """Show the final table in a notebook."""
        if self.exit_code:
            return f"<p>stopped after {len(self.history)} epochs: {escape(str(self.folder))}</p>"
        header, rows = self.results()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


Model = FusionModel | Run | str | os.PathLike[str]


def path_of(model: Model) -> str:
    """Return the folder of a model or run; empty where the model is in memory alone."""
    folder = model.folder if isinstance(model, Run) else model
    return "" if isinstance(folder, FusionModel) else os.fspath(folder)


def model_of(model: Model) -> FusionModel | None:
    """Return a model that is in memory, or that of a run; None where a folder is named."""
    if isinstance(model, Run):
        return model.model
    return model if isinstance(model, FusionModel) else None
