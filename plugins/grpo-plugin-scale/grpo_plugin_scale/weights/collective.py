"""Weights sent from the trainer's block to each engine on request, by NCCL or TCP.

    engine                              trainer (one socket)
                    <------ nonce
    proof, nonce,
    its GPU         ------>                       HMAC-SHA256 by the secret of both nonces: each end knows
                    <------ proof                 that the other has it, and eavesdroppers do not learn it
                    <-----> NCCL's addresses and one byte, if the two have a GPU each
    publication     ------>
                    <------ yes or no, and the block in buckets

Between two GPUs the block is sent by NCCL, in a group of two (see ``nccl``).  To an engine on the CPU, or on
the trainer's GPU, where NCCL does not work, it is sent over the connection.  An engine that cannot store the
whole block verifies and drops each bucket, and then requests the publication again to load it.

An engine requests a publication by number once it has memory for it.  Each engine is served by a separate
thread, so engines do not wait for each other.  The trainer refuses all numbers except the last.  Before it
writes the next publication it waits ``PATIENCE`` seconds for engines that are still receiving, and then
closes their connections.  An engine thus receives one whole version or an error, and a slow engine cannot
stop the trainer.

With several ranks, each rank has a socket and a block with its rows.  An engine connects to all of them and
assembles each bucket from their parts.

The location contains the address of each rank's socket and a secret, which grants access to the weights.
Nothing is encrypted, so bind the socket to a trusted network only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from grpo_core import ConfigError, Weights, WeightSyncError, errors
from grpo_core.weights import layout, publishing
from grpo_plugin_scale.weights.line import Line, proof, proves, shut
from grpo_plugin_scale.weights.nccl import ENGINE, TRAINER, Pair, device_id, memory_setting, settle

if TYPE_CHECKING:
    from grpo_core import TrainerSetup

SCHEME = "collective:"

PROOF_SECONDS = 10.0
"""Time limit in seconds for the proof of the secret on a new connection."""
MOST_UNPROVEN = 64
"""Largest number of unproven connections; a further one closes the oldest."""
MEETING = 30.0
"""An engine's time limit in seconds for connecting to the trainer, and for each answer."""
SECONDS = 300.0
"""Time limit in seconds for the next part of a block."""
PATIENCE = 60.0
"""Seconds that the trainer waits for receiving engines before it writes the next version."""
RELEASE = 5.0
"""Time limit in seconds for the end of transfers over closed connections."""


