"""The command line: ``train``, ``validate``, ``export``, ``verify`` and others.

The exit status is 0 if all went well, 1 if something failed, 2 if the input is wrong, and 130 after ctrl-C.
Commands import what they need: ``--help``, ``plugins``, ``check`` (except of an engine) and ``doctor``
without a configuration load no torch.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from cyclopts import App, CycloptsError

from grpo_core import commands
from grpo_core.contracts.errors import ConfigError, GrpoError
from grpo_core.plugins.installed import COMMANDS, Commands, find_commands

HELP = "Asynchronous GRPO for language models: domains are plugins, async RL is the core."

ALONE = {"--resume": "latest", "--ray": ""}
"""Values of options that are given without a value."""


def make_app(chosen: str = "", found: Commands | None = None) -> App:
    """Make the command line.

    Args:
        chosen: the command to run: its help is its whole docstring, not one line.
        found: the commands; default: those that are installed.

    Raises ConfigError for a command of ours that is not installed.
    """
    found = found or find_commands(commands)
    if chosen in COMMANDS and chosen not in found.commands:
        raise ConfigError(f"{chosen!r} is not installed; pip install {COMMANDS[chosen]}")
    broken = [f"{plugin} is broken: {plugin.error}" for plugin in found.plugins if plugin.fault]
    app = App(
        name="grpo-core",
        help="\n\n".join([HELP, *broken]),
        version=lambda: __import__("grpo_core").__version__,
        version_flags=["--version"],
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, command in found.commands.items():
        app.command(command.target, name=name, help=None if name == chosen else command.help)
    return app


def plugins(name: str | None = None, /, *, json: bool = False) -> int:
    """List the installed plugins with their offers, or with the reason why a plugin is broken.

    Parameters
    ----------
    name
        Name of the plugin to list, as in "math".  Default: all.
    json
        Print the list as JSON.
    """
    from grpo_core.plugins.host import PluginHost, check_known, listing

    rows = listing(PluginHost.discover(), find_commands(commands))
    if name is not None:
        check_known([name], {row["name"] for row in rows}, "grpo-core plugins")
        rows = [row for row in rows if row["name"] == name]
    if json:
        import json as dumper

        print(dumper.dumps(rows, indent=2))
    else:
        print("\n".join(_describe(row) for row in rows))
    return 0


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the completion of commands and options for a shell.

    Parameters
    ----------
    shell
        The shell to complete in.
    """
    print(make_app().generate_completion(prog_name="grpo-core", shell=shell))
    return 0


def _describe(row: dict[str, Any]) -> str:
    lines = [f"{row['name']}  ({row['distribution']} {row['version']})"]
    if row.get("error"):
        lines.append(f"  broken: {row['error']}")
    if row.get("note"):
        lines.append(f"  note: {row['note']}")
    for kind, names in row.get("offers", {}).items():
        if names:
            lines.append(f"  {kind.replace('_', ' ')}: {', '.join(names)}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line; print errors as one message and exit with their status."""
    from grpo_core.commands import complaints
    from grpo_core.processes.memory import collect_rarely

    collect_rarely()
    complaints.make_log_inert()
    complaints.outlive_terminal()
    status: Any = 1
    try:
        arguments = _with_values(sys.argv[1:])
        app = make_app(arguments[0] if arguments else "")
        status = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:  # already printed
        status = ConfigError.exit_status
    except BrokenPipeError:  # the reader has closed the pipe, as in "| head"
        complaints.drop_output()
    except (GrpoError, OSError) as error:  # OSError: a full disk or a directory without permission
        complaints.complain("\n".join([f"grpo-core: {error}", *getattr(error, "__notes__", [])]))
        status = getattr(error, "exit_status", 1)
    except Exception as error:
        complaints.complain(complaints.unexpected(error))
    sys.exit(status)


def _with_values(arguments: list[str]) -> list[str]:
    """Add the values of ``--resume`` and ``--ray`` where they are given without one."""
    given = []
    for i, argument in enumerate(arguments):
        given.append(argument)
        following = arguments[i + 1] if i + 1 < len(arguments) else "-"
        if argument in ALONE and (following.startswith("-") or following.endswith(".toml")):
            given.append(ALONE[argument])
    return given
