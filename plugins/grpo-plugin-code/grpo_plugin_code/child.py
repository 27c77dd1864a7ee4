"""A child process with pipes on the event loop, which can be cancelled at any point without leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

CHUNK = 65_536
"""Bytes of one read: the capacity of a pipe."""
CLOSED = -1


class Child:
    """A process with pipes for its input, and for its output, errors and values.

    Used instead of asyncio's subprocesses, which in Python 3.11 hang if they are cancelled while their pipes
    are connected, and use a thread for each process.  Here nothing is awaited before the process can be
    killed.

    Args:
        command: returns the command for the descriptor of the pipe for values.
        shared: further descriptors that the process inherits.
        most: largest number of bytes of each pipe; a process that writes more is killed.

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
            self._handle = os.pidfd_open(self._process.pid)  # nothing else reaps this process
            ours.pop_all()
        self.received = [bytearray() for _ in self._outputs]
        """The first ``most`` + 1 bytes of each pipe."""
        self.line: asyncio.Future[None] = self._loop.create_future()
        """Done when the pipe for values has a line, or is closed."""
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Exit status, or the negated number of the signal that ended the process."""
        self._ended: list[asyncio.Future[None]] = [self._loop.create_future() for _ in self._outputs]
        os.set_blocking(self._input, False)
        self._loop.add_reader(self._handle, self._exit)
        for index, reading in enumerate(self._outputs):
            os.set_blocking(reading, False)
            self._loop.add_reader(reading, self._read, index)

    def write(self, data: bytes) -> None:
        """Write to standard input in the background."""
        self._rest = memoryview(data)
        self._loop.add_writer(self._input, self._write)

    def end_input(self) -> None:
        """Close standard input and drop unwritten data."""
        if self._input != CLOSED:
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = CLOSED

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if not self.exited.done():
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def gone(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the process and its pipes; return whether they ended."""
        ends: list[asyncio.Future[Any]] = [self.exited, *self._ended]
        _, pending = await asyncio.wait(ends, timeout=seconds)
        return not pending

    def close(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
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
        except OSError:  # the process has closed the pipe
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
        received = self.received[index]
        received += part[: self._most + 1 - len(received)]
        if index == len(self.received) - 1 and b"\n" in received and not self.line.done():
            self.line.set_result(None)
        if len(received) > self._most:
            self.kill()

    def _end(self, index: int) -> None:
        """Handle the end of a pipe."""
        if self._outputs[index] != CLOSED:
            self._loop.remove_reader(self._outputs[index])
            os.close(self._outputs[index])
            self._outputs[index] = CLOSED
            self._ended[index].set_result(None)
        if index == len(self.received) - 1 and not self.line.done():
            self.line.set_result(None)

    def _exit(self) -> None:
        """Reap the process, which has ended."""
        if not self.exited.done():
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self.exited.set_result(self._process.wait())


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed by these two exit stacks."""
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing
