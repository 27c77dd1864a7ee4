"""The errors of grpo-core, by who can fix them.

Every message says who, where, what was given, what was expected, and what to do.  The command line
prints the message alone, without a traceback, and exits with ``exit_status``: 1 if something failed, 2 if the
input is wrong.

An error that stands for an exception of an author's code carries it as a ``Fault``, made where it was raised.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import format_exception, walk_tb
from typing import Any, Self

from attrs import field, frozen

from grpo_core.contracts.unicode import well_formed

LONGEST_TRACEBACK = 20_000
"""Largest number of characters of a traceback that is sent or written: a message can contain a whole
batch."""
LONGEST_LINE = 600
"""Largest number of characters of a fault's message in an error."""


def _message(text: str) -> str:
    return str(well_formed(shortened(text)))


def _traceback(text: str) -> str:
    return str(well_formed(shortened(text, LONGEST_TRACEBACK)))


@frozen
class Fault:
    """An exception of an author's code, as text."""

    kind: str
    """Name of the exception's class."""
    message: str = field(converter=_message)
    """Its message; a very long one is shortened."""
    traceback: str = field(default="", converter=_traceback)
    """Its traceback, for logs."""
    where: str = ""
    """The last frame of the author's own code, as in "ok.py:28 in evaluate"; empty if there is none."""

    def __str__(self) -> str:
        message = one_line(self.message, LONGEST_LINE)
        said = f"{self.kind}: {message}" if message else self.kind
        return f"{self.where}: {said}" if self.where else said


class GrpoError(Exception):
    """Base class of all errors that grpo-core raises on purpose.  ``str(error)`` is written for users."""

    exit_status = 1
    fault: Fault | None = None
    """The exception of an author's code behind it."""

    def carrying(self, fault: Fault | None) -> Self:
        """Set the fault; return the error."""
        self.fault = fault
        return self


class ConfigError(GrpoError):
    """A configuration, a command line or a path is wrong."""

    exit_status = 2


class PluginError(GrpoError):
    """A plugin breaks its contract; the message names plugin, distribution and version."""


class SelectionError(PluginError):
    """A name or an option is configured that no plugin has."""

    exit_status = 2


class ModelError(GrpoError):
    """A model or tokenizer cannot be loaded or used."""


class ControlInText(ModelError):  # noqa: N818 - reads as what happened
    """A text spells a control token, and would be read as that token."""


class CheckpointError(GrpoError):
    """A checkpoint cannot be written or is damaged."""


class EngineError(GrpoError):
    """An engine cannot generate; the rollouts that it held are played again."""


class WeightSyncError(GrpoError):
    """An engine did not load the weights that it was sent."""


class TrainerError(GrpoError):
    """A training step failed."""


class DataPlaneError(GrpoError):
    """Tokens of finished rollouts cannot be kept, or are lost."""


class TrackingError(GrpoError):
    """A tracker that the run needs failed, such as the one that writes its files."""


class SamplingError(GrpoError):
    """Too few of the generated groups have a learning signal."""


class CodeError(GrpoError):
    """Raised in place of an exception of an author's code, whose class another process may not have."""

    @classmethod
    def of(cls, error: BaseException, mask: Callable[[str], str] = str) -> CodeError:
        """Return the error for an exception; ``mask`` hides secrets."""
        return cls(with_place(error, mask)).carrying(fault_of(error, mask))


class DeadlineExceeded(GrpoError):  # noqa: N818 - reads as what happened
    """An operation took longer than its deadline."""


class Unavailable(GrpoError):  # noqa: N818
    """Raised where a service does not answer, such as the judge of an environment.

    Its calls wait until it answers again; nothing is scored meanwhile, and no attempt is counted.

    Args:
        retry_after: seconds to wait before the next call, if the service gave them.
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.timed_out = False
        """Whether the call timed out, perhaps because of its request; the core sets it."""


class SessionLost(GrpoError):  # noqa: N818
    """Raised by a tool whose session is gone: its rollout is unscored, and is played again from its start."""


class ChildDied(GrpoError):  # noqa: N818
    """A child process ended before it answered."""


class SlotError(GrpoError):
    """A transition that the state of the buffer does not allow."""


@contextmanager
def plugin_errors(who: str, told: str = "") -> Iterator[None]:
    """Convert exceptions of a plugin's code to a PluginError that names the plugin.

    Args:
        who: the plugin's part.
        told: the end of the message.
    """
    try:
        yield
    except GrpoError:
        raise
    except Exception as error:
        fault = fault_of(error)
        raise PluginError(f"{who} raised {fault}{told}").carrying(fault) from error


@contextmanager
def wrong_input() -> Iterator[None]:
    """Give errors of checks that run before any work the exit status of wrong input."""
    try:
        yield
    except GrpoError as error:
        error.exit_status = ConfigError.exit_status
        raise


def describe(error: BaseException) -> str:
    """The message of a GrpoError; for other exceptions the type and the shortened message."""
    said = message_of(error)
    text = said if isinstance(error, GrpoError) else shortened(f"{type(error).__name__}: {said}")
    described: str = well_formed(text)
    return described


def with_place(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """As ``describe``, with the last frame of the author's code; ``mask`` hides secrets."""
    return mask(message_of(error)) if isinstance(error, GrpoError) else str(fault_of(error, mask))


