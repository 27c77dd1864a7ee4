"""The command line: ``train``, ``validate``, ``export``, ``verify``, ``report``, ``check`` and others.

The exit status is 0 if all went well, 1 if something failed, 2 if the input is wrong, and 130 after ctrl-C.
Commands import what they need: ``--help``, ``plugins``, ``check`` (except of an engine) and ``doctor``
without a configuration load no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from grpo_core.cli_planning import simulate, whatif
from grpo_core.cli_runs import runs

ALONE = {"--resume": "latest", "--ray": ""}
"""Values of options that are given without one."""
app = App(
    name="grpo-core",
    help="Asynchronous GRPO for language models: domains are plugins, async RL is the core.",
    version=lambda: __import__("grpo_core").__version__,
    version_flags=["--version"],
    help_format="plaintext",
)
app.command(runs)
app.command(simulate)
app.command(whatif)


@app.command
def train(
    config: Path | None = None,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    sampler: str | None = None,
    validation: str | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    output: Path | None = None,
    resume: str | None = None,
    until: str | None = None,
    profile: int | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    ray: str | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Train a model with asynchronous GRPO.

    Parameters
    ----------
    config
        A TOML file; every key has a default, which `grpo-core config` prints.
    env
        Environment to train on, as "math:sort" or "./file.py:Class"; may be repeated.
    sampler
        Sampler that chooses the next prompts.
    validation
        Validation strategy for held-out prompts.
    engine
        Engine that generates completions.
    set_
        Set a configuration key, as in "trainer.lr=1e-4"; may be repeated.
    output
        Directory of the run, which must be empty or new.  Default: runs/NAME.
    resume
        Continue the run in this directory.  Without a value, continue the latest run in runs/.
    until
        End the run with a checkpoint before this time, as in "18:30" or "2026-11-23T07:00".
    profile
        Time this many steps after the first two, trace as many more, and print where the time of every
        process went.
    quiet
        Print warnings, what the run survived, and its summary only.
    json
        Print events as JSON, one a line, on standard output, and everything else on standard error.
    ray
        Run engines and environments on the Ray cluster at this address ("auto", "host:6379").  Without a
        value, start a local cluster for this run.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import running
    from grpo_core.errors import ConfigError

    if quiet and json:
        raise ConfigError("--quiet and --json: leave one of them out")
    chosen = {"sampler": sampler, "validation": validation, "engine": engine}
    settings = [
        *(set_ or []),
        *([] if until is None else [running.time_limit(until)]),
        *([] if profile is None else [f"trainer.profile={profile}"]),
        *(['tracking.terminal.view="quiet"'] if quiet else []),
        *(['tracking.terminal.view="json"'] if json else []),
    ]
    return running.train(
        config_file=config,
        envs=env or [],
        chosen={section: name for section, name in chosen.items() if name is not None},
        settings=settings,
        output=output,
        resume=resume,
        ray=ray,
        block=no_plugin or [],
    )


@app.command
def validate(
    model: str,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    only: Annotated[list[str] | None, Parameter(negative="")] = None,
    validation: str | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    output: Path | None = None,
    json: bool = False,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Validate a model, or the newest checkpoint of a run, on held-out prompts.

    Parameters
    ----------
    model
        Directory of a run or of a model, or a hub id.
    env
        Environment to validate on, as "math:sort"; may be repeated.  Default: the tasks and validation sets
        of the run.
    only
        Task or validation set of the run to measure; may be repeated.  Default: all.
    validation
        Validation strategy for the prompts.  Default: the strategy of the run.
    engine
        Engine that generates completions.  Default: the engine of the run's validation.
    set_
        Set a configuration key, as in "validation.prompts=1000"; may be repeated.
    output
        Directory for the results and the rollouts.  Default: RUN/validated/DATE, or
        runs/TASKS-validated-DATE for a model.
    json
        Print the results as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import running

    chosen = {"validation": validation, "engine": engine}
    return running.validate(
        target=model,
        envs=env or [],
        chosen={section: name for section, name in chosen.items() if name is not None},
        settings=set_ or [],
        only=only or [],
        output=output,
        as_json=json,
        block=no_plugin or [],
    )


@app.command
def export(
    run: Path,
    *,
    step: int | None = None,
    output: Path | None = None,
    merged: Annotated[bool, Parameter(negative="")] = False,
    adapters: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a checkpoint of a run as a directory for transformers or peft, with a model card.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step of the checkpoint.  Default: the newest one.
    output
        Directory that is written, which must not exist.  Default: RUN/exported/step-STEP.
    merged
        Add the adapters of a run with LoRA to the weights of its model.
    adapters
        Write the adapters of a run with LoRA alone; this is the default for such a run.
    """
    from grpo_core.commands import export as exporting

    return exporting.main(run, step=step, output=output, merged=merged, adapters=adapters)


