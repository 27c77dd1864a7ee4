"""Runs a process with pipes on the event loop.  It can be ended at every point, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

CHUNK = 65_536
"""Bytes that are read at once: as many as a pipe holds."""
CLOSED = -1


class Child:
    """A process with a pipe to write to, and three to read from: its output, its errors, and its values.

    asyncio has processes, too.  In Python 3.11 these wait for ever if they are cancelled while they start
    with pipes, and each has a thread that waits for its end.  Here nothing is awaited before the process
    can be ended.

    Args:
        command: makes the command from the descriptor to which the process writes values.
        shared: further descriptors that the process has.
        most: bytes that a process may write to each pipe; one that writes more is killed.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], *, shared: Sequence[int], most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._most, self._rest = most, memoryview(b"")
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            job, self._input = _pipe(reader=theirs, writer=ours)
            pipes = [_pipe(reader=ours, writer=theirs) for _ in range(3)]
            self._outputs = [reading for reading, _ in pipes]
            output, errors, values = (writing for _, writing in pipes)
            self._process = subprocess.Popen(
                command(values), stdin=job, stdout=output, stderr=errors, pass_fds=[values, *shared], env={}
            )
            self._handle = os.pidfd_open(self._process.pid)  # nobody else asks for its status
            ours.pop_all()
        self.said = [bytearray() for _ in self._outputs]
        """The beginning of what it wrote to each pipe, of ``most`` bytes and one more."""
        self.line: asyncio.Future[None] = self._loop.create_future()
        """Done as soon as its values have a line, or have ended."""
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Its exit status, or the number of the signal that ended it, negated."""
        self._ended: list[asyncio.Future[None]] = [self._loop.create_future() for _ in self._outputs]
        os.set_blocking(self._input, False)
        self._loop.add_reader(self._handle, self._exit)
        for index, reading in enumerate(self._outputs):
            os.set_blocking(reading, False)
            self._loop.add_reader(reading, self._read, index)

    def write(self, data: bytes) -> None:
        """Write to it, in the background."""
        self._rest = memoryview(data)
        self._loop.add_writer(self._input, self._write)

    def end_input(self) -> None:
        """Close the pipe to it and drop unwritten input."""
        if self._input != CLOSED:
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = CLOSED

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if not self.exited.done():
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def gone(self, seconds: float) -> bool:
        """Wait for its end and the end of its pipes, at most so long; return whether they have come."""
        ends: list[asyncio.Future[Any]] = [self.exited, *self._ended]
        _, pending = await asyncio.wait(ends, timeout=seconds)
        return not pending

    def close(self) -> None:
        """Kill it if it is still there, and close its pipes."""
        self.kill()
        self._exit()
        self.end_input()
        for index in range(len(self._outputs)):
            self._end(index)

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._input, self._rest) :]
        except BlockingIOError:
            return
        except OSError:  # it has closed the pipe
            self._rest = self._rest[:0]
        if not self._rest:
            self._loop.remove_writer(self._input)

    def _read(self, index: int) -> None:
        try:
            part = os.read(self._outputs[index], CHUNK)
        except BlockingIOError:
            return
        if not part:
            self._end(index)
            return
        said = self.said[index]
        said += part[: self._most + 1 - len(said)]
        if index == len(self.said) - 1 and b"\n" in said and not self.line.done():
            self.line.set_result(None)
        if len(said) > self._most:
            self.kill()

    def _end(self, index: int) -> None:
        """Note that a pipe has ended."""
        if self._outputs[index] != CLOSED:
            self._loop.remove_reader(self._outputs[index])
            os.close(self._outputs[index])
            self._outputs[index] = CLOSED
            self._ended[index].set_result(None)
        if index == len(self.said) - 1 and not self.line.done():
            self.line.set_result(None)

    def _exit(self) -> None:
        """Ask for its status, which is there at once."""
        if not self.exited.done():
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self.exited.set_result(self._process.wait())


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Open a pipe, whose ends these two close."""
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing
