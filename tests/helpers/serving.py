"""A model behind HTTP, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.tools.serve.server import ServeConfig, build_app, server_of


@contextmanager
def serving(model: FusionModel, **settings: Any) -> Iterator[str]:
    """Run the server in a thread, and yield its address."""
    cfg = ServeConfig(**settings)
    server = server_of(build_app(cfg, model), cfg)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
