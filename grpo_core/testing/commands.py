"""The contract of commands as a test that their authors run.

from grpo_core.testing import check_commands
from grpo_plugin_mine import commands

def test_my_commands_keep_the_contract():
    check_commands(commands)
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing
from types import ModuleType

from grpo_core.plugins.commands import offered_commands

LARGE = ("torch", "transformers", "numpy", "ray", "vllm")
"""Libraries that take long to import, and that the line in ``grpo-core --help`` does not need."""


def check_commands(module: ModuleType) -> None:
    """Raise AssertionError if the commands of a module break their contract.

    It holds that

    * importing the module loads no large library, and no module of a command;
    * each command exists, returns an exit status, and documents its parameters;
    * ``help`` is the sentence with which its documentation begins.
    """
    commands = offered_commands(module)
    homes = {command.target.partition(":")[0] for command in commands.values()}
    code = f"import sys, {module.__name__}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    early = set(loaded.stdout.split()) & {*LARGE, *homes}
    assert not early, f"importing {module.__name__} imports {', '.join(sorted(early))}"
    for name, command in commands.items():
        home, _, attribute = command.target.partition(":")
        target = getattr(importlib.import_module(home), attribute)
        documented = inspect.getdoc(target) if inspect.isfunction(target) else target.help
        assert documented, f"{name}: {command.target} has no docstring"
        begin = " ".join(documented.split("\n\n")[0].split())
        assert begin == command.help, (
            f"{name}: its documentation begins with {begin!r}, help is {command.help!r}"
        )
        if inspect.isfunction(target):
            typing.get_type_hints(target)  # as the command line reads them
            signature = inspect.signature(target)
            assert signature.return_annotation in (int, "int"), (
                f"{name}: {command.target} does not return an int"
            )
            missing = [key for key in signature.parameters if f"\n{key}\n" not in documented]
            assert not missing, f"{name}: {command.target} does not document {', '.join(missing)}"
