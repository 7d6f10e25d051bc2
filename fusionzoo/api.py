"""The Python API: what the command line does, as functions; settings and errors are the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusionzoo.config import EmbedConfig, EvaluateConfig, PredictConfig, RunConfig, from_settings
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.distributed import World, keep_freed_memory, launched, pick_device, process_group
from fusionzoo.embeddings.files import FORMATS, EmbeddingFile
from fusionzoo.encoders import ENCODERS, Encoder
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.inputs import Data, data_settings, in_memory, read_data
from fusionzoo.model import FusionModel
from fusionzoo.registry import Registry
from fusionzoo.training.balance import BALANCE, Balance
from fusionzoo.training.multitask import targets_of
from fusionzoo.training.report import Run
from fusionzoo.training.tasks import OBJECTIVES, Task

if TYPE_CHECKING:
    from fusionzoo.tools.analyse import Analysis


Config = RunConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Model = FusionModel | Run | str | os.PathLike[str]


def train(data: Data = None, *, config: Config = None, **settings: Any) -> Run:
    """Train a fusion model: `train("digits", fusion="gmu", epochs=10, out="runs/a")`.

    `data` is what `create_dataset` opens: a data set's name, a path, settings, a table or data set
    in memory, a `PairedDataset`. Settings are those of `train.py`: sections are mappings
    (`optim={"lr": 1e-3}`), and a setting whose name only one section has may stand alone
    (`epochs=10`, `modality_lr={"text": 2e-5}`). They override those of `config`: a recipe's path, a
    nested mapping or a `RunConfig`.

    Works in a notebook, in a script, and in a script under torchrun. Ctrl-C ends the run after a
    whole step; `Run.exit_code` is 130 then, and `train(..., resume=True)` continues it.
    """
    data = read_data(data)
    if data is not None:
        settings["data"] = data_settings(data)
    cfg = from_settings(RunConfig, settings, config)
    if cfg.dist.nproc > 1 and not launched():
        raise FusionZooError(
            "dist.nproc is for the command line, which starts the processes: start your script"
            f" with `torchrun --nproc-per-node={cfg.dist.nproc} script.py`"
        )
    from fusionzoo.scripts.train import train as run

    keep_freed_memory()
    with process_group(cfg.dist, cfg.device) as world:
        return run(cfg, world, in_memory(data, targets_of(cfg)))


def evaluate(model: Model, data: Data = None, **settings: Any) -> dict[str, Any]:
    """Return a model's metrics on data: `evaluate(run.model, "my.csv", every_subset=True)`.

    Without `data`, on those that it was trained on, whose settings its folder holds. Metrics of the
    fusion, and under `unimodal` of each modality's own head; with `every_subset` under `subsets`
    those given each subset of the modalities; `seen_in_training` counts the samples whose ids
    training or validation read. Further settings: `split` ("test" by default; "all"),
    `batch_size`, `num_workers`, `device`.
    """
    from fusionzoo.inference import evaluate as run

    data = read_data(data)
    cfg = from_settings(EvaluateConfig, _model_and_data(model, data, settings))
    return run(cfg, _loaded(model), in_memory(data, {}))


def predict(model: Model, data: Data, **settings: Any) -> Any:
    """Predict every sample: `predict(run.model, "my.csv", out="p.parquet")`.

    Columns: `id`, `label`, `p_<class>`, `present_<modality>`. Returns the path `out` (.parquet or
    .csv), or without `out` a `pyarrow.Table`. Further settings: `split` ("all" by default),
    `batch_size`, `num_workers`, `device`.
    """
    from fusionzoo.inference import predict as run

    data = read_data(data)
    cfg = from_settings(PredictConfig, _model_and_data(model, data, settings))
    return run(cfg, _loaded(model), in_memory(data, {}))


def embed(model: Model | Data, data: Data = None, **settings: Any) -> Path:
    """Write embeddings to a file: `embed(run.model, "my.csv", out="emb.parquet")`.

    Without training, of pretrained encoders: `embed("my.csv", encoders={"image": "timm/resnet18"},
    fusion="mean")`. Settings are those of `embed.py`: `out`, `split`, `batch_size`, `dtype`, ...
    The same call goes on where a killed one stopped; `read_embeddings` reads the file. In a script
    under torchrun process 0 embeds alone; the command shares the work.
    """
    encoders = settings.get("encoders")
    if data is None and (encoders or "fusion" in settings):
        return _embed_untrained(model, settings)
    if data is None:
        raise FusionZooError("embed(model, data), or embed(data, encoders={...}, fusion='concat')")
    data = read_data(data)
    cfg = from_settings(EmbedConfig, _model_and_data(model, data, settings))
    return _embed(cfg, _loaded(model), in_memory(data, {}))


def _embed_untrained(data: Data, settings: Mapping[str, Any]) -> Path:
    """Embed with encoders and a fusion without training; encoders may be built in Python."""
    data = read_data(data)
    encoders = dict(settings.get("encoders") or {})
    built = {name: x for name, x in encoders.items() if isinstance(x, Encoder)}
    if not built:
        cfg = from_settings(EmbedConfig, {**settings, "data": data_settings(data)})
        return _embed(cfg, None, in_memory(data))
    from fusionzoo.embeddings.open import compose
    from fusionzoo.training.build import open_dataset

    rest = {name: x for name, x in settings.items() if name not in ("encoders", "fusion")}
    cfg = from_settings(EmbedConfig, {**rest, "data": data_settings(data)})
    fusion = settings.get("fusion")
    dataset = open_dataset(cfg.data, None, in_memory(data))
    model = compose(dataset, encoders, {"name": fusion} if isinstance(fusion, str) else fusion)
    return _embed(cfg, model, dataset)


def _embed(cfg: EmbedConfig, model: FusionModel | None, dataset: PairedDataset | None) -> Path:
    from fusionzoo.scripts.embed import embed as run

    if launched() and os.environ.get("RANK", "0") != "0":
        return Path(cfg.out)
    return run(cfg, World(device=pick_device(cfg.device)), model, dataset)


def analyse(data: Data, model: Model | None = None, **settings: Any) -> Analysis:
    """Return what data needs of a fusion: `analyse("my.csv").advice`.

    Redundancy, uniqueness and synergy of the modalities, in bits (`.pairs`); with a `model` how
    much of its score needs interactions (`.emap`). Further settings are those of `fusionzoo
    analyse`: `encoders`, `folds`, `pid_mode`, `clusters`, `split`, `samples`, `device`, ... With
    `pid_mode="sample"` each pair has the parts of every sample, by id (`.pairs[0].by_sample`).
    """
    from fusionzoo.tools.analyse import AnalyseConfig
    from fusionzoo.tools.analyse import analyse as run

    data = read_data(data)
    folder = model.folder if isinstance(model, Run) else model
    path = "" if folder is None or isinstance(folder, FusionModel) else os.fspath(folder)
    settings = {**settings, "model": path, "data": data_settings(data)}
    cfg = from_settings(AnalyseConfig, settings)
    return run(cfg, None if model is None else _loaded(model), in_memory(data))


def _model_and_data(model: Model, data: Data, settings: Mapping[str, Any]) -> dict[str, Any]:
    folder = model.folder if isinstance(model, Run) else model
    path = "" if isinstance(folder, FusionModel) else os.fspath(folder)
    return {**settings, "model": path, "data": {} if data is None else data_settings(data)}


def _loaded(model: Model) -> FusionModel | None:
    if isinstance(model, Run):
        return model.model
    return model if isinstance(model, FusionModel) else None


C = TypeVar("C", bound=Callable[..., Any])

REGISTRIES: dict[str, Registry[Any, Any]] = {
    "fusion": FUSIONS,
    "encoder": ENCODERS,
    "dataset": DATASETS,
    "balance": BALANCE,
    "objective": OBJECTIVES,
    "embedding_format": FORMATS,
}
BASES: dict[str, type] = {
    "fusion": Fusion,
    "encoder": Encoder,
    "balance": Balance,
    "objective": Task,
    "embedding_format": EmbeddingFile,
}
DEFAULT_FAMILIES = {
    "fusion": "early",
    "dataset": "built-in",
    "objective": "objective",
    "embedding_format": "file",
}


def register(component: C, *, kind: str | None = None, name: str | None = None, **facts: Any) -> C:
    """Register a class, or the function that opens a data set, and return it.

    `kind` is fusion, encoder, dataset, balance, objective or embedding_format; default: by the base
    class, and a function opens a data set. `name` is by default that of the class, `MyFusion` as
    `my_fusion`. Facts such as `family` and `paper` are those of the decorators,
    `FUSIONS.register(...)`; the family is by default `early` of a fusion, its `kind` of an encoder,
    `built-in` of a data set, `file` of an embedding format.
    """
    kind = kind or _kind_of(component)
    if kind not in REGISTRIES:
        raise FusionZooError(
            f"kind={kind!r} is no kind of component.{did_you_mean(kind, REGISTRIES)} There are:"
            f" {', '.join(REGISTRIES)}."
        )
    if kind in BASES and not (isinstance(component, type) and issubclass(component, BASES[kind])):
        raise FusionZooError(
            f"{component.__name__} is no subclass of {BASES[kind].__name__}, as kind={kind!r} needs"
        )
    if "family" not in facts:
        family = getattr(component, "kind", None) if kind == "encoder" else None
        facts["family"] = family or DEFAULT_FAMILIES.get(kind, "")
    return REGISTRIES[kind].register(name or _snake_case(component.__name__), **facts)(component)


def _kind_of(component: Callable[..., Any]) -> str:
    if not isinstance(component, type):
        return "dataset"
    for kind, base in BASES.items():
        if issubclass(component, base):
            return kind
    raise FusionZooError(
        f"{component.__name__} is a subclass of none of"
        f" {', '.join(base.__name__ for base in BASES.values())}: say kind="
    )


def _snake_case(name: str) -> str:
    """Return a class's name as a file is named.

    >>> _snake_case("MyFusion"), _snake_case("GMU"), _snake_case("words")
    ('my_fusion', 'gmu', 'words')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