@app.command
def score(
    stored: Path,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    step: Annotated[list[int] | None, Parameter(negative="")] = None,
    validation: Annotated[bool, Parameter(negative="")] = False,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    output: Path | None = None,
    json: bool = False,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Judge stored rollouts again, as after a correction of a reward, and show what changes.

    The exit status is 1 if rollouts could not be judged.

    Parameters
    ----------
    stored
        Directory of a run, or one of its files of rollouts, as in "runs/a/rollouts/step-000120.jsonl.gz".
    env
        Another environment that judges, as in "sort=./fixed.py:Sort" for the task "sort", or without a task
        for all; may be repeated.  Default: the environments of the run as they are now.
    step
        Step whose rollouts are judged; may be repeated.  Default: all steps.
    validation
        Judge the rollouts of the validations, not those of training.
    set_
        Set a configuration key, as in "tasks.sort.options.length=3"; may be repeated.
    output
        Directory for the judgements.  Default: RUN/scored/DATE.
    json
        Print the differences as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import score as scoring

    return scoring.main(
        stored,
        envs=env or [],
        steps=step or [],
        validation=validation,
        settings=set_ or [],
        output=output,
        as_json=json,
        block=no_plugin or [],
    )


@app.command
def verify(run: Path) -> int:
    """Check the events of a run: no prompt was lost, trained twice, or trained too late.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core.commands import running

    return running.verify(directory=run)


@app.command
def replay(
    run: Path,
    *,
    step: int,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Compute a step of a run again from its files, and compare it bit for bit with what the run recorded.

    It needs no engine and no environment.  The exit status is 1 if something differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed again, from 1; those between it and the checkpoint before it are as well.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import replay as replaying

    return replaying.main(run, step=step, block=no_plugin or [])


@app.command
def fork(
    run: Path,
    *,
    step: int,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    scored: Path | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Compute a step of a run again with another loss, learning rate or advantage, and show what differs.

    Parameters
    ----------
    run
        Directory of the run.
    step
        Step that is computed twice from the same weights and rollouts: as it was, and with the changes.
    set_
        Set a configuration key for this step, as in "trainer.lr=1e-4"; may be repeated.
    scored
        Directory that grpo-core score has written: the step has the rewards in it.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import fork as forking

    return forking.main(run, step=step, settings=set_ or [], scored=scored, block=no_plugin or [])


@app.command
def bisect(run_a: Path, run_b: Path) -> int:
    """Find the first step, and there the first value, at which two runs differ.

    It reads what both runs have stored and computes nothing.  The exit status is 1 if they differ.

    Parameters
    ----------
    run_a
        Directory of one run.
    run_b
        Directory of the other run.
    """
    from grpo_core.commands import bisect as comparing

    return comparing.main(run_a, run_b)


@app.command
def watch(directory: Path, *, port: int = 0, refresh: int = 15) -> int:
    """Show the report of a run in a browser while the run goes on.

    The page is served on the loopback address, until ctrl-C.

    Parameters
    ----------
    directory
        Directory of the run.
    port
        Port of the page.  0 is any free one.
    refresh
        Seconds after which the page is loaded again while the run goes on.  0 is never.
    """
    import asyncio

    from grpo_core.commands import watch as live

    asyncio.run(live.watch(directory, port=port, refresh=refresh))
    return 130


@app.command
def report(run: Path) -> int:
    """Write report.html for a finished, running or killed run.

    Parameters
    ----------
    run
        Directory of the run.
    """
    from grpo_core.commands import running

    return running.report(directory=run)


@app.command
def check(
    name: str,
    *,
    kind: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    task: Annotated[list[str] | None, Parameter(negative="")] = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Check that an environment, or any other offer of a plugin, keeps its contract.

    Parameters
    ----------
    name
        Name of the offer, as "math:sort" or "./file.py:Class".
    kind
        Kind of the offer, if the name is ambiguous: environment, sampler, validation_strategy, engine,
        loss, advantage, filter, tracker, trainer, optimizer, model, data_plane or placement.
    set_
        Set an option of the offer, as in "length=3"; may be repeated.
    task
        Name of a task for a sampler; may be repeated.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import check

    return check.main(name, kind=kind, settings=set_ or [], tasks=task or [], block=no_plugin or [])


@app.command
def audit(
    name: str,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    prompts: int = 24,
    seconds: float = 60.0,
    seed: int = 0,
    model: str | None = None,
    engine: str | None = None,
    json: Path | None = None,
    html: Path | None = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Find out whether the rewards of an environment mean anything: what is paid, and what should not be.

    The exit status is 1 if a check failed.

    Parameters
    ----------
    name
        Name of the environment, as "math:sort" or "./file.py:Class".
    set_
        Set an option of the environment, as in "length=3"; may be repeated.
    prompts
        Largest number of prompts that are played.
    seconds
        Time that the audit may take, about; a slow environment plays fewer prompts.
    seed
        Seed of the replies that are tried.
    model
        Model that plays groups of rollouts at the end, to see how many would teach it: a directory, a hub
        id, a name as "tiny", or the directory of a run.
    engine
        Engine of this model.
    json
        File for the quality card as JSON.
    html
        File for the quality card as one page.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.audit.audit import Extent
    from grpo_core.audit.training import PlayingModel
    from grpo_core.commands import auditing
    from grpo_core.errors import ConfigError

    if engine is not None and model is None:
        raise ConfigError("--engine is for a model that plays: add --model")
    return auditing.main(
        name,
        extent=Extent(prompts=prompts, seconds=seconds, seed=seed),
        model=None
        if model is None
        else PlayingModel(target=model, engine=engine, prompts=prompts, seed=seed),
        settings=set_ or [],
        json_file=json,
        html_file=html,
        block=no_plugin or [],
    )


@app.command(name="try")
def try_(
    name: str,
    *,
    model: str | None = None,
    run: Path | None = None,
    prompt: str | None = None,
    prompts: int = 1,
    split: Literal["train", "validation"] = "train",
    seed: int = 0,
    temperature: float | None = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Play against an environment in the terminal, or let a model play and show all that happens.

    Replies are typed, or are the lines of standard input.

    Parameters
    ----------
    name
        Name of the environment, as "math:sort" or "./file.py:Class"; with --run also a task of the run.
    model
        Directory, hub id or name of a model that plays, as in "tiny".
    run
        Directory of a run whose newest checkpoint plays.
    prompt
        Id of the prompt.  Default: the first one.
    prompts
        Number of prompts that are played one after another.
    split
        Prompts to play: those for training, or those for validation.
    seed
        Seed of a model that plays.
    temperature
        Sampling temperature of a model that plays.  Default: as in training.
    engine
        Engine of a model that plays.
    set_
        Set an option of the environment, as in "length=3"; may be repeated.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import trying
    from grpo_core.errors import ConfigError

    if model is not None and run is not None:
        raise ConfigError("--model and --run: one of them plays; leave the other one out")
    choice = trying.Choice(split=split, prompt=prompt, prompts=prompts, seed=seed, temperature=temperature)
    return trying.main(
        name,
        target=model if run is None else str(run),
        engine=engine,
        choice=choice,
        settings=set_ or [],
        block=no_plugin or [],
    )


@app.command
def new(
    kind: Literal[
        "environment",
        "agent",
        "sampler",
        "validation",
        "engine",
        "loss",
        "advantage",
        "filter",
        "tracker",
    ],
    name: str,
    *,
    multi_turn: Annotated[bool, Parameter(negative="")] = False,
    tools: Annotated[bool, Parameter(negative="")] = False,
    judge: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a new plugin into the directory grpo-plugin-NAME: code, a test, and what a package needs.

    Parameters
    ----------
    kind
        Kind of the offer that the plugin makes.
    name
        Name of the plugin and of what it offers, as in "caesar" or "word_count".
    multi_turn
        Make an environment of several turns.
    tools
        Make an environment with a tool.
    judge
        Make an environment whose replies another model judges.
    """
    from grpo_core.commands import scaffold

    return scaffold.main(kind, name, {"multi_turn": multi_turn, "tools": tools, "judge": judge})


@app.command
def doctor(
    config: Path | None = None,
    *,
    env: Annotated[list[str] | None, Parameter(negative="")] = None,
    engine: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    json: bool = False,
    no_plugin: Annotated[list[str] | None, Parameter(name="--no-plugin", negative="")] = None,
) -> int:
    """Look at this machine, and estimate the memory that a run takes; start nothing.

    The exit status is 1 if something would stop a run.

    Parameters
    ----------
    config
        A TOML file, as for "train".  Without it and the options, only the machine is looked at.
    env
        Environment to train on, as "math:sort"; may be repeated.
    engine
        Engine that generates completions.
    set_
        Set a configuration key, as in "trainer.tokens_per_microbatch=4096"; may be repeated.
    json
        Print what was found as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    from grpo_core.commands import doctor as machine

    return machine.main(
        config,
        envs=env or [],
        chosen={} if engine is None else {"engine": engine},
        settings=set_ or [],
        as_json=json,
        block=no_plugin or [],
    )


@app.command
def plugins(*, json: bool = False) -> int:
    """List the installed plugins with their offers, or with the reason why a plugin is broken.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from grpo_core.plugins.host import PluginHost, listing

    rows = listing(PluginHost.discover())
    if json:
        import json as dumper

        print(dumper.dumps(rows, indent=2))
    else:
        print("\n".join(_describe(row) for row in rows))
    return 0


@app.command(name="config")
def config_(
    *section: str, set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None
) -> int:
    """Print the keys of the configuration with their defaults and meanings, as a TOML file for `train`.

    Parameters
    ----------
    section
        A section, as in "trainer"; may be repeated.  Default: all.
    set_
        Set a configuration key, as in "model.path=my-model", which may change defaults; may be repeated.
    """
    from grpo_core.commands import defaults

    return defaults.main(section, set_ or [])


@app.command
def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the completion of commands and options for a shell.

    Parameters
    ----------
    shell
        The shell that reads it.
    """
    print(app.generate_completion(prog_name="grpo-core", shell=shell))
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
    from grpo_core.complaints import complain, make_log_inert, unexpected
    from grpo_core.errors import ConfigError, GrpoError

    make_log_inert()
    try:
        arguments = _with_values(sys.argv[1:])
        status = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:  # it is printed already
        status = ConfigError.exit_status
    except (GrpoError, OSError) as error:  # OSError: a full disk or a directory without permission
        complain("\n".join([f"grpo-core: {error}", *getattr(error, "__notes__", [])]))
        status = error.exit_status if isinstance(error, GrpoError) else 1
    except KeyboardInterrupt:
        print("grpo-core: interrupted", file=sys.stderr)
        status = 130
    except Exception as error:
        complain(unexpected(error))
        status = 1
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
