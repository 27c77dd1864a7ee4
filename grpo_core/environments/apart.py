"""Keeps the agents of a process apart: each rollout calls the model with its own key.

The rollouts of a process share its environment variables, its working directory and all globals.  An agent
that reads its key there sends the key of the rollout that wrote it last, and its samples are recorded for
that rollout.  So a context variable identifies the rollout in its tasks and threads, and each key that leaves
the process is compared with it: in the head of a request, and in the environment variables of a program.
Another rollout's key is not sent, and the run ends.  The run also ends if a rollout calls the model in a
working directory that another one has changed to.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from attrs import define, field

from grpo_core.contracts.errors import PluginError

T = TypeVar("T")

_KEY = re.compile(rb"sk-grpo-[\w-]{43}")
_GIVEN = frozenset(value.encode(errors="surrogateescape") for value in os.environ.values())
"""Initial values of the process's variables: a key among them is the user's, not a rollout's."""
_HEAD = 65_536
"""Bytes of a request to search for its head."""

MIXED_UP_ADVICE = (
    "Rollouts that play at the same time share the process: its environment variables, its working directory "
    "and all globals, such as a module's client. Give each client its key in run, as in AsyncOpenAI(base_url="
    "client.base_url, api_key=client.api_key), and keep a rollout's state in variables of run. If the agent "
    "needs shared state, make it a program (agent:COMMAND), or set environment.concurrency = 1, with "
    "environment.workers for several at once"
)
"""Advice for the author of an agent whose rollouts are mixed up."""


def new_key() -> str:
    """Return a random key in the form that this module recognises."""
    return f"sk-grpo-{secrets.token_urlsafe(32)}"


class MixedUpError(ConnectionError):
    """Raised in the agent's code where it would send another rollout's key."""


@define(eq=False)
class _Player:
    """A rollout that plays in this process."""

    key: str
    task: asyncio.Task[Any]
    directory: str = field(init=False, factory=lambda: _directory())
    """Its working directory."""
    fault: str = field(init=False, default="")
    """Why it ended early; empty if it did not."""

    def end(self, fault: str) -> None:
        """End the rollout.  Raises MixedUpError."""
        self.fault = self.fault or fault
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)
        raise MixedUpError(fault)


_player: contextvars.ContextVar[_Player | None] = contextvars.ContextVar(
    "the rollout that plays", default=None
)
_playing: set[_Player] = set()
"""All rollouts that play in this process."""


async def played_apart(run: Coroutine[Any, Any, T], key: str, who: str) -> T:
    """Play a rollout.  Raises PluginError if its code uses another one's key or directory.

    Args:
        run: the agent's code.
        key: of the rollout.
        who: the rollout in errors.
    """
    _watch()
    task = asyncio.current_task()
    assert task is not None
    if task.get_loop().get_task_factory() is None:
        task.get_loop().set_task_factory(_task)  # type: ignore[arg-type]
    player = _Player(key, task)
    _player.set(player)
    _playing.add(player)
    try:
        result = await run
    except BaseException:
        if not player.fault:
            raise
    finally:
        _playing.discard(player)
    if player.fault:
        raise PluginError(f"{who}: {player.fault}. {MIXED_UP_ADVICE}")
    return result


def _here() -> _Player | None:
    """Return the rollout whose code runs, or None if unknown."""
    try:
        if asyncio.current_task() is None:
            return None  # a callback, perhaps of a server that several rollouts share
    except RuntimeError:  # a thread without an event loop
        pass
    return _player.get()


def _task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **given: Any
) -> asyncio.Task[T]:
    """Make a task; a task made in a callback, as servers do for a connection, belongs to no rollout."""
    if given.get("context") is None and asyncio.current_task(loop) is None:
        given["context"] = context = contextvars.copy_context()
        context.run(_player.set, None)
    return asyncio.Task(coroutine, loop=loop, **given)


def _check_request(data: Any) -> None:
    """Raise MixedUpError if a request has another rollout's key or directory."""
    view = memoryview(data)
    if not _playing or bytes(view[:5]) != b"POST " or (player := _here()) is None:
        return
    found = _KEY.findall(bytes(view[:_HEAD]).partition(b"\r\n\r\n")[0])
    keys = [key for key in found if key not in _GIVEN]
    if any(key.decode() != player.key for key in keys):
        player.end("the agent calls the model with the key of another rollout")
    if keys and (here := _directory()) != player.directory:
        player.end(
            f"the agent calls the model in the working directory {here!r}; it was in {player.directory!r} "
            "before another rollout changed it"
        )


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(removed)"


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Check program starts and changes of the working directory (``sys.addaudithook``)."""
    if event not in ("subprocess.Popen", "os.chdir") or not _playing or (player := _here()) is None:
        return
    if event == "os.chdir":
        (path,) = arguments
        path = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
        if os.path.isdir(path):
            player.directory = os.path.realpath(path)
        return
    for name, value in (os.environ if arguments[3] is None else arguments[3]).items():
        key = _KEY.fullmatch(os.fsencode(value))
        if key and key[0] not in _GIVEN and key[0].decode() != player.key:
            player.end(f"the environment variable {os.fsdecode(name)} has the key of another rollout")


# ---------------------------------------------------------------------------------- watching


@functools.cache
def _watch() -> None:
    """Start to check what leaves this process."""
    for name in ("send", "sendall"):
        setattr(socket.socket, name, _checked(getattr(socket.socket, name)))
    socket.socket.sendmsg = _checked_parts(socket.socket.sendmsg)  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = _known(ThreadPoolExecutor.submit)  # type: ignore[method-assign]
    sys.addaudithook(_audit)


def _checked(send: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(send)
    def checked(self: socket.socket, data: Any, *rest: Any) -> int:
        _check_request(data)
        return send(self, data, *rest)

    return checked


def _checked_parts(send: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(send)
    def checked(self: socket.socket, parts: Iterable[Any], *rest: Any) -> int:
        parts = list(parts)
        if parts:
            _check_request(parts[0])
        return send(self, parts, *rest)

    return checked


def _known(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the rollout to the thread that runs a function, as ``asyncio.to_thread`` does."""

    @functools.wraps(submit)
    def known(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if _player.get() is not None:
            function = functools.partial(contextvars.copy_context().run, function)
        return submit(self, function, *args, **kwargs)

    return known