class CollectiveWriter:
    """Owns a trainer's block, and sends it to engines.

    Args:
        device: device of the block.
        host: address of the socket, reachable by engines.
        ports: ports to try in order; 0 is any free port.
        ranks: the ranks that publish together, each with a separate socket; None for a single process.

    Raises ConfigError if the trainer cannot listen there.
    """

    def __init__(
        self,
        device: torch.device,
        host: str,
        ports: Iterable[int] = (0,),
        ranks: publishing.Publishers | None = None,
    ) -> None:
        self._device, self._host, self._ranks = device, host, ranks or publishing.ALONE
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._state = threading.Condition()
        """Guards the four attributes below."""
        self._publication = 0
        self._version: int | None = None
        """Version in the block; None while it is being written."""
        self._slices: list[layout.Slice] = []
        """The slices of the block in the order of sending."""
        self._readers: set[Line] = set()
        """Connections with a running transfer."""
        self._secret = secrets.token_hex(16)
        self._unproven: deque[socket.socket] = deque()
        self._socket = _listen(host, ports)
        threading.Thread(target=self._accept, name="collective", daemon=True).start()

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | layout.LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into the block, after running transfers of the previous version have ended."""
        self._withdraw()
        here = [self._host, self._socket.getsockname()[1], self._secret, self._publication]
        ends = self._ranks.gathered(here)
        weights = publishing.pack(
            version,
            tensors,
            block=self._memory,
            location=lambda: f"{SCHEME}{json.dumps(ends if len(ends) > 1 else here)}",
            dtype=dtype,
            ranks=self._ranks,
            apart=True,
        )
        settle(self._device)
        with self._state:
            self._version, self._slices = version, layout.slices(weights, self._ranks.rank)
        return weights

    def _withdraw(self) -> None:
        """End the current publication within ``PATIENCE + RELEASE`` seconds."""
        with self._state:
            before, self._version = self._version, None
            self._publication += 1
            if self._state.wait_for(lambda: not self._readers, PATIENCE):
                return
            print(
                f"collective: version {before} is still being sent to {len(self._readers)} of the engines "
                f"after {PATIENCE:g} s more; they are disconnected, and can ask for the next version",
                flush=True,
            )
            for line in self._readers:
                line.hang_up()
            if not self._state.wait_for(lambda: not self._readers, RELEASE):
                # a hanging transfer keeps the block, and the next version gets a new one
                self._readers = set()
                self._block = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._block.numel() != nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._block

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # for example no free file descriptor; retry later
                print(f"collective: a connection could not be accepted: {error}", flush=True)
                time.sleep(1.0)
                continue
            self._unproven.append(connection)
            if len(self._unproven) > MOST_UNPROVEN:
                shut(self._unproven.popleft())
            threading.Thread(target=self._serve, args=(connection,), name="collective", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one engine until it closes the connection."""
        pair = None
        with contextlib.closing(Line(connection)) as line:
            try:
                pair = self._meet(line)
                while request := line.receive():
                    line.limit(SECONDS)
                    self._answer(line, pair, request["publication"])
                    line.limit(None)  # engines are idle between publications
            except PermissionError:
                pass  # not one of the run's engines
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                print(f"collective: an engine has disconnected: {errors.one_line(error)}", flush=True)
            finally:
                self._forget(connection)
                if pair is not None:
                    pair.abort()

    def _meet(self, line: Line) -> Pair | None:
        """Authenticate an engine; return the NCCL group, or None without NCCL.  Raises PermissionError."""
        deadline = time.monotonic() + PROOF_SECONDS
        line.limit(PROOF_SECONDS)
        nonce = secrets.token_hex(16)
        try:
            line.send({"nonce": nonce})
            hello = line.receive_first(deadline)
            known = proves(hello["proof"], self._secret, "engine", nonce)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise PermissionError from None
        if not known:
            raise PermissionError
        self._forget(line.socket)
        line.limit(PROOF_SECONDS)
        here, there = device_id(self._device), hello["device"]
        nccl = None not in (here, there) and here != there
        problem = ""
        if nccl and (mine := memory_setting()) != (its := hello["memory"]):
            problem = (
                f"NCCL_CUMEM_ENABLE is {mine or 'not set'} for the trainer and {its or 'not set'} for the "
                "engine, and NCCL connects only equal ones; set it to one value on all machines before "
                "grpo-core and Ray start"
            )
        answer = {"proof": proof(self._secret, "trainer", str(hello["nonce"])), "nccl": nccl}
        line.send(answer | ({"problem": problem} if problem else {}))
        if problem:
            raise ValueError(problem)
        pair = Pair(line, TRAINER, self._device) if nccl else None
        line.limit(None)
        return pair

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(ValueError):
            self._unproven.remove(connection)

    def _answer(self, line: Line, pair: Pair | None, publication: int) -> None:
        with self._reading(line, publication) as parts:
            if parts is None:
                version = self._version
                does = "is writing the next version" if version is None else f"holds version {version}"
                line.send({"problem": f"the trainer {does} now"})
                return
            line.send({})
            for part in parts:
                if pair is None:
                    line.send_block(part)
                elif part.numel():  # a rank may have no rows of a bucket
                    pair.move(part)

    @contextlib.contextmanager
    def _reading(self, line: Line, publication: int) -> Iterator[list[torch.Tensor] | None]:
        """Lock the block for sending a publication; yield its slices, or None if there is a newer one."""
        with self._state:
            readers = self._readers
            present = publication == self._publication and self._version is not None
            parts = [self._block[part.begin : part.end] for part in self._slices] if present else None
            if present:
                readers.add(line)
        try:
            yield parts
        finally:
            with self._state:
                readers.discard(line)
                self._state.notify_all()


def writer(setup: TrainerSetup, device: torch.device, ranks: publishing.Publishers) -> CollectiveWriter:
    """Return the writer of a trainer's rank."""
    options = {"host": "127.0.0.1", "ports": (0, 0), **setup.transport_options}
    first, last = options["ports"]
    return CollectiveWriter(device, options["host"], range(first, last + 1), ranks)


