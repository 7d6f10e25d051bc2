"""The web application: batches of rows, the routes, who may ask, what is logged and counted."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from traceback import format_tb
from typing import Any
from uuid import uuid4

import torch
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from torch import Tensor

from fusionzoo.embeddings.extract import model_digest
from fusionzoo.encoders.tabular import TabularProcessor
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.version import __version__
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.trained_on import as_trained
from fusionzoo.structures import Labels, Prediction, check_finite
from fusionzoo.tools.search.query import FUSED, choose_column, query_vector
from fusionzoo.tools.search.search import Searcher

from .intake import MEDIA, Body, BodyBudget, RefusedRequest, RequestLimits, raw_sample

_log = logging.getLogger("fusionzoo.serve")
ROUTES = ("/predict", "/embed", "/search", "/health", "/metrics", "/openapi.json")
OPEN = ("/health",)  # without a token
MOST_HITS = 1_000
LOCAL = ("127.0.0.1", "localhost", "::1")
POLL = 0.001  # s between looks at the queue while a batch may still grow
BODIES = 16  # of the largest size, that may be in memory at once
NUMBERS = {"type": "array", "items": {"type": "number"}}
FILE = {
    "type": "object",
    "properties": {"base64": {"type": "string", "format": "byte"}},
    "required": ["base64"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "vector": NUMBERS,
    "sequence": {"type": "array", "items": NUMBERS},
    "tabular": {"type": "object", "description": "cells by column"},
    "image": {"oneOf": [FILE, {"type": "array", "items": FILE}]},
    "audio": {"oneOf": [FILE, {"type": "array", "items": FILE}]},
}


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows are joined into batches."""

    rows: int  # in a batch, at most
    wait: float  # s that a batch waits for rows that are still being decoded
    waiting: int  # rows in the queue, at most
    threads: int  # that decode


@dataclass(frozen=True)
class Answer:
    """What the model says of one row."""

    prediction: Any  # None: it was trained without a target
    vectors: dict[str, Tensor]
    weights: dict[str, float]


