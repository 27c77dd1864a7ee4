"""A process without a model that draws prompts through the real loader, sampler, buffer and checkpoint.

    python tests/drawing.py LOADER FOLDER STEPS [STEP PHASE]

It continues from the newest checkpoint in FOLDER, and writes the texts of the prompts of each step to
``FOLDER/drawn.jsonl``.  With STEP and PHASE it ends by SIGKILL there.  A loader that is refused is an exit
status of 2, with the error on standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from any_loaders import OPTIONS

from grpo_core.app.data import TaskData
from grpo_core.config import TaskConfig
from grpo_core.contracts.errors import GrpoError
from grpo_core.contracts.records import Group, Prompt, Rollout, SampleRequest, Slot
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import Mix, PromptStream
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.plugins.host import PluginHost

PER_STEP = 16
PHASES = ("drawn", "trained", "saving", "saved")
EVERY = 2
"""Steps between checkpoints."""


class NoEnvironment:
    """An environment without prompts, which does not convert rows."""

    async def prompts(self, split: str) -> list[Prompt]:
        return []

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        return None


async def draw(name: str, folder: Path, steps: int, kill: tuple[int, str]) -> None:
    def end_at(step: int, phase: str) -> None:
        if kill == (step, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    task = TaskConfig(env="none", data=f"./any_loaders.py:{name}", data_options=dict(OPTIONS.get(name, {})))
    found = checkpoint.newest(folder / "checkpoints")
    data = TaskData.of("t", task, PluginHost.discover(), NoEnvironment(), tries=found is None)
    at_hand = await data.prompts("train", PER_STEP)
    loader = IndexedLoader("t", at_hand, seed=0) if data.loader is None else data.loader
    loader.slots = 2 * PER_STEP
    buffer: Buffer[Prompt, Group] = Buffer(
        prompts_per_step=PER_STEP, max_staleness=1, num_steps=steps, policy="in_order"
    )
    stream = PromptStream(sampler=Mix(), loaders={"t": loader}, name="mix")
    if found is not None:
        checkpoint.restore(found.directory, buffer, {"t": loader}, stream)
    in_use: dict[int, list[Slot[Prompt]]] = {}
    changed = asyncio.Event()
    while buffer.step < steps:
        step = buffer.step
        while True:
            while (wanted := buffer.wanted) and not stream.ready(wanted, changed.set):
                await changed.wait()
                changed.clear()
            if (slots := buffer.reserve()) is None:
                break
            if slots[0].prompt is None:
                request = SampleRequest(
                    generation_version=step,
                    target_version=slots[0].target_version,
                    current_version=step,
                    expected_prompts=len(slots),
                )
                slots = buffer.assign(slots, stream.draw(request))
            for slot in slots:
                in_use.setdefault(slot.target_version, []).append(slot)
        end_at(step, "drawn")
        for slot in in_use.pop(step, []):
            assert slot.prompt is not None
            group = Group(
                prompt=slot.prompt,
                rollouts=(Rollout(reward=1.0),),
                generation_version=step,
                target_version=step,
            )
            buffer.complete(slot, group)
        groups = buffer.take()
        assert groups is not None
        note(folder, step, groups)
        end_at(step, "trained")
        buffer.advance()
        if buffer.step % EVERY == 0:
            cut = checkpoint.snapshot(buffer, stream)
            states = checkpoint.loader_states({"t": loader}, cut["buffer"])
            finish = await checkpoint.begin(
                folder / "checkpoints", step=buffer.step, pipeline={**cut, "validated": -1}, loaders=states,
                save_trainer=_nothing, keep=2,
            )  # fmt: skip
            end_at(step, "saving")
            await finish()
        end_at(step, "saved")
    data.close()


def note(folder: Path, step: int, groups: Sequence[Group]) -> None:
    texts = sorted(str(group.prompt.messages[0]["content"]) for group in groups)
    with open(folder / "drawn.jsonl", "a") as file:
        file.write(json.dumps([step, texts]) + "\n")


async def _nothing(directory: Path) -> Callable[[], Awaitable[None]]:
    """Save a trainer without weights."""

    async def written() -> None:
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)

    return written


def main() -> None:
    loader, folder, steps, *at = sys.argv[1:]
    os.environ["ANY_LOADERS"] = folder
    when = (int(at[0]), at[1]) if at else (-1, "")
    try:
        asyncio.run(draw(loader, Path(folder), int(steps), when))
    except GrpoError as error:
        print(error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main()
