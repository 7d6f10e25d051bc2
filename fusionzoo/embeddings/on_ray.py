"""Compute parts on a Ray cluster: Ray Data's `map_batches` over a pool of actors.

Every actor opens model and data itself and writes its parts into the folder beside `out`, which all
machines must share. An actor that dies is started again, and computes the part that it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.config import EmbedConfig
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.distributed import World
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.machine.devices import pick_device
from fusionzoo.machine.memory import keep_freed_memory
from fusionzoo.model.fusion_model import FusionModel

from .extract import Extraction, extract
from .open import open_model_and_data
from .parts import PartsFolder

CORES_PER_ACTOR = 4  # on machines without a GPU
Objects = tuple[FusionModel | None, DataSpec | None]  # in memory, instead of those of `cfg`


class PartActor:
    """A process with a model, which computes parts by their numbers."""

    def __init__(
        self, cfg: EmbedConfig, objects: Any, schema: bytes, key: dict[str, str], folder: str
    ) -> None:
        import ray

        if not Path(folder).is_dir():
            raise FusionZooError(f"--engine ray: a machine of the cluster does not see {folder}")
        os.chdir(folder)  # from which the paths of `cfg` start
        keep_freed_memory()
        world = World(device=pick_device(cfg.device))
        model, dataset, _ = open_model_and_data(cfg, world, *ray.get(objects))
        columns = pa.ipc.read_schema(pa.py_buffer(schema))
        self.job = Extraction.resolved(cfg, model, dataset, cfg.num_workers or 0, columns, key)
        self.parts = PartsFolder(Path(cfg.out))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute the parts of a batch, which has one; return their numbers of rows."""
        numbers = [int(part) for part in batch["part"]]
        extract(self.job, self.parts, numbers)
        return {"rows": [len(self.job.plan.rows(part)) for part in numbers]}


def extract_on_ray(
    cfg: EmbedConfig,
    job: Extraction,
    parts: Sequence[int],
    objects: Objects,
    advance: Callable[[int], Any],
) -> None:
    """Compute parts on the cluster of $RAY_ADDRESS, else on a local one."""
    if not parts:
        return
    with _cluster() as ray:
        resources = ray.cluster_resources()
        gpus = 0 if cfg.device == "cpu" else int(resources.get("GPU", 0))
        actors = cfg.actors or gpus or max(1, int(resources.get("CPU", 1)) // CORES_PER_ACTOR)
        items = [{"part": part} for part in job.plan.longest_first(parts)]
        schema = job.schema.serialize().to_pybytes()
        arguments = (cfg, ray.put(objects), schema, job.key, os.getcwd())
        rows = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            PartActor,
            fn_constructor_args=arguments,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(actors, len(items))),
            num_cpus=1,
            num_gpus=1 if gpus else 0,
        )
        for row in rows.iter_rows():
            advance(row["rows"])


@contextmanager
def _cluster() -> Iterator[Any]:
    """Connect to Ray for a block; an error of fusionzoo in an actor is raised as it is."""
    with explained("--engine ray needs Ray, pip install 'fusionzoo[ray]'", ImportError):
        import ray
        import ray.data
    was_connected = ray.is_initialized()
    if not was_connected:
        ray.init(log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield ray
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise FusionZooError(reason) from None
    finally:
        if not was_connected:
            ray.shutdown()


def _reason(error: BaseException | None) -> str | None:
    """Return the message of the FusionZooError that caused an error of Ray."""
    while error is not None:
        if isinstance(error, FusionZooError):
            return str(error)
        error = getattr(error, "cause", None) or error.__cause__
    return None