class _Partner:
    """An engine's connection to one rank of a trainer."""

    def __init__(self, host: str, port: int, secret: str, device: torch.device) -> None:
        try:
            self._line = Line(socket.create_connection((host, port), timeout=MEETING))
        except OSError as error:
            raise ConnectionError(
                f"there is no connection to {host}, port {port} ({error}); engine.transport_options.host "
                "must be an address at which engines reach the trainer"
            ) from None
        self._pair: Pair | None = None
        try:
            nccl = self._meet(secret, device)
            self._pair = Pair(self._line, ENGINE, device) if nccl else None
        except BaseException:
            self.close()
            raise
        self.device = device if nccl else torch.device("cpu")
        """Target device of blocks."""

    def _meet(self, secret: str, device: torch.device) -> bool:
        """Authenticate; return whether NCCL is used.  Raises ConnectionError for a wrong proof."""
        greeting, nonce = self._received(), secrets.token_hex(16)
        answered = proof(secret, "engine", str(greeting.get("nonce")))
        hello = {"proof": answered, "nonce": nonce, "device": device_id(device), "memory": memory_setting()}
        answer = self._send(hello)
        if not proves(answer.get("proof"), secret, "trainer", nonce):
            raise ConnectionError("the process that listens there is not this run's trainer")
        if "problem" in answer:
            raise ValueError(answer["problem"])
        return bool(answer["nccl"])

    def request(self, publication: int) -> None:
        self._line.limit(MEETING)
        answer = self._send({"publication": publication})
        if "problem" in answer:
            raise ValueError(answer["problem"])
        self._line.limit(SECONDS)

    def fill(self, part: torch.Tensor) -> None:
        settle(self.device)  # kernels of this thread may still read the memory
        try:
            if self._pair is None:
                self._line.receive_block(part)
            elif part.numel():
                self._pair.move(part)
        except ConnectionError as error:
            raise ConnectionError(
                f"{error}: the trainer has ended, or writes the next version, for which it waits at most "
                f"{PATIENCE:g} s for an engine that is still receiving"
            ) from None
        except TimeoutError:
            raise TimeoutError(f"the trainer has sent nothing for {SECONDS:g} s") from None

    def fill_rows(self, bucket: torch.Tensor, held: layout.Slice) -> None:
        """Receive the rank's rows of a bucket, directly into the bucket if it is on the CPU."""
        size = held.end - held.begin
        if self._pair is None and bucket.device.type == "cpu":
            at = 0
            for begin, place, nbytes in (*held.pieces, (size, 0, 0)):
                self.fill(torch.empty(begin - at, dtype=torch.uint8))  # padding between two tensors
                self.fill(bucket[place : place + nbytes])
                at = begin + nbytes
            return
        received = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.fill(received)
        for begin, place, nbytes in held.pieces:
            bucket[place : place + nbytes].copy_(received[begin : begin + nbytes])

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        self._line.send(message)
        return self._received()

    def _received(self) -> dict[str, Any]:
        try:
            answer = self._line.receive()
        except TimeoutError:
            raise TimeoutError(f"the trainer has not answered for {MEETING:g} s") from None
        if answer is None:
            raise ConnectionError("the trainer has closed the connection")
        return answer

    def close(self) -> None:
        self._line.close()
        if self._pair is not None:
            self._pair.abort()


