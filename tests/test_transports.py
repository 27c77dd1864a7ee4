"""Weights reach engines completely and by number, or not at all: by relay, by handle, through the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.multiprocessing.reductions import StorageWeakRef

from grpo_core.app import making
from grpo_core.app.placement import LocalPlacement
from grpo_core.config import EngineConfig
from grpo_core.contracts.errors import ConfigError, WeightSyncError
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.plugins.host import PluginHost
from grpo_core.weights import layout
from grpo_core.weights.reading import read_buckets, read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model, start_engine
from grpo_plugin_scale.weights import collective, cuda_ipc
from grpo_plugin_scale.weights.collective import CollectiveWriter, pulled
from grpo_plugin_scale.weights.line import Line, proof
from grpo_plugin_scale.weights.nccl import _store

CPU = torch.device("cpu")


def named(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 5), value)), ("b", torch.full((7,), value, dtype=torch.bfloat16))]


@pytest.fixture
def writer():
    yield CollectiveWriter(CPU, "127.0.0.1")
    collective._hang_up()


# ---------------------------------------------------------------------------------- relay


def test_sent_weights_equal_the_written_ones(writer):
    for version in range(3):
        tensors = read_weights(writer.write(version, named(version + 0.5)))
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: tensor.tolist() for name, tensor in named(version + 0.5)
        }


def test_a_version_that_was_written_over_is_refused_and_the_next_is_sent(writer):
    old = writer.write(1, named(1.0))
    new = writer.write(2, named(2.0))
    with pytest.raises(WeightSyncError, match=r"version 1 did not arrive.*the trainer holds version 2 now"):
        read_weights(old)
    assert read_weights(new)["a"][0, 0] == 2.0


@pytest.mark.long
def test_no_version_is_written_over_while_it_is_sent(writer):
    size = 64 << 20  # more than the buffers of a socket
    ones = writer.write(1, [("a", torch.ones(size, dtype=torch.uint8))])
    *where, publication = json.loads(ones.location.removeprefix("collective:"))
    partner = collective._Partner(*where, CPU)
    assert partner._send({"publication": publication}) == {}, "it is being sent from now on"
    twos = [("a", torch.full((size,), 2, dtype=torch.uint8))]
    writing = threading.Thread(target=writer.write, args=(2, twos))
    writing.start()
    writing.join(0.3)
    waits = writing.is_alive()
    block = torch.empty(ones.nbytes, dtype=torch.uint8)
    partner._line.receive_block(block)
    writing.join()
    partner.close()
    assert waits, "it is not written over before the engine has received all"
    assert block.eq(1).all()


def test_the_same_version_is_sent_once(writer):
    weights = writer.write(1, named(1.0))
    first = pulled(weights)
    writer.write(2, named(2.0))
    assert pulled(weights) is first
    assert read_weights(weights)["a"][0, 0] == 1.0


def test_a_tensor_that_changed_on_its_way_is_named(writer):
    weights = writer.write(1, named(1.0))
    wrong = evolve(weights.tensors[1], checksum=7)
    with pytest.raises(WeightSyncError, match="tensor 'b'"):
        read_weights(evolve(weights, tensors=(weights.tensors[0], wrong)))


def test_buckets_cover_the_block_and_are_small_unless_one_tensor_is_large(monkeypatch):
    monkeypatch.setattr(layout, "BUCKET", 1000)
    sizes = [100, 400, 300, 2000, 10, 800, 950]
    tensors = [(f"t{i}", torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    weights = SharedMemoryWriter().write(1, tensors)
    found = layout.buckets(weights)
    assert [[info.name for info in bucket.tensors] for bucket in found] == [
        ["t0", "t1", "t2"],
        ["t3"],
        ["t4", "t5"],
        ["t6"],
    ]
    assert [bucket.begin for bucket in found] == [0, *(bucket.end for bucket in found[:-1])]
    assert found[-1].end == weights.nbytes


@pytest.mark.parametrize("kind", ["shm", "collective"])
def test_buckets_bring_all_tensors_and_no_bucket_is_left_when_the_next_one_comes(kind, writer, monkeypatch):
    monkeypatch.setattr(layout, "BUCKET", 1000)
    received, fill = [], collective._Partner.fill

    def noted(partner, part):
        assert part.untyped_storage().nbytes() <= 1000
        assert all(before.expired() for before in received), "two buckets are in memory"
        received.append(StorageWeakRef(part.untyped_storage()))
        fill(partner, part)

    monkeypatch.setattr(collective._Partner, "fill", noted)
    chosen = SharedMemoryWriter() if kind == "shm" else writer
    weights = chosen.write(3, [(f"t{i}", torch.full((200,), i, dtype=torch.float32)) for i in range(9)])
    values = {}
    for bucket in read_buckets(weights):
        values |= {name: tensor.unique().tolist() for name, tensor in bucket.items()}
        del bucket
    assert values == {f"t{i}": [float(i)] for i in range(9)}
    assert len(received) == (0 if kind == "shm" else 9)


def test_a_spoilt_bucket_is_named_and_the_connection_is_not_used_in_the_middle_of_a_transfer(
    writer, monkeypatch
):
    monkeypatch.setattr(layout, "BUCKET", 1000)
    weights = writer.write(3, [(f"t{i}", torch.full((200,), i, dtype=torch.float32)) for i in range(9)])
    infos = list(weights.tensors)
    infos[4] = evolve(infos[4], checksum=1)
    spoilt = read_buckets(evolve(weights, tensors=tuple(infos)), verify=False)
    assert [list(next(spoilt)) for _ in range(4)] == [["t0"], ["t1"], ["t2"], ["t3"]]
    with pytest.raises(WeightSyncError, match="tensor 't4'"):
        next(spoilt)
    assert sorted(name for bucket in read_buckets(weights) for name in bucket) == [f"t{i}" for i in range(9)]
    given_up = read_buckets(weights)
    next(given_up)
    given_up.close()
    assert len(list(read_buckets(writer.write(4, named(2.0))))) == 1


def test_the_trainer_answers_nothing_without_the_secret_and_listens_on_loopback(writer):
    host, port, secret, _ = json.loads(writer.write(1, named(1.0)).location.removeprefix("collective:"))
    assert host == "127.0.0.1"
    wrong = b'{"proof": "%s", "nonce": "0", "device": null}\n' % (b"0" * 64)
    plain = b'{"proof": "%s", "nonce": "0", "device": null}\n' % secret.encode()
    deep = b"[" * 900 + b"\n"
    key = b'{"key": "a", "value": "00"}\n'
    for said in (wrong, plain, key, b"hello\n", b"[]\n", b"{}\n", b'{"publication": 1}\n', deep, b"x" * 5000):
        with stranger_at(host, port) as (stranger, nonce):
            assert len(nonce) == 32
            stranger.sendall(said)
            assert closed(stranger)
    assert read_weights(writer.write(2, named(2.0)))["a"][0, 0] == 2.0, "and it serves on"


def test_a_proof_counts_for_its_own_connection_and_direction_only(writer):
    host, port, secret, _ = json.loads(writer.write(1, named(1.0)).location.removeprefix("collective:"))
    with stranger_at(host, port) as (first, nonce), stranger_at(host, port) as (second, other):
        assert nonce != other
        for stranger, said in (
            (first, proof(secret, "trainer", nonce)),
            (second, proof(secret, "engine", nonce)),
        ):
            stranger.sendall(json.dumps({"proof": said, "nonce": "0", "device": None}).encode() + b"\n")
            assert closed(stranger)


def test_an_engine_takes_nothing_from_one_that_cannot_prove_to_be_its_trainer(writer):
    """A neighbour that took the port of a trainer that has ended learns nothing and cannot give weights."""
    weights = writer.write(1, named(1.0))
    _, _, secret, publication = json.loads(weights.location.removeprefix("collective:"))
    heard = []

    def pretend(listening):
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b'{"nonce": "00"}\n')
            heard.append(lines.readline())
            answer = {"proof": json.loads(heard[0])["proof"], "nccl": False}  # it sends back what it got
            connection.sendall(json.dumps(answer).encode() + b"\n")
            heard.append(lines.readline())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=pretend, args=(listening,))
        thread.start()
        where = ["127.0.0.1", listening.getsockname()[1], secret, publication]
        with pytest.raises(WeightSyncError, match="is not this run's trainer"):
            read_weights(evolve(weights, location=f"collective:{json.dumps(where)}"))
        thread.join()
    assert secret.encode() not in heard[0]
    assert heard[1] == b"", "it asks for no publication"


def test_the_only_socket_that_listens_is_the_one_that_asks_for_a_proof():
    """Neither a transfer nor the meeting of its two ends opens another port."""
    before = listening_ports()
    writer = CollectiveWriter(CPU, "127.0.0.1")
    (port,) = listening_ports() - before
    assert port == writer._socket.getsockname()[1]
    assert read_weights(writer.write(1, named(1.0)))["a"][0, 0] == 1.0
    assert listening_ports() - before == {port}
    collective._hang_up()


def listening_ports():
    """Return the TCP ports at which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {
        int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    }


