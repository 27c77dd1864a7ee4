"""The contract of model sources, as checks for authors.

    def test_mine_keeps_the_contract():
        check_model_source(MySource, size="small")

Each check raises AssertionError.  The source makes a model for a small environment; engines and trainers must
be able to load it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from grpo_core import GrpoError, Prompt
from grpo_core.kit import ModelRequest, Renderer, StartModel, build, files
from grpo_core.testing import HostedEnvironment, prompts
from grpo_plugin_devkit.contracts import Contract

TASK = "task"


def check_model_source(make: Callable[..., Any], **options: Any) -> None:
    """Check a model source's contract.  Raises AssertionError."""
    ModelSourceContract(lambda: make(**options)).check()


class ModelSourceContract(Contract):
    """The contract of a model source.

    Args:
        make: the factory with its options filled in.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._scratch = tempfile.TemporaryDirectory(prefix="grpo-core-check-")
        self._directory = Path(self._scratch.name)
        self._made: StartModel | None = None

    def __exit__(self, *raised: Any) -> None:
        self._scratch.cleanup()

    def its_preset_is_a_part_of_a_configuration(self) -> None:
        preset = self._make().preset
        assert isinstance(preset, Mapping), f"preset is {type(preset).__name__}, expected tables"
        try:
            build([preset])
        except GrpoError as error:
            raise AssertionError(f"preset is not a part of a configuration: {error}") from error

    def it_is_checked_without_making_anything(self) -> None:
        before = set(self._directory.rglob("*"))
        returned = self._make().check()
        assert returned is None, f"check() returned {returned!r}; expected None or a ModelError"
        assert set(self._directory.rglob("*")) == before, "check() has written files"

    def it_makes_a_model_that_can_be_loaded(self) -> None:
        """Check that ``prepare`` is plain data, since it is sent to the trainer's process."""
        self.begun = False
        found = self._start("first")
        path = Path(found.path)
        assert (path / "config.json").is_file(), f"{path} has no config.json"
        renderer = Renderer.load(str(path), trust_remote_code=False, chat_template=files.chat_template(""))
        assert renderer.prompt_ids([{"role": "user", "content": "ab"}]), "its tokenizer gives no tokens"
        self._made, self.begun = found, True

    def its_positions_are_those_of_the_model(self) -> None:
        found = self._there()
        known = _config(found).get("max_position_embeddings")
        if isinstance(known, int):
            assert found.positions <= known, (
                f"StartModel.positions is {found.positions:,}, and the model has {known:,}: rollouts would "
                "exceed it"
            )

    def its_configuration_is_that_of_the_model(self) -> None:
        """Check ``configuration``, which is optional and used by the memory estimate."""
        configuration = getattr(self._make(), "configuration", None)
        if configuration is None:
            return
        config = _config(self._there())
        for key, value in configuration().items():
            assert config.get(key, value) == value, (
                f"configuration() says {key} = {value!r}, and config.json of the model {config[key]!r}"
            )

    def a_start_that_finds_the_model_changes_nothing(self) -> None:
        path = Path(self._there().path)
        before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in _files(path)}
        again = self._start("first")
        assert Path(again.path) == path, f"a second start found {again.path}, the first one made {path}"
        after = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in _files(path)}
        changed = [file.name for file in before.keys() | after.keys() if before.get(file) != after.get(file)]
        assert not changed, f"a start that found the model wrote {changed[0]} again"

    def the_same_seed_makes_the_same_model(self) -> None:
        first = Path(self._there().path)
        other = Path(self._start("second").path)
        for file in _files(first):
            if file.suffix == ".safetensors":
                there = other / file.relative_to(first)
                assert there.is_file(), f"another start with the same seed made no {file.name}"
                assert file.read_bytes() == there.read_bytes(), (
                    f"{file.name} of two starts with the same seed differs (ModelRequest.seed)"
                )

    def _there(self) -> StartModel:
        assert self._made is not None, "it has made no model"
        return self._made

    def _start(self, name: str) -> StartModel:
        directory = self._directory / name / "model"
        directory.parent.mkdir(exist_ok=True)

        async def story() -> StartModel:
            async def offered() -> Mapping[str, list[Prompt]]:
                return {TASK: prompts(20)}

            request = ModelRequest(
                directory=directory,
                prompts=offered,
                environments={TASK: HostedEnvironment(_Solved(), task=TASK)},
                seed=7,
            )
            found = await self._make().start_model(request)
            kind = type(found).__name__
            assert isinstance(found, StartModel), f"start_model() returned {kind}, expected StartModel"
            return found

        found = asyncio.run(story())
        if found.prepare is not None:
            try:
                ForkingPickler.dumps(found.prepare)
            except Exception as error:
                raise AssertionError(
                    "StartModel.prepare cannot be sent to the trainer's process "
                    f"({type(error).__name__}: {error}); use functools.partial of a function of a module"
                ) from error
            found.prepare()
        assert Path(found.path).is_dir(), f"there is no directory {found.path} after prepare()"
        return found


class _Solved:
    """An environment with a solution of each prompt."""

    max_turns = 1

    def prompts(self, split: str) -> list[Prompt]:
        return prompts(20)

    def evaluate(self, episodes: Any) -> list[float]:
        return [float(episode.reply == "ab") for episode in episodes]

    def solve(self, prompt: Prompt) -> str:
        return "ab"


def _config(found: StartModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(found.path) / "config.json").read_text(encoding="utf-8"))
    return config


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]
