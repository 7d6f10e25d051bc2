"""The greedy soup of a run's best epochs, and a limit on its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionzoo
from fusionzoo.distributed import World
from fusionzoo.errors import FusionZooError
from fusionzoo.training import fit, soup
from fusionzoo.training.report import Run
from fusionzoo.training.tracker import Tracker

DATA = {"name": "interactions", "samples": 300}


def run(out: Path, **settings: Any) -> Run:
    train = {"epochs": 4, **settings.pop("train", {})}
    return fusionzoo.train(DATA, out=out, log="none", device="cpu", train=train, **settings)


def read(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(path, weights_only=True)
    return contents


def weights(path: Path) -> dict[str, Tensor]:
    contents = read(path)
    state: dict[str, Tensor] = contents.get("weights") or contents["objective"]
    return state


def planted_ranks(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Make the leading metric of the evaluations on the validation split those values, in turn."""
    ranks = iter(values)
    evaluate = fit.evaluate

    def planted(*args: Any, **kwargs: Any) -> Any:
        metrics, rank = evaluate(*args, **kwargs), next(ranks, None)  # None: the test split
        return metrics if rank is None else {**metrics, "accuracy": rank, "loss": 1.0}

    monkeypatch.setattr(fit, "evaluate", planted)


def test_the_best_epochs_are_averaged_while_validation_does_not_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four epochs; then the best (2) with the next (3), which falls, then with the third (4).
    planted_ranks(monkeypatch, [0.1, 0.8, 0.7, 0.6, 0.79, 0.8])
    result = run(tmp_path / "a", train={"soup": 3})
    folder = tmp_path / "a" / "checkpoints"
    assert sorted(x.name for x in folder.glob("soup-*")) == ["soup-2.pt", "soup-3.pt", "soup-4.pt"]
    assert result.metrics["soup"] == [2, 4]
    assert result.metrics["best_epoch"] == 2
    assert "soup of epochs 2, 4: val accuracy 0.800, of the best epoch" in capsys.readouterr().out
    second, fourth = (weights(folder / f"soup-{epoch}.pt") for epoch in (2, 4))
    mixed = weights(folder / "best.pt")
    moved = [n for n, x in second.items() if x.is_floating_point() and (x != fourth[n]).any()]
    assert moved
    for name, x in second.items():
        if x.is_floating_point():
            torch.testing.assert_close(mixed[name], (x + fourth[name]) / 2, rtol=1e-5, atol=1e-7)
    saved = dict(result.model.named_parameters())
    for name in moved:
        if name.startswith("model."):
            assert torch.equal(saved[name.removeprefix("model.")].detach(), mixed[name])


def test_a_soup_that_never_gains_leaves_the_best_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_ranks(monkeypatch, [0.1, 0.8, 0.7, 0.6, 0.5, 0.5])
    result = run(tmp_path / "a", train={"soup": 3})
    folder = tmp_path / "a" / "checkpoints"
    assert "soup" not in result.metrics
    best = weights(folder / "best.pt")
    for name, x in weights(folder / "soup-2.pt").items():
        assert torch.equal(best[name], x)


def test_the_soup_holds_running_statistics_and_the_moving_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_ranks(monkeypatch, [0.5, 0.6, 0.7])
    image = {"name": "timm/test_resnet", "pretrained": False, "size": 32}
    data = {"name": "digits", "samples": 200, "modalities": "image"}
    result = fusionzoo.train(
        data,
        encoders={"image": image},
        fusion={"name": "concat", "dim": 8},
        train={"epochs": 2, "soup": 2, "ema": 0.9},
        out=tmp_path / "a",
        log="none",
        device="cpu",
    )
    folder = tmp_path / "a" / "checkpoints"
    first, second = (weights(folder / f"soup-{epoch}.pt") for epoch in (1, 2))
    assert result.metrics["soup"] == [2, 1]
    statistics = [name for name in first if name.endswith("running_mean")]
    counters = [name for name in first if name.endswith("num_batches_tracked")]
    assert statistics and counters
    state = {f"model.{name}": x for name, x in result.model.state_dict().items()}
    for name in statistics:
        torch.testing.assert_close(state[name], (first[name] + second[name]) / 2)
    for name in counters:
        assert torch.equal(state[name], second[name])
    average = read(folder / "best.pt")["average"]["means"]
    trained = "model.fusion.head.weight"
    torch.testing.assert_close(average[trained], (first[trained] + second[trained]) / 2)
    assert torch.equal(state[trained], average[trained])