class _Trainer:
    """An engine's connections to the ranks of a trainer, and the last received block."""

    def __init__(self, ends: Iterable[tuple[str, int, str]], device: torch.device) -> None:
        self._partners: list[_Partner] = []
        try:
            for host, port, secret in ends:
                self._partners.append(_Partner(host, port, secret, device))
        except BaseException:
            self.close()
            raise
        devices = [partner.device for partner in self._partners]
        self._device = next((each for each in devices if each.type == "cuda"), devices[0])
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._publications: list[int] = []

    def pull(self, publications: list[int], weights: Weights) -> torch.Tensor:
        if self._publications == publications:
            return self._block
        self._publications = []
        if self._block.numel() != weights.nbytes:  # before the request: the trainer waits for no memory
            self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._block = torch.empty(weights.nbytes, dtype=torch.uint8, device=self._device)
        parts = (self._block[part.begin : part.end] for part in layout.buckets(weights))
        deque(self._filled(publications, weights, parts), maxlen=0)
        self._publications = publications
        return self._block

    def parts(self, publications: list[int], weights: Weights) -> Iterator[torch.Tensor]:
        """Receive a publication in buckets with separate memory."""
        sizes = [part.end - part.begin for part in layout.buckets(weights)]
        made = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)
        return self._filled(publications, weights, made)

    def _filled(
        self, publications: list[int], weights: Weights, parts: Iterator[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        requested = False
        for held in zip(*(layout.slices(weights, rank) for rank in range(len(self._partners))), strict=True):
            part = next(parts)
            if not requested:  # after allocating memory
                for partner, publication in zip(self._partners, publications, strict=True):
                    partner.request(publication)
                requested = True
            self._fill(part, held)
            yield part
            del part  # frees memory for the next one

    def _fill(self, bucket: torch.Tensor, held: Sequence[layout.Slice]) -> None:
        """Receive a bucket from all ranks in turn; engines start with different ranks."""
        if len(self._partners) == 1:
            self._partners[0].fill(bucket)
            return
        first = os.getpid() % len(self._partners)
        for rank in (*range(first, len(self._partners)), *range(first)):
            self._partners[rank].fill_rows(bucket, held[rank])

    def close(self) -> None:
        for partner in self._partners:
            partner.close()


_trainers: dict[tuple[tuple[tuple[str, int, str], ...], torch.device], _Trainer] = {}
"""The connections to the last trainer."""


def pulled(weights: Weights, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy of the trainer's block, uint8 [nbytes], which replaces the copy of an earlier version.

    Args:
        device: device of the engine.  The copy is on this device if it is a GPU with NCCL, else on the CPU.

    Raises WeightSyncError if the trainer is unreachable or ends, has another version by now, or if there is
    no memory for the copy.
    """
    with _arriving(weights):
        trainer, publications = _trainer(weights, device)
        return trainer.pull(publications, weights)


def streamed(weights: Weights, device: torch.device | None = None) -> Generator[torch.Tensor]:
    """Yield the trainer's block in the buckets of ``layout.buckets``, each in separate memory.

    Close the generator to stop early.  Arguments and errors are the same as for ``pulled``.
    """
    with _arriving(weights):
        trainer, publications = _trainer(weights, device)
        yield from trainer.parts(publications, weights)


def _trainer(weights: Weights, device: torch.device | None) -> tuple[_Trainer, list[int]]:
    """Return the connections to a trainer, and the publication's number at each rank."""
    location = json.loads(weights.location.removeprefix(SCHEME))
    ends = location if isinstance(location[0], list) else [location]
    key = tuple((host, port, secret) for host, port, secret, _ in ends), device or torch.device("cpu")
    if key not in _trainers:
        _hang_up()
        _trainers[key] = _Trainer(*key)
    return _trainers[key], [publication for *_, publication in ends]


@contextlib.contextmanager
def _arriving(weights: Weights) -> Iterator[None]:
    """Close the connections if a transfer fails or is abandoned; raise WeightSyncError for a failure."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        _hang_up()
        raise WeightSyncError(
            f"version {weights.version} did not arrive from the trainer by engine.transport = "
            f'"collective": {errors.one_line(error)}'
        ) from None
    except GeneratorExit:
        _hang_up()
        raise


def _hang_up() -> None:
    while _trainers:
        _trainers.popitem()[1].close()


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    """Return a socket that listens on the first free port."""
    ports = list(ports)
    problem: OSError | None = None
    for port in ports:
        try:
            family = socket.getaddrinfo(host, None)[0][0]
            return socket.create_server((host, port), family=family)
        except OSError as error:
            problem = error
    where = f"port {ports[0]}" if len(ports) == 1 else f"any of the ports {ports[0]}-{ports[-1]}"
    raise ConfigError(
        f"the trainer cannot listen at {host!r}, {where if ports != [0] else 'any port'}: {problem}; set "
        "engine.transport_options: host to an address of the trainer's machine, and ports to free ones "
        "([0, 0] takes any)"
    )
