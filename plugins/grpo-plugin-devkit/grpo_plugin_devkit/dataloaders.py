"""The contract of dataloaders, as a test for authors.

from grpo_plugin_devkit.dataloaders import check_dataloader
from grpo_plugin_mine.dataloader import Mine

def test_mine_keeps_the_contract():
    check_dataloader(Mine)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from grpo_core import Prompt
from grpo_core.app.data import Source
from grpo_core.config import RowOptions, structured
from grpo_core.data import states
from grpo_core.data.loaders import LookAhead
from grpo_plugin_devkit.contracts import Contract, Noted

READ = 24
"""Number of prompts to read."""
PLACES = (1, 2, 7, 16)
"""Numbers of prompts after which the dataloader is resumed."""
DEADLINE = 60.0


def check_dataloader(
    factory: Callable[..., Any],
    *,
    rows: Mapping[str, Any] = MappingProxyType({}),
    name: str = "",
    **options: Any,
) -> None:
    """Raise AssertionError or GrpoError if a dataloader violates its contract.

    The contract:

    * the factory returns an object that can be iterated and resumed;
    * its rows are prompts, or mappings with the fields that ``rows`` names;
    * a second object yields the same prompts;
    * a resumed object yields the prompts of the uninterrupted one, wherever it was saved;
    * ``state_dict`` has no side effects.

    Args:
        factory: called with the split and the options.
        rows: keys of ``tasks.NAME.data_options`` that name the fields of a row.
        name: name in messages; default: the name of the factory.
    """
    name = name or getattr(factory, "__name__", type(factory).__name__)
    DataloaderContract(lambda split: factory(split, **options), rows=rows, name=name).check()


class DataloaderContract(Contract):
    """The clauses of ``check_dataloader``; each one relies on the earlier ones."""

    essential = ("its rows are prompts",)

    def __init__(
        self, make: Callable[[str], Any], *, rows: Mapping[str, Any] = MappingProxyType({}), name: str = "it"
    ) -> None:
        self._name = name
        options = structured(RowOptions, rows, where="data_options")
        self._source = Source("checked", name, make, options, deadline=DEADLINE)
        self._runner = asyncio.Runner()
        self._prompts: list[Prompt] = []
        self._read = ""

    def __exit__(self, *raised: Any) -> None:
        self._runner.close()

    def its_rows_are_prompts(self) -> None:
        with self._started() as dataloader:
            self._prompts = self._next(dataloader, READ)
            size = "a stream" if dataloader.size is None else f"{dataloader.size:,} rows read by index"
            self._read = f"{size}; {dataloader.rows} rows were read for {READ} prompts"

    def made_again_it_gives_the_same_prompts(self) -> None:
        with self._started() as dataloader:
            _compare(self._prompts, self._next(dataloader, READ), "made a second time")

    def resumed_it_continues_where_it_was(self) -> None:
        for index in PLACES:
            with self._started() as dataloader:
                self._next(dataloader, index)
                saved = _through_files(dataloader.state_dict())
            for when in (f"resumed after {index}", f"resumed after {index}, twice"):
                with self._started() as resumed:
                    resumed.load_state_dict(saved)
                    saved = _through_files(resumed.state_dict())
                    _compare(self._prompts[index:], self._next(resumed, READ - index), when)

    def its_state_can_be_asked_for_at_any_time(self) -> None:
        with self._started() as dataloader:
            found = []
            for _ in range(READ):
                found += self._next(dataloader, 1)
                dataloader.state_dict()
            _compare(self._prompts, found, "saved after each prompt")

    def it_knows_whether_it_has_held_out_prompts(self) -> None:
        found = self._runner.run(self._source.held_out(1))
        assert found != [], (
            f"{self._name}: it has no row for 'validation'; return None if there are no held-out prompts"
        )

    def what_it_read(self) -> None:
        raise Noted(self._read)

    def _next(self, dataloader: LookAhead, n: int) -> list[Prompt]:
        """Return the next prompts, which are taken."""
        self._runner.run(dataloader.first(n))
        return dataloader.take(n)

    @contextlib.contextmanager
    def _started(self) -> Iterator[LookAhead]:
        dataloader = self._runner.run(self._source.training())
        try:
            yield dataloader
        finally:
            dataloader.close()


def _through_files(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state after a round trip through a checkpoint's files."""
    text = json.dumps(states.packed(state), allow_nan=False)
    found: dict[str, Any] = states.unpacked(json.loads(text))
    return found


def _compare(expected: list[Prompt], found: list[Prompt], when: str) -> None:
    for nth, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one.id, one.messages) == (other.id, other.messages), (
            f"{when}, its prompt {nth + 1} is {other.id!r} ({other.messages[-1].get('content')!r:.60}), "
            f"expected {one.id!r} ({one.messages[-1].get('content')!r:.60}): state_dict() has to hold all "
            "that decides the next rows, and the factory has to give the same rows each time"
        )