@pytest.mark.long
def test_silent_strangers_are_few_do_not_last_and_do_not_keep_an_engine_out(monkeypatch):
    monkeypatch.setattr(collective, "PROOF_SECONDS", 0.2)
    monkeypatch.setattr(collective, "MOST_UNPROVEN", 5)
    writer = CollectiveWriter(CPU, "127.0.0.1")
    weights = writer.write(1, named(1.0))
    host, port, *_ = json.loads(weights.location.removeprefix("collective:"))
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger_at(host, port))[0] for _ in range(50)]
        assert len(writer._unproven) <= 5
        assert read_weights(weights)["a"][0, 0] == 1.0
        assert all(map(closed, strangers)), "they are hung up on"
    collective._hang_up()


def test_a_stranger_that_says_a_byte_now_and_then_is_hung_up_on_in_time(writer, monkeypatch):
    monkeypatch.setattr(collective, "PROOF_SECONDS", 0.4)
    host, port, *_ = json.loads(writer.write(1, named(1.0)).location.removeprefix("collective:"))
    with stranger_at(host, port) as (stranger, _):
        stranger.settimeout(0.1)
        for _ in range(50):
            try:
                stranger.sendall(b"x")
                assert stranger.recv(100) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it is still connected")


@contextlib.contextmanager
def stranger_at(host, port):
    """Connect without the secret; return the socket and the nonce that the trainer says first."""
    with socket.create_connection((host, port), timeout=10) as stranger:
        line = b""
        while not line.endswith(b"\n"):
            part = stranger.recv(100)
            assert part, "it has hung up"
            line += part
        assert list(json.loads(line)) == ["nonce"], "that is all it says"
        yield stranger, json.loads(line)["nonce"]


