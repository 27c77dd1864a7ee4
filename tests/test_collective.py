"""The transport ``collective``: a failing or slow end takes no other one down, and nothing waits for ever.

Each fault is played with processes, once over a connection, as on CPUs, and once in groups of NCCL, for which
``fake_gpus`` stands in.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import fake_gpus
import pytest
import torch
from attrs import evolve
from ends import CPU, Engine, Trainer, ends
from fake_gpus import GPU, ProcessGroup

from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ConfigError, ModelError, PluginError, WeightSyncError
from grpo_core.contracts.records import EngineSetup, GenerationRequest
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.engines.local.server import Server
from grpo_core.loop.agreement import Tolerance
from grpo_core.testing import make_offer
from grpo_core.training.ranks import Alone
from grpo_core.weights.reading import read_weights
from grpo_plugin_devkit.decoding import EngineUnderTest, make_test_model
from grpo_plugin_scale.engines.pool import EnginePool
from grpo_plugin_scale.weights import collective, cuda_ipc, nccl
from grpo_plugin_scale.weights.collective import CollectiveWriter, pulled


def real(count: int) -> list[pytest.MarkDecorator]:
    missing = torch.cuda.device_count() < count
    return [pytest.mark.gpu, pytest.mark.skipif(missing, reason=f"needs {count} CUDA devices")]


PLAYED = [pytest.param(None, None, id="connection"), pytest.param("GPU-0", "GPU-1", id="nccl")]
"""The GPU of the trainer and of an engine, or None."""
WAYS = pytest.mark.parametrize(
    ("there", "here"),
    [
        *PLAYED,
        pytest.param("cuda:0", "cuda:0", id="one real GPU", marks=real(1)),
        pytest.param("cuda:0", "cuda:1", id="two real GPUs", marks=real(2)),
    ],
)


@pytest.fixture
def gpus(monkeypatch):
    """Let this process see one GPU: it is both the trainer and an engine, whose GPU is GPU-1."""
    fake_gpus.install("GPU-0", monkeypatch.setattr)
    names = iter(["GPU-1", "GPU-0"] * 100)  # an engine connects, and then the trainer looks
    monkeypatch.setattr(ProcessGroup, "groups", [])
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    properties = type("Properties", (), {"uuid": property(lambda self: next(names))})
    monkeypatch.setattr(nccl.torch.cuda, "get_device_properties", lambda device: properties())
    yield ProcessGroup.groups
    collective._hang_up()


@pytest.fixture(autouse=True)
def _leave_nothing():
    yield
    collective._hang_up()


def named(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 5), value))]


# ---------------------------------------------------------------------------------- an engine fails


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_engine_that_is_killed_keeps_neither_the_trainer_nor_other_engines_waiting(there, here, moment):
    with ends((Trainer, there), (Engine, here), (Engine, here)) as (trainer, dying, other):
        first = trainer.write(1)
        if moment == "after":
            assert dying.read(first) == 1
        else:
            assert dying.read(first, moment) == moment
        dying.kill()
        assert other.read(first) == 1
        assert other.read(trainer.write(2)) == 2


@pytest.mark.slow
def test_an_engine_that_is_killed_while_nccl_connects_it_holds_no_other_up():
    """NCCL waits for it, as long as a communicator may take to be made."""
    with ends((Trainer, "GPU-0"), (Engine, "GPU-1"), (Engine, "GPU-2")) as (trainer, dying, other):
        first = trainer.write(1)
        assert dying.read(first, "meeting") == "meeting"
        dying.kill()
        assert other.read(first) == 1
        assert other.read(trainer.write(2)) == 2


@pytest.mark.slow
def test_an_abort_of_nccl_that_never_returns_holds_neither_the_trainer_nor_other_engines_up():
    """The version in the middle of whose transfer the engine died keeps its block."""
    given = ((Trainer.whose_aborts_hang, "GPU-0"), (Engine, "GPU-1"), (Engine, "GPU-2"))
    with ends(*given) as (trainer, dying, other):
        first = trainer.write(1)
        assert dying.read(first, "during") == "during"
        dying.kill()
        assert other.read(first) == 1
        for version in (2, 3):
            assert other.read(trainer.write(version)) == version


@pytest.mark.slow
@WAYS
def test_an_engine_without_memory_gets_an_error_and_the_trainer_never_waits_for_it(there, here):
    with ends((Trainer, there), (Engine, here)) as (trainer, engine):
        first = trainer.write(1)
        error = engine.read(evolve(first, nbytes=1 << 60), "before")
        assert isinstance(error, WeightSyncError), "it fails before it asks for the weights"
        assert "allocate" in str(error)
        assert engine.read(first) == 1
        assert engine.read(trainer.write(2)) == 2


@pytest.mark.slow
@WAYS
def test_an_engine_that_stops_reading_holds_no_other_up_and_is_disconnected_by_the_next_version(there, here):
    with ends((Trainer, there), (Engine, here), (Engine, here)) as (trainer, slow, other):
        first = trainer.write(1)
        assert slow.read(first, "during") == "during"
        slow.signal(signal.SIGSTOP)
        assert other.read(first) == 1, "while the stopped one is in the middle of its transfer"
        second = trainer.write(2)
        assert other.read(second) == 2
        slow.signal(signal.SIGCONT)
        slow.tell("go on")
        error = slow.hear()
        assert isinstance(error, WeightSyncError)
        assert "writes the next version, for which it waits at most" in str(error)
        assert slow.read(second) == 2


@pytest.mark.long
@pytest.mark.parametrize(("there", "here"), PLAYED)
def test_an_engine_that_asks_and_never_receives_is_left_after_a_time_limit(gpus, monkeypatch, there, here):
    monkeypatch.setattr(collective, "SECONDS", 0.05)
    monkeypatch.setattr(nccl, "SECONDS", 0.05)
    writer = CollectiveWriter(GPU if there else CPU, "127.0.0.1")
    weights = writer.write(1, [("a", torch.ones(48 << 20, dtype=torch.uint8))])
    *where, publication = json.loads(weights.location.removeprefix("collective:"))
    partner = collective._Partner(*where, GPU if here else CPU)
    assert partner._send({"publication": publication}) == {}
    with writer._state:
        assert writer._state.wait_for(lambda: not writer._readers, 30)
    partner.close()


def test_a_transfer_that_cannot_be_ended_keeps_its_block_and_the_next_version_gets_another(monkeypatch):
    monkeypatch.setattr(collective, "PATIENCE", 0.0)
    monkeypatch.setattr(collective, "RELEASE", 0.0)
    begun, end, ended = threading.Event(), threading.Event(), threading.Event()
    sent = []

    def stuck(line, block):
        begun.set()
        end.wait()
        sent.append(block)
        ended.set()

    monkeypatch.setattr(collective.Line, "send_block", stuck)
    writer = CollectiveWriter(CPU, "127.0.0.1")
    *where, publication = json.loads(writer.write(1, named(1.0)).location.removeprefix("collective:"))
    partner = collective._Partner(*where, CPU)
    partner._line.send({"publication": publication})
    begun.wait()
    writer.write(2, named(2.0))
    end.set()
    assert partner._received() == {}
    with pytest.raises(ConnectionError):
        partner._received()
    ended.wait()
    assert sent[0][:60].view(torch.float32).tolist() == [1.0] * 15
    partner.close()


@pytest.mark.slow
def test_engines_continue_whatever_happens_to_them_or_to_the_trainer_in_a_weight_sync(tmp_path, monkeypatch):
    """One engine of a pool is killed in the middle of a transfer, and the other one is frozen."""
    made, killed, real = [], [], collective.Line.send_block

    def killing(line, block):
        if not killed:
            killed.append(made[0].pid)
            os.kill(made[0].pid, signal.SIGKILL)
        real(line, block)

    def make(number):
        made.append(LocalEngine(setup, device="cpu", max_rows=8))
        return made[-1]

    async def story():
        pool = EnginePool(make, 2, tolerance=Tolerance(1e-3), deadline=60.0)
        tried = EngineUnderTest(engine=pool, model=model, writer=CollectiveWriter(CPU, "127.0.0.1"))
        await pool.update_weights(tried.publish(0))
        monkeypatch.setattr(collective.Line, "send_block", killing)
        await tried.update()
        os.kill(made[1].pid, signal.SIGSTOP)
        await tried.update()
        (completion,) = await tried.ask(GenerationRequest(prompt_ids=(5,), max_tokens=3))
        assert set(completion.versions.tolist()) == {2}
        os.kill(made[1].pid, signal.SIGCONT)
        gone = evolve(tried.publish(3), location='collective:["127.0.0.1", 1, "secret", 1]')
        with pytest.raises(WeightSyncError, match=r"no connection to 127\.0\.0\.1, port 1"):
            await pool.update_weights(gone)
        (completion,) = await tried.ask(GenerationRequest(prompt_ids=(5,), max_tokens=3))
        assert set(completion.versions.tolist()) == {2}, "it keeps the version before"
        await pool.aclose()

    model = make_test_model(tmp_path)
    setup = EngineSetup(model=str(model), log_directory=str(tmp_path), deadline=60.0)
    asyncio.run(story())
    assert killed


# ---------------------------------------------------------------------------------- the trainer fails


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_engine_whose_trainer_is_killed_gets_an_error_and_serves_the_next_one(there, here, moment):
    with ends((Trainer, there), (Engine, here), (Trainer, there)) as (dying, engine, following):
        if moment == "after":
            assert engine.read(dying.write(1)) == 1
            dying.kill()
        else:
            engine.tell(dying.write(1, moment), "")
            assert dying.hear() == moment
            dying.kill()
            error = engine.hear()
            assert isinstance(error, WeightSyncError)
            assert re.search(
                r"version 1 did not arrive from the trainer.*(closed the connection|has ended)", str(error)
            )
        assert engine.read(following.write(2)) == 2


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("moment", ["before", "during"])
def test_an_engine_whose_trainer_stops_gets_an_error_after_its_time_limit(there, here, moment):
    with ends((Trainer, there), (Engine, here)) as (trainer, engine):
        engine.tell(trainer.write(1, moment), "")
        assert trainer.hear() == moment
        trainer.signal(signal.SIGSTOP)
        error = engine.hear()
        assert isinstance(error, WeightSyncError)
        assert re.search(r"(sent nothing|not answered) for \d+ s", str(error))


def test_the_documents_name_the_time_limits():
    said = " ".join(Path(__file__).parent.parent.joinpath("docs", "cluster.md").read_text().split())
    assert f"an engine waits at most {collective.MEETING:.0f} s for an answer" in said
    assert f"and {collective.SECONDS:.0f} s for the next part" in said
    assert f"the version before {collective.PATIENCE:.0f} s, and then disconnects them" in said


def test_an_engine_without_the_secret_gets_an_error_and_the_trainer_serves_on():
    writer = CollectiveWriter(CPU, "127.0.0.1")
    weights = writer.write(1, named(1.0))
    with pytest.raises(WeightSyncError, match="the trainer has closed the connection"):
        read_weights(evolve(weights, location=weights.location.replace(writer._secret, "0" * 32)))
    assert read_weights(weights)["a"].eq(1).all()


# ---------------------------------------------------------------------------------- by NCCL or not


def test_weights_go_by_nccl_from_one_gpu_to_another(gpus):
    writer = CollectiveWriter(GPU, "127.0.0.1")
    for version in (1, 2):
        weights = writer.write(version, named(version))
        assert read_weights(weights, device=GPU)["a"].eq(version).all()
    assert [group.moved for group in gpus] == [[1, weights.nbytes, weights.nbytes]] * 2, (
        "the communicator is made by one byte, when the two meet"
    )


def test_a_group_neither_ends_its_process_nor_waits_for_ever_nor_fills_the_gpu(gpus):
    pulled(CollectiveWriter(GPU, "127.0.0.1").write(1, named(1.0)), GPU)
    for group in gpus:
        assert group.blocking_wait == "1", "torch starts no watchdog"
        assert group.nonblocking_timeout == f"{nccl.MEETING:.0f}"
        assert (group.options.config.blocking, group.options.config.max_ctas) == (0, nccl.MAX_CTAS)
        assert group.options._timeout.total_seconds() == nccl.SECONDS
        assert not group.aborted.is_set()
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "other groups of the process are as they were"
    collective._hang_up()
    for group in gpus:
        assert group.aborted.wait(30), "its memory on the GPU is freed"


def test_a_setting_of_the_user_for_other_groups_is_kept(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
    with nccl._watched_by_nobody():
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"


def test_torch_has_the_options_that_are_set():
    """The stand-in takes nothing that ``ProcessGroupNCCL`` has not; this torch may be built without it."""
    stub = Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi"
    _, _, nccl_group = stub.read_text().partition("class ProcessGroupNCCL(")
    assert "def abort(self)" in nccl_group
    for name in fake_gpus.Config.__slots__:
        assert f"{name}: int" in nccl_group
    for name in ("is_completed", "wait"):
        assert hasattr(torch._C._distributed_c10d.Work, name)
    assert hasattr(torch.distributed.ProcessGroupGloo._Options(), "_timeout")
    if torch.distributed.is_nccl_available():  # a build for CUDA, also without a GPU
        options = torch.distributed.ProcessGroupNCCL.Options()
        for name in fake_gpus.Config.__slots__:
            setattr(options.config, name, 1)
        options._timeout = timedelta(seconds=1)


def test_an_error_of_nccl_is_an_error_of_the_weight_sync_and_aborts_the_group(gpus, monkeypatch):
    def refuses(self, tensors, rank, tag):
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(ProcessGroup, "recv", refuses)
    monkeypatch.setattr(ProcessGroup, "send", refuses)
    weights = CollectiveWriter(GPU, "127.0.0.1").write(1, named(1.0))
    with pytest.raises(WeightSyncError, match="Duplicate GPU detected"):
        read_weights(weights, device=GPU)
    while len(gpus) < 2:  # the trainer's thread may not have made its group yet
        time.sleep(0.01)
    for group in gpus:
        assert group.aborted.wait(30)


@pytest.mark.parametrize(
    ("trainer", "engine", "by_nccl"),
    [
        ("GPU-0", "GPU-1", True),
        ("GPU-0", "GPU-0", False),  # NCCL refuses two ranks on one GPU
        ("GPU-0", None, False),
        (None, "GPU-1", False),
        (None, None, False),
    ],
)
def test_nccl_connects_two_gpus_only(gpus, monkeypatch, trainer, engine, by_nccl):
    uuids = {torch.device("cuda", 0): trainer, torch.device("cuda", 1): engine}
    monkeypatch.setattr(
        nccl.torch.cuda,
        "get_device_properties",
        lambda device: type("Properties", (), {"uuid": uuids[device]}),
    )
    monkeypatch.setattr(collective, "Pair", FakePair)
    monkeypatch.setattr(FakePair, "made", [])
    monkeypatch.setattr(collective, "settle", lambda device: None)
    writer = CollectiveWriter(torch.device("cuda", 0) if trainer else CPU, "127.0.0.1")
    weights = writer.write(1, named(1.0))
    pulled(weights, torch.device("cuda", 1) if engine else CPU)
    assert (collective.ENGINE in FakePair.made) == by_nccl  # a trainer's thread of another test may end late
    assert collective.TRAINER in FakePair.made or not by_nccl


@pytest.mark.parametrize(("trainer", "engine"), [("0", None), (None, "1")])
def test_nccl_is_not_tried_between_ends_that_take_memory_in_two_ways(gpus, monkeypatch, trainer, engine):
    values = iter([engine or "", trainer or ""])  # the engine says its own first
    monkeypatch.setattr(collective, "memory_setting", lambda: next(values))
    monkeypatch.setattr(collective, "Pair", FakePair)
    monkeypatch.setattr(FakePair, "made", [])
    weights = CollectiveWriter(GPU, "127.0.0.1").write(1, named(1.0))
    told = f"is {trainer or 'not set'} for the trainer and {engine or 'not set'} for the engine"
    with pytest.raises(WeightSyncError, match=f"NCCL_CUMEM_ENABLE {told}"):
        pulled(weights, GPU)
    assert not FakePair.made


class FakePair:
    """A group that moves nothing."""

    made: list[int] = []  # noqa: RUF012

    def __init__(self, line, rank, device):
        self.made.append(rank)

    def move(self, block):
        pass

    def abort(self):
        pass


def test_torch_without_nccl_takes_the_connection(gpus, monkeypatch):
    monkeypatch.setattr(fake_gpus.Distributed, "is_nccl_available", lambda: False)
    assert read_weights(CollectiveWriter(GPU, "127.0.0.1").write(1, named(1.0)), device=GPU)["a"].eq(1).all()
    assert not gpus


def test_an_engine_on_the_cpu_of_a_machine_with_gpus_takes_the_connection(gpus, monkeypatch, tmp_path):
    """The engine `local` says where it computes; what else the machine has does not count."""
    given = []
    real = collective.streamed
    monkeypatch.setattr(
        collective, "streamed", lambda weights, device: given.append(device) or real(weights, device)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = Server(EngineSetup(model=str(tmp_path)), device="cpu", dtype="auto", max_rows=1)
    with pytest.raises(ModelError, match=r"config\.json"):  # there is no model, but the weights came
        list(server.load(CollectiveWriter(GPU, "127.0.0.1").write(1, named(1.0))))
    assert set(given) == {CPU}
    assert not gpus


def test_a_handle_to_gpu_memory_is_made_and_opened(gpus, monkeypatch):
    shared = {}

    def share(storage):
        shared[b"handle"] = storage
        return 0, b"handle", storage.nbytes(), 0, b"counter", 0, b"event", True

    def opened(number, handle, size, offset, counter, counter_offset, event, must_wait):
        assert (number, size, must_wait) == (0, shared[handle].nbytes(), True)
        return shared[handle]

    fake_gpus.install("GPU-0", monkeypatch.setattr)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(opened), raising=False)
    writer = cuda_ipc.CudaIpcWriter(GPU)
    for version in (1, 2):
        weights = writer.write(version, named(version))
        assert read_weights(weights)["a"].eq(version).all(), "also when the handle is open already"
    assert "GPU-0" in weights.location


# ---------------------------------------------------------------------------------- ports


def test_the_trainer_listens_at_the_first_free_port_of_its_range():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port}: .*in use.*set engine\.transport_options: host.*ports"
        ):
            CollectiveWriter(CPU, "127.0.0.1", [port])
        with socket.create_server(("127.0.0.1", 0)) as free:
            other = free.getsockname()[1]
        writer = CollectiveWriter(CPU, "127.0.0.1", [port, other])
    assert writer._socket.getsockname()[1] == other
    assert read_weights(writer.write(1, named(1.0)))["a"].eq(1).all()


def test_an_address_of_another_machine_is_one_clear_error():
    with pytest.raises(
        ConfigError, match=r"cannot listen at '192\.0\.2\.1', any port: .*engine\.transport_options"
    ):
        CollectiveWriter(CPU, "192.0.2.1")


def test_the_trainer_takes_its_ports_from_the_configuration():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    setup = TrainerSetup(transport="collective", transport_options={"ports": [port, port]})
    assert collective.writer(setup, CPU, Alone())._socket.getsockname()[1] == port


@pytest.mark.parametrize("ports", [[0, 1], [2, 1], [1, 65536], [-1, 5], [1]])
def test_ports_that_cannot_be_are_refused(ports):
    with pytest.raises(PluginError, match=r"engine\.transport_options\.ports = .*: expected \[first, last"):
        make_offer("transport", "collective", ports=ports)
