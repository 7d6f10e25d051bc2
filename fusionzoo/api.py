"""The Python API: what the command line does, as functions; settings and errors are the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusionzoo.config import EmbedConfig, EvaluateConfig, PredictConfig, RunConfig
from fusionzoo.config.schema import TABLE_WORDS
from fusionzoo.datasets import DATASETS, READERS, TableReader
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.in_memory import is_table
from fusionzoo.embeddings.files import FORMATS, EmbeddingFile
from fusionzoo.encoders import ENCODERS, Encoder
from fusionzoo.errors import FusionZooError, check_known, keyword_errors
from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.ground.registry import Registry
from fusionzoo.inputs.data import Data, configure
from fusionzoo.machine.devices import pick_device
from fusionzoo.machine.distributed import World, process_group
from fusionzoo.machine.memory import keep_freed_memory
from fusionzoo.machine.processes import INTERRUPTED, launched
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.training.balance import BALANCE, Balance
from fusionzoo.training.report import Model, Run, model_of, path_of
from fusionzoo.training.tasks import OBJECTIVES, Task

if TYPE_CHECKING:
    from fusionzoo.tools.analyse import Analysis


Config = RunConfig | Mapping[str, Any] | str | os.PathLike[str] | None
C = TypeVar("C", bound=Callable[..., Any])
REGISTRIES: dict[str, Registry[Any, Any]] = {
    "fusion": FUSIONS,
    "encoder": ENCODERS,
    "dataset": DATASETS,
    "balance": BALANCE,
    "objective": OBJECTIVES,
    "embedding_format": FORMATS,
    "reader": READERS,
}
BASES: dict[str, type] = {
    "fusion": Fusion,
    "encoder": Encoder,
    "balance": Balance,
    "objective": Task,
    "embedding_format": EmbeddingFile,
    "reader": TableReader,
}
DEFAULT_FAMILIES = {
    "fusion": "early",
    "dataset": "built-in",
    "objective": "objective",
    "embedding_format": "file",
    "reader": "binary",
}


@keyword_errors
def train(data: Data = None, *, config: Config = None, **settings: Any) -> Run:
    """Train a fusion model: `train("digits", fusion="gmu", epochs=10, out="runs/a")`.

    `data` is what `create_dataset` opens: a data set's name, a path, settings, a table or data set
    in memory, a `PairedDataset`. Settings are those of `train.py`: sections are mappings
    (`optim={"lr": 1e-3}`), and a setting whose name only one section has may stand alone
    (`epochs=10`, `modality_lr={"text": 2e-5}`). They override those of `config`: a recipe's path, a
    nested mapping or a `RunConfig`.

    Works in a notebook, in a script, and in a script under torchrun. Ctrl-C ends the run after a
    whole step: a checkpoint is saved, KeyboardInterrupt raised, and `train(out=..., resume=True)`
    goes on. After SIGTERM or SIGUSR1 it is SystemExit with 75.
    """
    cfg, spec = configure(RunConfig, data, settings, config)
    if cfg.dist.nproc > 1 and not launched():
        raise FusionZooError(
            "dist.nproc is for the command line, which starts the processes: start your script"
            f" with `torchrun --nproc-per-node={cfg.dist.nproc} script.py`"
        )
    from fusionzoo.training.run import train as run

    keep_freed_memory()
    with process_group(cfg.dist, cfg.device) as world:
        trained = run(cfg, world, spec)
    if trained.exit_code == INTERRUPTED:
        raise KeyboardInterrupt(f"stopped; train(out={str(trained.folder)!r}, resume=True) goes on")
    if trained.exit_code:
        raise SystemExit(trained.exit_code)
    return trained


@keyword_errors
def evaluate(model: Model, data: Data = None, **settings: Any) -> dict[str, Any]:
    """Return a model's metrics on data: `evaluate(run.model, "my.csv", every_subset=True)`.

    Without `data`, on those that it was trained on, whose settings its folder holds. Metrics of the
    fusion, and under `unimodal` of each modality's own head; with `every_subset` under `subsets`
    those given each subset of the modalities; `seen_in_training` counts the samples whose ids
    training or validation read. Further settings: `split` ("test" by default; "all"),
    `batch_size`, `num_workers`, `device`.
    """
    from fusionzoo.inference import evaluate as run

    named = {**settings, "model": path_of(model)}
    cfg, spec = configure(EvaluateConfig, data, named, store=False)
    return run(cfg, model_of(model), spec)


@keyword_errors
def predict(model: Model, data: Data, **settings: Any) -> Any:
    """Predict every sample: `predict(run.model, "my.csv", out="p.parquet")`.

    Columns: `id`, under the name that the column of ids has in a table of yours, `label`,
    `p_<class>`, `present_<modality>`. Returns the path `out` (.parquet or .csv); without `out` of a
    DataFrame a DataFrame with its index, of a list of dicts a list of dicts, else a
    `pyarrow.Table`. `coverage=0.9` adds a column `set`, or `lower` and
    `upper` of numbers and levels: it holds the truth for 90 % of new samples. A column
    `seen_in_training` marks samples that training or validation read, if there are any. Further
    settings: `split` ("all" by default), `batch_size`, `num_workers`, `device`.
    """
    from fusionzoo.inference import (
        calibrated_batches,
        open_model,
        open_to_predict,
        prediction_tables,
        write_tables,
    )

    if isinstance(data, Mapping) and data and not is_table(data):
        known = {"name", "root", *TABLE_WORDS, *(DATASETS["manifest"].parameters)}
        if not known & data.keys():
            raise FusionZooError("a dict of single values is one row: give a list of rows, [row]")
    named = {**settings, "model": path_of(model)}
    cfg, spec = configure(PredictConfig, data, named, store=False)
    loaded, rows = open_to_predict(cfg, open_model(cfg, model_of(model)), spec)
    answered = calibrated_batches(loaded, rows, cfg)
    predictions = write_tables(cfg, prediction_tables(loaded, rows, cfg, answered))
    is_frame = type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "index")
    if isinstance(predictions, Path):
        return predictions
    if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
        return predictions.to_pylist()
    if not is_frame:
        return predictions
    if predictions.column_names[0] in data.index.names:
        predictions = predictions.rename_columns(["id", *predictions.column_names[1:]])
    frame, places = predictions.to_pandas(), rows.places
    return frame if places is None else frame.set_index(data.index[places])


@keyword_errors
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
    cfg, spec = configure(EmbedConfig, data, {**settings, "model": path_of(model)})
    return _embed(cfg, model_of(model), spec)


def _embed_untrained(data: Data, settings: Mapping[str, Any]) -> Path:
    """Embed with encoders and a fusion without training; encoders may be built in Python."""
    encoders = dict(settings.get("encoders") or {})
    built = {name: x for name, x in encoders.items() if isinstance(x, Encoder)}
    if not built:
        cfg, spec = configure(EmbedConfig, data, settings)
        return _embed(cfg, None, spec)
    from fusionzoo.embeddings.open import compose, open_data_alone

    rest = {name: x for name, x in settings.items() if name not in ("encoders", "fusion")}
    cfg, spec = configure(EmbedConfig, data, rest)
    fusion = settings.get("fusion")
    dataset = open_data_alone(cfg, spec)
    model = compose(dataset, encoders, {"name": fusion} if isinstance(fusion, str) else fusion)
    return _embed(cfg, model, DataSpec(dataset=dataset))


def _embed(cfg: EmbedConfig, model: FusionModel | None, data: DataSpec) -> Path:
    from fusionzoo.embeddings.run import embed as run

    if launched() and os.environ.get("RANK", "0") != "0":
        return Path(cfg.out)
    return run(cfg, World(device=pick_device(cfg.device)), model, data)


@keyword_errors
def analyse(data: Data, **settings: Any) -> Analysis:
    """Return what data needs of a fusion: `analyse("my.csv").advice`.

    Redundancy, uniqueness and synergy of the modalities, in bits (`.pairs`). Settings are those of
    `fusionzoo analyse`: `encoders`, `folds`, `clusters`, `device`, ...
    """
    from fusionzoo.tools.analyse import AnalyseConfig
    from fusionzoo.tools.analyse import analyse as run

    return run(*configure(AnalyseConfig, data, settings))


def register(component: C, *, kind: str | None = None, name: str | None = None, **facts: Any) -> C:
    """Register a class, or the function that opens a data set, and return it.

    `kind` is fusion, encoder, dataset, balance, objective, embedding_format or reader; default: by
    the base class, and a function opens a data set. `name` is by default that of the class,
    `MyFusion` as `my_fusion`. Facts such as `family` and `paper` are those of the decorators,
    `FUSIONS.register(...)`; the family is by default `early` of a fusion, its `kind` of an encoder,
    `built-in` of a data set, `file` of an embedding format, `binary` of a reader of tables.
    """
    kind = kind or _kind_of(component)
    check_known(kind, REGISTRIES, f"kind={kind!r} is no kind of component", "There are")
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
