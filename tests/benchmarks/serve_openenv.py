"""Serves the echo environment of ``openenv init`` on the loopback address, with room for many sessions.

    python serve_openenv.py [--wait SECONDS] [--workers N]

It runs in the interpreter that has openenv, and imports nothing of grpo-core.  The first line of its output
is the port.  ``--wait`` makes each step sleep, as the environment of OpenEnv's own scaling experiments does.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

SESSIONS = 4096


def app() -> Any:
    """Make the application; uvicorn's workers do so by this name."""
    from openenv.core.env_server.http_server import create_app

    sys.path.insert(0, os.environ["ECHO_FOLDER"])
    models = importlib.import_module("echo.models")
    environment: Any = importlib.import_module("echo.server.echo_environment").EchoEnvironment
    wait = float(os.environ["ECHO_WAIT"])

    class Waiting(environment):
        async def step_async(self, action: Any, **options: Any) -> Any:
            await asyncio.sleep(wait)
            return self.step(action)

    kind = Waiting if wait else environment
    return create_app(
        kind, models.EchoAction, models.EchoObservation, env_name="echo", max_concurrent_envs=SESSIONS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    os.environ["UV_OFFLINE"] = "1"  # locking its packages would take a minute, and fail without an index
    with tempfile.TemporaryDirectory() as folder:
        init = [sys.executable, "-m", "openenv.cli", "init", "echo", "--output-dir", folder]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ |= {"ECHO_FOLDER": folder, "ECHO_WAIT": str(given.wait)}
        listener = socket.create_server(("127.0.0.1", 0), backlog=SESSIONS)
        print(listener.getsockname()[1], flush=True)
        serve = ["-m", "uvicorn", "serve_openenv:app", "--factory", "--log-level", "error"]
        serve += ["--workers", str(given.workers), "--fd", str(listener.fileno())]
        child = subprocess.Popen([sys.executable, *serve], pass_fds=[listener.fileno()])
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        child.wait()


if __name__ == "__main__":
    main()
