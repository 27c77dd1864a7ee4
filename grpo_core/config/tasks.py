"""The sections of tasks, their data, the sampler and filters."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from grpo_core.config.choices import PluginChoice
from grpo_core.config.idle import WEIGHING, only_with


@frozen(kw_only=True)
class RowOptions:
    """The keys of `data_options` that the core reads; all others are options of the dataloader."""

    prompt: str = ""
    """Field of a row with the prompt, as text or messages.  If it is empty, the first of `prompt`, `messages`
    and `question` that exists is used."""
    answer: str = "answer"
    """Field of a row with the answer."""
    id: str = "id"
    """Field of a row with the id; the default id is the row's number.  All other fields become the prompt's
    `info`."""
    system: str = ""
    """System message before each prompt, unless it is empty."""
    template: str = ""
    """Text that makes the prompt, instead of `prompt`, such as "{{ question }} Answer with a number."; each
    `{{ field }}` is replaced by the field of the row."""
    answer_template: str = ""
    """Text that makes the answer, instead of `answer`."""
    deduplicate: bool = False
    """Keep only the first of several rows with the same messages, for files and lists: their roles, texts and
    calls; white space around a text makes no difference."""
    split: str = ""
    """Split of a data set with the training prompts; the default is "train"."""
    validation_split: str = ""
    """Split of a data set with the held-out prompts; the default is "validation"."""
    exact: bool = True
    """Whether a resumed run has to continue with exactly the next row.  Without it, a stream whose position
    cannot be proved is accepted, and the run says so."""
    repeats: bool = False
    """Whether ids may repeat within an epoch, as with a weighted sampler."""


@frozen(kw_only=True)
class TaskConfig:
    """A named source of prompts: an environment with its options."""

    env: str
    """Name of the environment, as in "math:sort" or "./file.py:Class"."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the environment's factory."""
    weight: float = field(default=1.0, validator=ge(0), metadata=only_with(WEIGHING))
    """Relative share of the prompts, for samplers that weigh tasks."""
    success: float | None = None
    """Smallest reward of a success, which `accuracy` counts; by default the environment's own threshold, if
    it declares one."""
    data: str = ""
    """The prompts: a file (.jsonl, .csv, .tsv, .parquet, .arrow), a directory, a data set "hub:NAME", or a
    dataloader such as "sql:questions" or "./file.py:Questions".  If it is empty, the environment has them."""
    data_options: dict[str, Any] = field(factory=dict, metadata=only_with("data", "validation_data"))
    """How rows become prompts, and options of the dataloader's factory; see docs/sources.md."""
    validation_data: str = ""
    """The held-out prompts, like `data`.  If it is empty, `data` is opened with the split "validation"; if it
    has none, the held-out prompts are the environment's."""
    player: str = ""
    """Name of the player of the rollouts: "turns" of the core, or one of a plugin.  If it is empty, the
    player of agents plays environments that define `run`, and "turns" all others."""
    player_options: dict[str, Any] = field(factory=dict, metadata=only_with("player"))
    """Options of the player's factory."""
    python: str = ""
    """Python interpreter, or directory of a virtual environment, that runs the environment instead of
    `environment.python`."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of this environment's process, in addition to `environment.env_vars`."""


@frozen(kw_only=True)
class SamplerConfig(PluginChoice):
    """The sampler, which chooses the next prompts."""

    name: str = "mix"
    """Name of the sampler, as `grpo-core plugins` lists it, or `./file.py:Name`."""


@frozen(kw_only=True)
class DynamicSamplingConfig:
    """Dynamic sampling replaces groups whose rewards are all equal, because they have no learning signal."""

    enabled: bool = False
    """Train only groups whose rewards differ, and generate others instead of the rest."""
    tolerance: float = field(default=0.0, validator=ge(0), metadata=only_with("enabled"))
    """Rewards of a group are equal if they differ by no more than this."""
    max_extra_groups: int = field(default=0, validator=ge(0), metadata=only_with("enabled", "filters"))
    """The run ends with an error when more groups than this are filtered between two steps.  0 allows 20 for
    each group of a step."""


@frozen(kw_only=True)
class EnvironmentConfig:
    """Rules for calling environments, in training and validation."""

    workers: int | None = field(default=None, validator=optional(ge(1)))
    """Number of workers per environment that share the episodes, on this machine or in a cluster.  An agent's
    start on this machine when the others are busy.  If this is not set, there is 1, and for an agent on this
    machine at most 8."""
    max_batch: int = field(default=256, validator=ge(1))
    """Largest number of episodes in one call."""
    max_wait: float = field(default=0.005, validator=ge(0))
    """Seconds that an episode waits for others to share its call."""
    deadline: float | None = field(default=None, validator=optional(gt(0)))
    """Time limit of a call in seconds.  A late async call is cancelled; if the process does not react, it is
    killed, and each episode is tried alone.  If this is not set, the environment may declare it; the default
    is 30."""
    start_deadline: float = field(default=120.0, validator=gt(0))
    """Time limit in seconds for the start of an environment, and for its prompts."""
    concurrency: int | None = field(default=None, validator=optional(ge(0)))
    """Number of concurrent calls of an async `evaluate`, of tools and of `open` in each worker, each with one
    episode (or one group, if the environment compares rollouts).  The next call starts as soon as one ends.
    0 calls `evaluate` with batches, one after another.  If this is not set, the environment may declare it;
    the default is 0.  It is also the number of rollouts that an agent plays at once in a worker, at least
    one."""
    max_error_rate: float = field(default=0.2, validator=[ge(0), le(1)])
    """The run ends when more than this share of 200 calls have failed among the last 200 of a task, or 20 in
    a row; 1 turns both rules off.  A call judges an episode, or a group if the environment compares rollouts.
    A prompt's first failure is tried again and does not count, unless `rollout.max_retries` is 0."""
    unavailable_for: float = field(default=600.0, validator=gt(0))
    """Seconds that a task waits for a service that does not answer, such as a judge; then the run ends with a
    checkpoint.  Before the service's first answer, it waits 30 seconds at most."""
    python: str = ""
    """Python interpreter (3.11 or newer), or directory of a virtual environment, that runs environments, with
    the packages and plugins that are installed there.  If it is empty, they run in the interpreter of
    grpo-core."""
    agent_host: str = "127.0.0.1"
    """Address of this machine at which agents reach the model; on a cluster, an address in its network."""
    env_vars: dict[str, str] = field(factory=dict)
    """Environment variables of the environments' processes.  `$NAME` or `${NAME}` in a value, as in
    "Bearer $NAME", stands for the variable NAME of this process, so that no file holds a secret; `$$` is a
    dollar sign."""