class Batcher:
    """Answer prepared rows: one thread runs the model on as many as there are, up to a limit.

    A batch is closed when it is full, when no further row is on its way, or after `wait` seconds.
    If a batch fails, its rows are run one by one, so that only the row at fault fails.
    """

    def __init__(self, run: Callable[[Sequence[Any]], list[Answer]], batching: Batching) -> None:
        self.run, self.batching = run, batching
        self.queue: asyncio.Queue[tuple[Any, asyncio.Future[Answer]]] = asyncio.Queue(
            batching.waiting
        )
        self.coming = 0  # rows that are being decoded
        self.batches = self.rows = 0
        self._thread = ThreadPoolExecutor(1, "model")

    async def answer(self, row: Any) -> Answer:
        """Return the model's answer to a prepared row; refuse it if too many wait."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            self.queue.put_nowait((row, future))
        except asyncio.QueueFull:
            raise RefusedRequest(
                503, "too many requests wait: try again", Retry_After="1"
            ) from None
        return await future

    async def work(self) -> None:
        """Run batches until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._collect(loop)
            batch = [(row, future) for row, future in batch if not future.done()]  # gave up
            if not batch:
                continue
            rows = [row for row, _ in batch]
            answers = await loop.run_in_executor(self._thread, self._run_apart_if_needed, rows)
            self.batches, self.rows = self.batches + 1, self.rows + len(rows)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _collect(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        batch = [await self.queue.get()]
        deadline = loop.time() + self.batching.wait
        while len(batch) < self.batching.rows:
            if not self.queue.empty():
                batch.append(self.queue.get_nowait())
            elif self.coming and loop.time() < deadline:
                await asyncio.sleep(POLL)
            else:
                break
        return batch

    def _run_apart_if_needed(self, rows: Sequence[Any]) -> Sequence[Answer | Exception]:
        try:
            return self.run(rows)
        except Exception as error:
            if len(rows) == 1:
                return [error]
        return [self._run_apart_if_needed([row])[0] for row in rows]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Service:
    """A model, ready to answer: decodes in some threads, runs in one."""

    def __init__(
        self,
        model: FusionModel,
        searcher: Searcher | None,
        limits: RequestLimits,
        batching: Batching,
    ) -> None:
        self.model, self.searcher, self.limits = model.eval(), searcher, limits
        self.answers = bool(model.classes or model.targets)
        self.batcher = Batcher(self._run, batching)
        self.budget = BodyBudget(BODIES * limits.bytes)
        self.digest = model_digest(model)[:12]
        self.collate = model.collate()
        self.decoders = ThreadPoolExecutor(batching.threads, "decode")
        self.searches = ThreadPoolExecutor(1, "search")
        self.counts: Counter[tuple[str, int]] = Counter()  # route, status -> requests
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of all requests, by route

    async def ask(self, request: Request) -> tuple[Answer, dict[str, Any]]:
        """Read, decode and answer a request's sample; also return its values by modality."""
        self.batcher.coming += 1
        is_coming = True
        body = Body(request, self.limits, self.budget)
        loop = asyncio.get_running_loop()
        try:
            contents = await body.read()
            async with asyncio.timeout(self.limits.timeout):
                row = await loop.run_in_executor(self.decoders, self._prepare, contents)
                self.batcher.coming -= 1
                is_coming = False
                body.release()
                return await self.batcher.answer(row), row[0].values
        except FusionZooError as error:  # the answer is no finite number
            raise RefusedRequest(422, one_line(error)) from None
        except TimeoutError:
            raise RefusedRequest(503, "no answer in time: try again", Retry_After="1") from None
        finally:
            self.batcher.coming -= is_coming
            body.release()

    def _prepare(self, contents: Any) -> Any:
        """Decode a sample and prepare its tensors; whatever is wrong with it is found here."""
        raw = raw_sample(contents, self.model.modalities, self.limits)
        try:
            sample = self.model.sample(raw)
            row = self.collate.prepare(sample)
            self.collate.join([row])
        except (FusionZooError, OverflowError) as error:
            raise RefusedRequest(422, one_line(error).replace("<bytes>", "the file")) from None
        present = {name: value for name, value in sample.values.items() if value is not None}
        return sample._replace(values=present), row[1]

    def _run(self, rows: Sequence[Any]) -> list[Answer]:
        """Answer prepared rows in one forward pass."""
        batch = self.collate.join(rows).to(self.model.device)
        with torch.no_grad():
            vectors, output = self.model.embed_and_answer(batch)
            shares = self.model.fusion.shares(output)
            logits = output.logits.float()
            predictions = self.model.decode(logits) if self.answers else [None] * len(rows)
        vectors = {name: x.float().cpu() for name, x in vectors.items()}
        check_finite(*vectors.values())
        return [
            Answer(
                prediction,
                {name: x[row] for name, x in vectors.items()},
                {name: float(x[row]) for name, x in shares.items()},
            )
            for row, prediction in enumerate(predictions)
        ]

    async def predict(self, request: Request) -> Response:
        """Answer one sample; `?weights=true` adds how much each modality counted."""
        if not self.answers:
            raise RefusedRequest(404, "this model was trained without a target: /embed")
        answer, values = await self.ask(request)
        shares = (
            {"weights": answer.weights} if request.query_params.get("weights") == "true" else {}
        )
        typed = as_trained(answer.prediction, self.model.types_of_labels)
        return self._answered({**_prediction(typed), **shares}, values)

    async def embed(self, request: Request) -> Response:
        """Return a sample's vectors: `?columns=fused,text`, by default `fused`."""
        answer, values = await self.ask(request)
        names = request.query_params.get("columns", FUSED).split(",")
        if unknown := [name for name in names if name not in answer.vectors]:
            known = ", ".join(answer.vectors)
            raise RefusedRequest(422, f"no vectors {unknown[0]!r:.60}; there are {known}")
        vectors = {name: answer.vectors[name].tolist() for name in names}
        return self._answered({"vectors": vectors}, values)

    async def search(self, request: Request) -> Response:
        """Return the rows of the index nearest to a sample: `?k=10&by=fused`."""
        if self.searcher is None:
            raise RefusedRequest(
                404, "there is no index: fusionzoo serve MODEL --index emb.parquet"
            )
        answer, values = await self.ask(request)
        query, loop = request.query_params, asyncio.get_running_loop()
        nearest = await loop.run_in_executor(self.searches, self._nearest, answer, [*values], query)
        return self._answered(nearest, values)

    async def health(self) -> Response:
        """Say that the service is up, and of which model."""
        return self._answered({"status": "ok"})

    async def metrics(self) -> Response:
        """Return counters in the text format of Prometheus."""
        return PlainTextResponse(_prometheus(self), media_type="text/plain; version=0.0.4")

    def _answered(self, value: dict[str, Any], values: Mapping[str, Any] | None = None) -> Response:
        """Return an answer, with the cells of its sample's `values` that training saw none like."""
        strange = [
            f"{name}: training saw nothing like {column} {values[name][column]!r:.60}"
            for name, processor in self.collate.processors.items()
            if values and name in values and isinstance(processor, TabularProcessor)
            for column in processor.strange(values[name])
        ]
        warnings = {"warnings": strange} if strange else {}
        return _json({**value, **warnings, "model": self.digest})

    def _nearest(self, answer: Answer, names: Sequence[str], query: Any) -> dict[str, Any]:
        """Return the nearest rows of the index: their ids and columns, and no path."""
        assert self.searcher is not None
        k = query.get("k", "10")
        if not names:
            raise RefusedRequest(422, "nothing to search for: the sample is empty")
        if len(k) > 9 or not k.isdecimal() or not 1 <= int(k) <= MOST_HITS:
            raise RefusedRequest(422, f"k={k:.20}: give a number from 1 to {MOST_HITS:,}")
        try:
            column = choose_column(self.searcher.file, query.get("by", ""), names)
            vector = query_vector(self.model, answer.vectors, names, column)
            nearest = self.searcher.search(vector=vector, by=column, k=int(k))
        except FusionZooError as error:
            raise RefusedRequest(422, one_line(error)) from None
        hits = [{"rank": x.rank, "id": x.id, "cosine": x.cosine, **x.columns} for x in nearest]
        return {"column": column, "searched": nearest.searched, "hits": hits}

    def close(self) -> None:
        """End the threads."""
        self.batcher.close()
        self.decoders.shutdown()
        self.searches.shutdown()


def create_app(service: Service, token: str) -> FastAPI:
    """Return the application; an empty `token` admits whoever reaches it on this machine."""

    @asynccontextmanager
    async def run_batches(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(service.batcher.work())
        yield
        worker.cancel()
        service.close()

    app = FastAPI(
        title="fusionzoo", version=__version__, docs_url=None, redoc_url=None, lifespan=run_batches
    )
    body = {"requestBody": _request_body(service.model.modalities)}
    for route in (service.predict, service.embed, service.search):
        app.post(f"/{route.__name__}", openapi_extra=body)(route)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    app.add_exception_handler(RefusedRequest, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_middleware(Gate, service=service, token=token)
    return app


async def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, RefusedRequest)
    headers = {name.replace("_", "-"): value for name, value in refusal.headers.items()}
    if refusal.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return _json({"error": refusal.message}, refusal.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = ", ".join(ROUTES)
    return _json({"error": f"{error.detail}; there are {routes}"}, error.status_code, error.headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def _prediction(prediction: Any) -> dict[str, Any]:
    """Return a prediction as JSON: of several targets one for each."""
    if isinstance(prediction, dict):
        return {"targets": {name: _prediction(x) for name, x in prediction.items()}}
    if isinstance(prediction, Prediction | Labels):
        return prediction._asdict()
    return {"value": prediction}


class Gate:
    """Before the routes: give each request an id, admit it by token, log and count it.

    One line a request, of method, route, status, time and sizes; nothing of its content.
    """

    def __init__(self, app: Any, service: Service, token: str) -> None:
        self.app, self.service, self.token = app, service, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, request_id, status = time.perf_counter(), uuid4().hex[:12], 500

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        route = scope["path"] if scope["path"] in ROUTES else "other"
        try:
            if refused := self._refusal(scope, route):
                await refused(scope, receive, send_with_id)
            else:
                await self.app(scope, receive, send_with_id)
        except Exception as error:
            frames = "".join(format_tb(error.__traceback__))  # without the message: it may quote
            _log.error("%s %s failed: %s\n%s", request_id, route, type(error).__name__, frames)
            await _json({"error": f"request {request_id} failed"}, 500)(
                scope, receive, send_with_id
            )
        finally:
            seconds = time.perf_counter() - start
            self.service.counts[route, status] += 1
            self.service.seconds[route] += seconds
            _log.info(
                "%s %s %s %d %.1f ms", request_id, scope["method"], route, status, 1000 * seconds
            )

    def _refusal(self, scope: Any, route: str) -> Response | None:
        """Return the answer to a request without the token, or under a name of another site's."""
        headers = dict(scope["headers"])
        if not self.token:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            return None if name in LOCAL else _json({"error": f"no host {name!r:.60} here"}, 400)
        sent = headers.get(b"authorization", b"")
        if route in OPEN or hmac.compare_digest(sent, b"Bearer " + self.token):
            return None
        return _json({"error": "the token is wrong or missing"}, 401)


def _prometheus(service: Service) -> str:
    lines = ["# TYPE fusionzoo_requests_total counter"]
    lines += [
        f'fusionzoo_requests_total{{route="{route}",status="{status}"}} {count}'
        for (route, status), count in sorted(service.counts.items())
    ]
    lines.append("# TYPE fusionzoo_request_seconds_total counter")
    lines += [
        f'fusionzoo_request_seconds_total{{route="{route}"}} {seconds:.6f}'
        for route, seconds in sorted(service.seconds.items())
    ]
    batcher = service.batcher
    for name, kind, value in (
        ("batches_total", "counter", batcher.batches),
        ("rows_total", "counter", batcher.rows),
        ("waiting_rows", "gauge", batcher.queue.qsize()),
    ):
        lines += [f"# TYPE fusionzoo_{name} {kind}", f"fusionzoo_{name} {value}"]
    return "\n".join(lines) + "\n"


def _request_body(kinds: dict[str, str]) -> dict[str, Any]:
    """Return the OpenAPI description of a sample: a property for each modality, none required."""
    as_json = {name: SCHEMAS[kind] for name, kind in kinds.items()}
    binary = {"type": "string", "format": "binary"}
    as_parts = {
        name: binary if kind in MEDIA else {"type": "string"} for name, kind in kinds.items()
    }
    return {
        "required": True,
        "content": {
            "application/json": {"schema": {"type": "object", "properties": as_json}},
            "multipart/form-data": {"schema": {"type": "object", "properties": as_parts}},
        },
    }