def closed(stranger):
    """Whether the other end says nothing more and hangs up."""
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_the_addresses_of_a_group_travel_over_the_proven_connection():
    """The store on which NCCL meets, on both ends of a connection, carries a group of gloo here."""
    ends = [Line(end) for end in socket.socketpair()]
    received = torch.zeros(4)

    def member(rank):
        options = torch.distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = torch.distributed.ProcessGroupGloo(_store(ends[rank]), rank, 2, options)
        if rank:
            group.recv([received], 0, 0).wait()
        else:
            group.send([torch.arange(4.0)], 1, 0).wait()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert received.tolist() == [0, 1, 2, 3]
    for end in ends:
        end.close()


def test_a_trainer_that_is_gone_is_an_error_with_a_name():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    weights = evolve(
        CollectiveWriter(CPU, "127.0.0.1").write(1, named(1.0)),
        location=f'collective:["127.0.0.1", {port}, "secret", 1]',
    )
    with pytest.raises(WeightSyncError, match=r"did not arrive.*Connection refused.*transport_options\.host"):
        read_weights(weights)


@pytest.mark.slow
def test_an_engine_takes_weights_that_are_sent(tmp_path, writer):
    async def story():
        model = make_test_model(tmp_path)
        engine = await start_engine(LocalEngine, model, max_rows=64)
        tried = EngineUnderTest(
            engine=engine, model=model, writer=writer, kill=lambda: os.kill(engine.pid, signal.SIGKILL)
        )
        await tried.engine.update_weights(tried.publish(0))
        for law in (
            "each token is of the version that it names",
            "weights of another model are refused and change nothing",
            "nothing of older weights is left",
            "a dead engine is replaced and holds the last weights",
        ):
            await ENGINE_LAWS[law](tried)
        await engine.aclose()

    asyncio.run(story())


# ---------------------------------------------------------------------------------- handles


def test_shared_memory_belongs_to_its_user_alone():
    weights = SharedMemoryWriter().write(1, named(1.0))
    status = os.stat(weights.location)
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.getuid())
    assert os.readlink(weights.location).startswith("/memfd:"), "it has no name that could stay"


def test_a_handle_is_plain_text_and_names_its_gpu_by_identity():
    handle = [0, b"\x00\xff", 1 << 40, 512, b"counter", 3, b"event", True]
    location = cuda_ipc.described("GPU-b", handle)
    assert cuda_ipc.handle_of(location, ["GPU-a", "GPU-b"]) == [1, *handle[1:]]
    with pytest.raises(ValueError, match=r"GPU GPU-b is not one of \['GPU-a'\]"):
        cuda_ipc.handle_of(location, ["GPU-a"])


