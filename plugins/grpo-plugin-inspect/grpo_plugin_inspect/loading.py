"""Loads tasks of Inspect by name, and refuses tasks that need more than a model's replies."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpo_core as grpo

INSTALL = "pip install 'inspect-ai>=0.3.285,<0.4'"


def library() -> Any:
    """Import inspect_ai.  Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module("inspect_ai")
    except ImportError as error:
        raise grpo.ConfigError(
            f"inspect: inspect_ai cannot be imported ({error}): {INSTALL}, in the Python that runs the "
            "environment (environment.python, if that is set)"
        ) from error


def load_task(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return a task by name: ``module@task``, ``./file.py@task``, or the name of a registered task.

    Raises ConfigError if it does not exist, cannot be created, or is refused.
    """
    library()
    home, at, task_name = name.rpartition("@")
    if not name or (at and not (home and task_name)):
        raise grpo.ConfigError(
            f"inspect: {name!r} does not name a task; write inspect:MODULE@TASK, inspect:./file.py@TASK, or "
            "the name of a registered task, as inspect:inspect_evals/gsm8k"
        )
    try:
        task = _made(home, task_name, arguments) if at else _registered(name, arguments)
    except grpo.ConfigError:
        raise
    except Exception as error:  # the user's module, or loading its data, may raise any error
        raise grpo.ConfigError(
            f"inspect: {name} cannot be made: {type(error).__name__}: {error}"[:1000]
        ) from error
    _check(name, task)
    return task


def _made(home: str, task_name: str, arguments: Mapping[str, Any]) -> Any:
    if home.endswith(".py"):
        path = Path(os.path.expanduser(home)).resolve()
        if not path.is_file():
            raise grpo.ConfigError(f"inspect: there is no file {path}")
        tasks = importlib.import_module("inspect_ai._eval.loader").load_tasks(
            [f"{path}@{task_name}"], dict(arguments)
        )
        return tasks[0]
    if not {"", str(Path.cwd())} & set(sys.path):  # last, so that it shadows nothing
        sys.path.append(str(Path.cwd()))
    module = importlib.import_module(home)
    factory = getattr(module, task_name, None)
    if factory is None:
        known = {each for each in vars(module) if not each.startswith("_")}
        raise grpo.ConfigError(
            f"inspect: {home} has no task {task_name!r}.{grpo.did_you_mean(task_name, known)}"
        )
    return factory(**arguments)


def _registered(name: str, arguments: Mapping[str, Any]) -> Any:
    if importlib.import_module("inspect_ai._util.registry").registry_lookup("task", name) is None:
        raise grpo.ConfigError(
            f"inspect: there is no registered task {name!r}; install the package that has it, or write "
            "inspect:MODULE@TASK or inspect:./file.py@TASK"
        )
    return importlib.import_module("inspect_ai._eval.registry").task_create(name, **arguments)


def _check(name: str, task: Any) -> None:
    kind = importlib.import_module("inspect_ai").Task
    if not isinstance(task, kind):
        raise grpo.ConfigError(f"inspect: {name} made {type(task).__name__}, expected an inspect_ai.Task")
    if not task.scorer:
        raise grpo.ConfigError(f"inspect: {name} is refused: it has no scorer, so there are no rewards")
    if task.sample_source is not None:
        raise grpo.ConfigError(f"inspect: {name} is refused: it makes its samples while it runs")
    if task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset):
        raise grpo.ConfigError(
            f"inspect: {name} is refused: it needs a sandbox of Inspect, which is not supported here"
        )
    if len(task.dataset) < 2:
        raise grpo.ConfigError(f"inspect: {name} has {len(task.dataset)} samples, expected at least 2")
