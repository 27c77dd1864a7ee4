"""What can go wrong, and whose turn it is.

    GrpoError
    ├── ConfigError          you: a configuration, a command line, a path
    ├── PluginError          a plugin breaks its contract; names plugin, distribution, version, fault
    │   └── SelectionError   you: a name or an option that no plugin has
    ├── ModelError           a model or tokenizer cannot be loaded or used
    ├── CheckpointError      a checkpoint cannot be written or is not what was written
    ├── EngineError          an engine cannot generate; the rollouts it held are played again
    ├── WeightSyncError      an engine does not hold the weights that it was sent
    ├── TrainerError         a training step failed
    ├── SamplingError        too few of the groups that were generated have anything to teach
    ├── DeadlineExceeded     something took longer than it may
    ├── ChildDied            a child process ended before it answered
    └── SlotError            the buffer was asked for a transition that its state does not allow

Every message says who, where, what was given, what was expected, and what to do.  The command line
prints the message alone, without a traceback, and exits with ``exit_status``.
"""


class GrpoError(Exception):
    """Base of all errors that grpo-core raises on purpose.  ``str(error)`` is for the user's eyes."""

    exit_status = 1


class ConfigError(GrpoError):
    exit_status = 2


class PluginError(GrpoError):
    pass


class SelectionError(PluginError):
    exit_status = 2


class ModelError(GrpoError):
    pass


class CheckpointError(GrpoError):
    pass


class EngineError(GrpoError):
    pass


class WeightSyncError(GrpoError):
    pass


class TrainerError(GrpoError):
    pass


class SamplingError(GrpoError):
    pass


class DeadlineExceeded(GrpoError):  # noqa: N818 - reads as what happened
    pass


class ChildDied(GrpoError):  # noqa: N818
    pass


class SlotError(GrpoError):
    pass


def did_you_mean(given: str, known: "list[str] | tuple[str, ...] | set[str]") -> str:
    """``" Did you mean 'x'?"`` for the nearest of ``known``, or an empty string."""
    from difflib import get_close_matches

    near = get_close_matches(given, sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