def test_a_handle_that_cannot_be_opened_is_an_error_with_advice(writer):
    location = cuda_ipc.described("GPU-a", [0, b"", 0, 0, b"", 0, b"", True])
    weights = evolve(writer.write(1, named(1.0)), location=location)
    with pytest.raises(WeightSyncError, match=r'GPU-a is not one of.*engine\.transport = "shm"'):
        read_weights(weights)


READER = """
import pickle, sys
from grpo_core.weights.reading import read_buckets, read_weights
weights = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch
tensors = read_weights(weights, device=torch.device("cuda")).values()
print([float(tensor.cpu().float().mean()) for tensor in tensors], {tensor.device.type for tensor in tensors})
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["cuda_ipc", "collective"])
def test_another_process_reads_the_memory_of_a_gpu(kind):
    """By relay a GPU's memory is sent to another GPU; with one alone NCCL refuses."""
    if kind == "collective" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    gpu = torch.device("cuda", 0)
    writer = cuda_ipc.CudaIpcWriter(gpu) if kind == "cuda_ipc" else CollectiveWriter(gpu, "127.0.0.1")
    weights = writer.write(1, [(name, tensor.to(gpu)) for name, tensor in named(2.5)])
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0" if kind == "cuda_ipc" else "1"}
    told = subprocess.run(
        [sys.executable, "-c", READER, pickle.dumps(weights).hex()],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout == "[2.5, 2.5] {'cuda'}\n", told.stderr


# ---------------------------------------------------------------------------------- which


HERE = LocalPlacement(PluginHost.discover([]))


class Cluster(LocalPlacement):
    """Workers of this machine, or of others, that may be lost."""

    pooled = True

    def __init__(self, *, remote: bool) -> None:
        super().__init__(PluginHost.discover([]))
        self.remote = remote


ALONE, JOINED = Cluster(remote=False), Cluster(remote=True)
FAR = {"host": "10.0.0.1"}
GPUS, TWO = EngineConfig(gpus_per_worker=1), EngineConfig(workers=2)


def transport(engine, validation, placement, host):
    """The transport that a configuration with these sections gets."""
    return making.transport_of(engine, validation, host, placement, "")


@pytest.mark.parametrize(
    ("engine", "validation", "placement", "expected"),
    [
        (EngineConfig(), None, HERE, "shm"),
        (TWO, None, HERE, "shm"),
        (EngineConfig(), None, ALONE, "shm"),
        (GPUS, None, ALONE, "shm"),
        (evolve(GPUS, transport="collective", transport_options=FAR), None, JOINED, "collective"),
        (EngineConfig(transport="cuda_ipc"), None, HERE, "cuda_ipc"),
        (evolve(TWO, transport="collective"), None, HERE, "collective"),
        (EngineConfig(), TWO, HERE, "shm"),
    ],
)
def test_the_default_transport_is_the_one_that_has_been_tested_everywhere(
    engine, validation, placement, expected
):
    assert transport(engine, validation, placement, PluginHost.discover()) == expected


@pytest.mark.parametrize(
    ("engine", "validation", "placement", "message"),
    [
        (evolve(TWO, transport="cuda_ipc"), None, HERE, r'"cuda_ipc" is for one engine.*"shm"'),
        (EngineConfig(transport="cuda_ipc"), TWO, HERE, '"cuda_ipc" is for one engine'),
        (EngineConfig(transport="cuda_ipc"), None, ALONE, '"cuda_ipc" is for one engine'),
        (
            EngineConfig(transport="collective"),
            None,
            JOINED,
            r"cannot reach engine\.transport_options\.host = '127\.0\.0\.1'",
        ),
        (
            EngineConfig(transport="collective", transport_options={"host": "127.0.0.2"}),
            None,
            JOINED,
            r"cannot reach engine\.transport_options\.host = '127\.0\.0\.2'",
        ),
        (
            EngineConfig(name="tests/test_transports.py:Elsewhere", transport="collective"),
            None,
            HERE,
            "takes weights by shm only",
        ),
        (
            EngineConfig(),
            EngineConfig(transport="collective"),
            HERE,
            r"validation\.engine\.transport: weights come to all engines by engine\.transport",
        ),
    ],
)
def test_a_transport_that_cannot_be_is_refused(engine, validation, placement, message):
    with pytest.raises(ConfigError, match=message):
        transport(engine, validation, placement, PluginHost.discover())


class Elsewhere:
    """An engine that knows nothing of transports."""
