"""Serves resources servers of NeMo Gym on the loopback address, without its head server, Ray and models.

    python serve_nemo_gym.py

It runs in the interpreter that has nemo-gym, and imports nothing of grpo-core.  Each line of its input names
a server, which replaces the one before.  The answer is a line of JSON: ``{"port": ...}``, or ``{"error":
...}`` if the server does not start so.  A server runs in a fork, since the imports of nemo-gym take seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import uvicorn
import yaml
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

PATIENCE = 90.0
"""Seconds for a server to start; those that download would try for minutes."""


def app_of(name: str) -> Any:
    for place in importlib.import_module(f"resources_servers.{name}").__path__:
        sys.path.insert(0, place)  # servers import modules and read files beside them, as if started there
        os.chdir(place)
    module = importlib.import_module(f"resources_servers.{name}.app")
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    own = [k for k in kinds if issubclass(k, SimpleResourcesServer) and k.__module__ == module.__name__]
    kind: Any = next(k for k in reversed(own) if not inspect.isabstract(k))
    given = {"host": "127.0.0.1", "port": 1, "name": name, "entrypoint": "app.py", **config_of(module, name)}
    config = kind.model_fields["config"].annotation.model_validate(given)
    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    return app


def config_of(module: Any, name: str) -> dict[str, Any]:
    folder = Path(str(module.__file__)).parent / "configs"
    preferred = folder / f"{name}.yaml"
    for path in (preferred, *sorted(folder.glob("*.yaml"))):
        for part in (yaml.safe_load(path.read_text()) if path.exists() else {}).values():
            found = part.get("resources_servers", {}).get(name) if isinstance(part, dict) else None
            if found is not None:
                return dict(found)
    return {}


def serve(name: str, answers: int) -> None:
    try:
        app = app_of(name)
        listener = socket.create_server(("127.0.0.1", 0))
        told: dict[str, Any] = {"port": listener.getsockname()[1]}
    except BaseException as error:  # a missing package, a key, a download
        told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    os.write(answers, json.dumps(told).encode() + b"\n")
    os.close(answers)
    if "port" in told:
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def started(name: str) -> tuple[int, bytes]:
    """Return the process of a server, and what it printed at its start."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reads)
        os.setpgid(0, 0)
        try:
            serve(name, writes)
        finally:
            os._exit(0)
    os.close(writes)
    ready, _, _ = select.select([reads], [], [], PATIENCE)
    told = os.read(reads, 1 << 16) if ready else b""
    os.close(reads)
    return child, told or json.dumps({"error": f"it did not start within {PATIENCE:g} s"}).encode() + b"\n"


def end(child: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # servers print as they like
    child = 0
    for line in sys.stdin:
        if child:
            end(child)
        child, told = started(line.strip())
        os.write(answers, told)
    if child:
        end(child)


if __name__ == "__main__":
    main()
