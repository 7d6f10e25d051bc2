"""`fusionzoo serve MODEL`: settings, what is refused before anything listens, and the server."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.config import from_settings
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import PLUGINS, THRESHOLD, THRESHOLDS, Between, Count, option
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.machine.devices import pick_device
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load
from fusionzoo.tools.search.search import Searcher
from fusionzoo.training.report import Model, model_of, path_of

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

HELP = """
Answer requests over HTTP: `fusionzoo serve runs/a --port 8000`.

POST /predict, /embed, /search (with --index); GET /health, /metrics, /openapi.json. A request is
one sample, JSON or multipart, of which any modality may be missing; docs/serve.md has a client.
"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "FUSIONZOO_TOKEN"  # environment variable
SHORTEST_TOKEN = 16  # characters
MOST_HEADER_BYTES = 16_384
MOST_CONNECTIONS = 1_024


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of `fusionzoo serve`."""

    model: str = option("", "model folder, run folder or owner/name on the Hub (required)")
    revision: str | None = option(None, "branch, tag or commit of a model on the Hub")
    index: str = option("", "file of embeddings that /search searches")
    host: str = option("127.0.0.1", "address to listen on; any but this machine's needs a token")
    port: int = option(8000, "port; 0 = a free one")
    token: str = option("", f"what clients send as a bearer token; else ${TOKEN}")
    threshold: Between | None = option(None, THRESHOLD)
    thresholds: dict[str, Between] = option({}, THRESHOLDS)
    device: str = option("auto", "cpu | cuda | cuda:1 | xpu | mps | auto")
    plugins: str | list[str] = option("", PLUGINS)
    batch_size: Count = option(32, "rows in a batch, at most")
    wait_ms: float = option(5.0, "ms that a batch waits for rows that are still being decoded")
    waiting: Count = option(256, "rows in the queue, at most; more are answered 503")
    decoders: Count = option(2, "threads that decode")
    megabytes: float = option(16.0, "of a request's body")
    megapixels: float = option(25.0, "of a request's pictures")
    seconds: float = option(120.0, "of a request's sounds, at 48 kHz")
    characters: Count = option(100_000, "of a text")
    items: Count = option(16, "pictures or sounds of one modality")
    timeout: float = option(30.0, "s for a request's body to arrive, and again for its answer")


def serve_command(args: Sequence[str]) -> int:
    """Run `fusionzoo serve MODEL ...`; return 0, or 2 after a user's mistake."""
    return run_command(ServeConfig, HELP, args, _serve_until_stopped, words=("model",))


def serve(model: Model, **settings: Any) -> None:
    """Answer requests with a model until Ctrl-C or SIGTERM: `serve(run.model, port=8000)`.

    Settings are those of `fusionzoo serve`. What waits when it is stopped is still answered.
    """
    cfg = from_settings(ServeConfig, {**settings, "model": path_of(model)})
    _serve_until_stopped(cfg, model_of(model))


def _serve_until_stopped(cfg: ServeConfig, model: FusionModel | None = None) -> int:
    app = build_app(cfg, model)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    server_of(app, cfg).run()  # at SIGTERM it answers what it has
    return 0


def server_of(app: FastAPI, cfg: ServeConfig) -> uvicorn.Server:
    """Return the server of an application."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=cfg.host,
        port=cfg.port,
        http="h11",  # which limits headers
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        limit_concurrency=MOST_CONNECTIONS,
        access_log=False,  # the application writes one line a request
        log_config=None,
        server_header=False,
    )
    return uvicorn.Server(config)


def build_app(cfg: ServeConfig, model: FusionModel | None = None) -> FastAPI:
    """Load what is served, and return the application."""
    token = cfg.token or os.environ.get(TOKEN, "")
    if cfg.host not in LOOPBACK and not token:
        raise FusionZooError(
            f"--host {cfg.host} lets other machines ask: give --token, or set the environment"
            f" variable {TOKEN}"
        )
    if token and len(token) < SHORTEST_TOKEN:
        raise FusionZooError(f"the token has {len(token)} characters; at least {SHORTEST_TOKEN}")
    with explained("serve needs pip install 'fusionzoo[serve]'", ImportError):
        from .app import Batching, Service, create_app
        from .intake import RequestLimits
    if model is None:
        if not cfg.model:
            raise FusionZooError("no model: it comes first, or as --model")
        device = pick_device(cfg.device)
        model = load(cfg.model, device, plugins=cfg.plugins, revision=cfg.revision)
    model = model.with_thresholds(cfg.threshold, cfg.thresholds)
    if cfg.index and not Path(cfg.index).exists():
        raise FusionZooError(f"--index {cfg.index}: there is no such file")
    searcher = Searcher(cfg.index, model=model, plugins=cfg.plugins) if cfg.index else None
    if searcher is not None:
        _ = searcher.model  # checks that it is the one that embedded the file
    limits = RequestLimits(
        bytes=int(cfg.megabytes * 1e6),
        pixels=int(cfg.megapixels * 1e6),
        seconds=cfg.seconds,
        characters=cfg.characters,
        items=cfg.items,
        timeout=cfg.timeout,
    )
    batching = Batching(
        rows=cfg.batch_size, wait=cfg.wait_ms / 1000, waiting=cfg.waiting, threads=cfg.decoders
    )
    return create_app(Service(model, searcher, limits, batching), token)