def test_a_resumed_soup_is_that_of_a_run_in_one_go(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", train={"soup": 4})
    run(tmp_path / "parts", train={"soup": 4, "time_limit": "0.001s"})
    resumed = run(tmp_path / "parts", train={"soup": 4, "time_limit": None}, resume=True)
    assert whole.metrics.get("soup") == resumed.metrics.get("soup")
    paths = [tmp_path / name / "checkpoints" / "best.pt" for name in ("whole", "parts")]
    ours, theirs = (weights(path) for path in paths)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_equal_parts_make_the_mean_of_three() -> None:
    parts = [{"w": torch.tensor([x]), "n": torch.tensor(int(x))} for x in (3.0, 6.0, 12.0)]
    mixed = soup.weighted_mean(soup.weighted_mean(parts[0], parts[1], 1 / 2), parts[2], 1 / 3)
    torch.testing.assert_close(mixed["w"], torch.tensor([7.0]))
    assert mixed["n"] == 3


def test_a_run_out_of_time_reports_and_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole")
    asked: list[int] = []

    def late_at_the_eighth_step(tracker: Tracker, limit: Any) -> bool:
        asked.append(1)
        return limit is not None and len(asked) > 9

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "is_late", late_at_the_eighth_step)
        part = run(tmp_path / "parts", train={"time_limit": "10m"})
    said = capsys.readouterr().out
    assert "time limit of 10m reached at step" in said and "goes on" in said
    assert part.exit_code == 0 and part.metrics["test"] and part.model
    steps = part.history[-1]["step"]
    assert 0 < steps < whole.history[-1]["step"]
    again = run(tmp_path / "parts", train={"time_limit": None}, resume=True)
    paths = [tmp_path / name / "checkpoints" / "last.pt" for name in ("whole", "parts")]
    ours, theirs = (weights(path) for path in paths)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert [event["val"]["loss"] for event in again.history] == [
        event["val"]["loss"] for event in whole.history
    ]


def test_a_limit_of_no_time_still_makes_a_step_and_a_model(tmp_path: Path) -> None:
    result = run(tmp_path / "a", train={"time_limit": "0.001s"})
    assert result.history[-1]["step"] == 1
    assert result.metrics["test"] and (tmp_path / "a" / "model" / "config.json").is_file()
    state = read(tmp_path / "a" / "checkpoints" / "last.pt")["state"]
    assert (state["step"], state["evaluated"]) == (1, 0)


def test_a_fusion_with_phases_is_saved_before_its_last_one(tmp_path: Path) -> None:
    """Its best epoch counts anew once the last phase has begun."""
    result = run(tmp_path / "a", fusion="mmin", train={"time_limit": "0.001s"})
    assert result.metrics["test"]
    state = read(tmp_path / "a" / "checkpoints" / "last.pt")["state"]
    assert state["best"] == {}


@pytest.mark.parametrize("limit", ["10 minutes", "0s", "m", "1d", "-5s"])
def test_a_limit_that_is_no_time_is_one_line(limit: str, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="time_limit="):
        run(tmp_path / "a", train={"time_limit": limit})
    assert not (tmp_path / "a").exists()


def test_limits_in_all_units_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(World())
    tracker._created -= 100
    assert [tracker.is_late(x) for x in ("99s", "1.5m", 99, "101", "2m", "1h", None)] == [
        *[True] * 3,
        *[False] * 4,
    ]
