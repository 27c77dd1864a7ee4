"""The contract of weight transports, as checks for authors.

    def test_mine_keeps_the_contract():
        check_transport("mine")

The transport must be installed.  Each check raises AssertionError.
"""

from __future__ import annotations

import torch

from grpo_core import GrpoError, TrainerSetup, Transport, Weights, load_object
from grpo_core.kit import PluginHost, publishing, read_buckets, read_weights, transport_of
from grpo_plugin_devkit.contracts import Contract

CPU = torch.device("cpu")


def check_transport(name: str) -> None:
    """Check a transport's contract in this process.  Raises AssertionError."""
    TransportContract(name).check()


class TransportContract(Contract):
    """The contract of a transport."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._transport: Transport = PluginHost.discover().make("transport", name)
        make = load_object(self._transport.writer, who="transport")
        self._writer: publishing.Writer = make(TrainerSetup(transport=name), CPU, publishing.ALONE)

    def engines_find_it_by_the_location(self) -> None:
        location = self._write(1).location
        found = transport_of(location)
        assert found in (self._transport, transport_of("")), (
            f"the location {location[:80]!r} does not belong to {self._name!r}; begin it with '{self._name}:'"
        )

    def what_is_read_is_what_was_written(self) -> None:
        weights = self._write(2)
        self._expect(read_weights(weights), 2)
        parts = {name: part.clone() for bucket in read_buckets(weights) for name, part in bucket.items()}
        self._expect(parts, 2)

    def the_next_version_replaces_the_one_before(self) -> None:
        for version in (3, 4):
            self._expect(read_weights(self._write(version)), version)

    def what_is_damaged_is_refused(self) -> None:
        weights = self._write(5)
        other = self._write(6)
        try:
            tensors = read_weights(weights)
        except GrpoError:
            return
        self._expect(tensors, 5)
        assert other.location != weights.location

    def _write(self, version: int) -> Weights:
        return self._writer.write(version, iter(_tensors(version).items()))

    def _expect(self, found: dict[str, torch.Tensor], version: int) -> None:
        expected = _tensors(version)
        assert found.keys() == expected.keys(), f"it gives {sorted(found)}, expected {sorted(expected)}"
        for name, tensor in expected.items():
            assert torch.equal(found[name].cpu(), tensor), f"the tensor {name!r} of version {version} differs"


def _tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(33, 65, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(version)),
    }