def message_of(error: BaseException) -> str:
    """The message of an exception, also of one whose ``__str__`` raises."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its __str__ raised {type(failure).__name__})"


def fault_of(error: BaseException, mask: Callable[[str], str] = str) -> Fault:
    """Return the fault that an error carries, or else a description of the error itself.

    ``mask`` hides secrets.
    """
    carried = error.fault if isinstance(error, GrpoError) else getattr(error.__cause__, "fault", None)
    if isinstance(carried, Fault):
        return carried
    return Fault(type(error).__name__, mask(message_of(error)), traceback_of(error, mask), _place(error))


_CORE, _PYTHON = __file__.rpartition("contracts/")[0], reprlib.__file__.rpartition("/")[0] + "/"
_COMPREHENSION = re.compile(r"(\.<locals>)?\.<(list|dict|set)comp>|(\.<locals>)?\.<genexpr>")
"""Frames of Python 3.11 within the function that an author wrote."""
_CODE = ("<stdin>", "<string>", "<ipython")
"""Names of code without a file that an author wrote."""


def _library(file: str) -> str:
    """Return the installed package of a file, or "" for a file of an author."""
    for place in ("site-packages", "dist-packages"):
        _, inside, rest = file.rpartition(f"/{place}/")
        if inside:
            return rest.partition("/")[0]
    if file.startswith(_CORE):
        return "grpo_core"
    if file.startswith(_PYTHON) or (file.startswith("<") and not file.startswith(_CODE)):
        return "stdlib"
    return ""


def _place(error: BaseException) -> str:
    """Format the last frame of an author's code; an installed plugin's only if no other author's is there."""
    frames = [
        (_library(frame.f_code.co_filename), frame, line) for frame, line in walk_tb(error.__traceback__)
    ]
    libraries = [library for library, *_ in frames if library not in ("grpo_core", "stdlib")]
    author = "" if "" in libraries else next(iter(libraries), None)
    for library, frame, line in reversed(frames):
        if library == author:
            file = frame.f_code.co_filename.rpartition("/")[2]
            name = _COMPREHENSION.sub("", frame.f_code.co_qualname).rpartition(".")[2]
            return f"{file}:{line} in {name}"
    return ""


def traceback_of(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """The traceback of an error, in which each long message is shortened; ``mask`` hides secrets."""
    return shortened("".join(shortened(mask(part)) for part in format_exception(error)), LONGEST_TRACEBACK)


def shown(value: Any) -> str:
    """Format a plugin's value for a message: the beginning of its ``repr``, which may be long or raise."""
    try:
        return shortened(_SHORT.repr(value), 200)
    except Exception as failure:
        return f"<{type(value).__name__}: its repr raised {type(failure).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shortened(text: str, most: int = 2000) -> str:
    """Cut a text with more than ``most`` characters: a line at its end, a longer text in its middle."""
    if len(text) <= most:
        return text
    if most < 500:
        return f"{text[: most - 1]}…"
    return f"{text[: most // 2]} [... {len(text) - most:,} characters ...] {text[-most // 2 :]}"


def one_line(said: object, most: int = 300) -> str:
    """The beginning of a text, or of an error's message that grpo-core did not write, as one line.

    Torch appends advice and stacks of C++ to its messages; the traceback has all of it.
    """
    return shortened(" ".join(str(said).split()), most)


_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "failed to allocate",
)
"""Lower-case texts in libraries' out-of-memory errors that are not a MemoryError."""


def out_of_memory(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error: this one, its cause, or one of its group; None if there is none."""
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, MemoryError) or any(said in str(each).lower() for said in _NO_MEMORY):
            return each
        pending += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        pending += each.exceptions if isinstance(each, BaseExceptionGroup) else []
    return None


ALIASES = {
    "learning_rate": "trainer.lr",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "beta": "loss.options.kl.coefficient",
    "kl_coef": "loss.options.kl.coefficient",
    "max_steps": "trainer.steps",
    "gradient_checkpointing": "trainer.activations",
    "num_train_epochs": "trainer.epochs",
    "per_device_train_batch_size": "trainer.prompts_per_step",
    "loss_type": "loss.name",
    "epsilon": "loss.options.clip_low",
    "use_vllm": "engine.name",
    "report_to": "tracking.trackers",
    "reward_funcs": "reward",
    "train_dataset": "data",
    "strategy": "validation.name",
}
"""Keys of other libraries, and their names here."""


def did_you_mean(given: str, known: list[str] | tuple[str, ...] | set[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest of ``known``, or an empty string."""
    from difflib import get_close_matches

    meant = ALIASES.get(given, "").split(".")
    swapped = [name for name in sorted(known) if name in meant or sorted(name) == sorted(given)]
    near = swapped or get_close_matches(given, sorted(known), n=1, cutoff=0.65)
    return f" Did you mean {near[0]!r}?" if near else ""
