"""Hints: texts that only a score in the hinted context reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from test_pipeline import Run
from test_trainer import batch, ragged, row, scores, setup, weights

from grpo_core.app.make import make
from grpo_core.config import LossConfig, RowOptions, ScoreConfig, build
from grpo_core.contracts.errors import ConfigError, ControlInText, PluginError, TrainerError
from grpo_core.contracts.events import GroupsReady, StepEnded, WarningRaised
from grpo_core.contracts.records import Feedback, Group, Prompt, Rollout, Row, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.data.rows import RowReader, plain
from grpo_core.demo import tiny
from grpo_core.environments.feedback import as_feedback
from grpo_core.loop.dynamic import equal_rewards
from grpo_core.loop.hints import Hints, with_hint
from grpo_core.loop.rows import make_batch, with_advantages
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.stored import groups_in, texts, tokens
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, run
from grpo_core.training.batching import in_hinted_context
from grpo_core.training.microbatch import collate
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_algorithms.filters import pass_rate
from grpo_plugin_algorithms.hints import RightRollout, chosen_hints

CPU = torch.device("cpu")
SPLIT = [{"role": "system", "content": "be good. "}, {"role": "user", "content": "1+1="}]


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def text(token_ids: Any) -> str:
    return "".join(map(chr, token_ids))


def segment(prompt: str, reply: str) -> Segment:
    n = len(reply)
    return Segment(prompt_ids=ids(prompt), tokens=Tokens.generated(ids(reply), (-1.0,) * n, (0,) * n))


def rollout(reply: str = "3", reward: float = 0.0, **more: Any) -> Rollout:
    said = {"role": "assistant", "content": reply}
    chosen = {"segments": (segment("be good. 1+1=", reply),), "messages": (*SPLIT, said)} | more
    return Rollout(reward=reward, **chosen)


def group(*rollouts: Rollout) -> Group:
    prompt = Prompt(messages=SPLIT, environment="task")
    return Group(prompt=prompt, rollouts=rollouts, generation_version=0, target_version=0)


def hinted(given: Group, *, renderer: Any = None, **options: Any) -> tuple[Group, dict[str, float]]:
    hints = Hints(choose=lambda its: [each.hint for each in its.rollouts], who="loss", **options)
    return run(hints.added(given, renderer or FakeRenderer())), hints.read()


# ---------------------------------------------------------------------------------- the hinted context


def test_a_hint_stands_before_the_question_and_everything_after_it_stays() -> None:
    found, counts = hinted(group(rollout(hint="it is 2")))
    (its,) = make_batch(with_advantages([found], lambda groups: [[0.0]]), step=0, temperature=1.0).rows
    assert text(its.prompt_ids) == "be good. 1+1="
    context = in_hinted_context(its)
    assert context is not None
    assert text(context.prompt_ids) == "be good. it is 2\n\n1+1="
    assert context.tokens is its.tokens
    assert counts == {"hints": 1.0, "hints_cut": 0.0, "hints_left_out": 0.0, "hints_quoted": 0.0}
    assert [m["role"] for m in with_hint(SPLIT, "h", "message")] == ["system", "user", "user"]
    assert with_hint([], "h", "user") == ({"role": "user", "content": "h\n\n"},)


def test_later_segments_begin_with_the_hint_as_well_and_one_that_begins_otherwise_has_none() -> None:
    later = segment("be good. 1+1=3 no. again:", "2"), segment("another beginning", "2")
    given = rollout(hint="it is 2", segments=(segment("be good. 1+1=", "3"), *later))
    found, _ = hinted(group(given))
    rows = make_batch(with_advantages([found], lambda groups: [[1.0]]), step=0, temperature=1.0).rows
    contexts = [in_hinted_context(each) for each in rows]
    assert contexts[1] is not None
    assert text(contexts[1].prompt_ids) == "be good. it is 2\n\n1+1=3 no. again:"
    assert contexts[2] is None
    assert [each.tokens for each in rows] == [each.tokens for each in given.segments]


@pytest.mark.parametrize(
    ("options", "context", "beginning", "counts"),
    [
        ({"max_tokens": 6}, 2**31, "be good. is 2\n\n1+1=", (1, 1, 0, 0)),
        ({}, 20, "be good. is 2\n\n1+1=", (1, 1, 0, 0)),
        ({"max_tokens": 2}, 2**31, "", (0, 0, 1, 0)),
        ({}, 14, "", (0, 0, 1, 0)),
    ],
    ids=["cut", "cut for the model", "too short", "no room"],
)
def test_a_long_hint_loses_its_beginning_and_then_itself(
    options: dict[str, Any], context: int, beginning: str, counts: tuple[int, int, int, int]
) -> None:
    renderer = FakeRenderer()
    renderer.context = context
    found, said = hinted(group(rollout(hint="it is 2")), renderer=renderer, **options)
    assert tuple(said.values()) == counts
    assert text(found.rollouts[0].hint_ids) == beginning.removesuffix("1+1=")
    assert found.rollouts[0].hint == "it is 2"


def test_a_hint_that_spells_a_control_token_and_a_prompt_of_an_agent_are_left_out() -> None:
    class Strict(FakeRenderer):
        def prompt_ids(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
            if "<|end|>" in str(messages):
                raise ControlInText("a text spells <|end|>")
            return super().prompt_ids(messages, tools)

    agents = rollout(hint="it is 2", segments=(segment("what an agent wrote", "3"),))
    found, counts = hinted(group(rollout(hint="<|end|>"), agents), renderer=Strict())
    assert counts["hints_left_out"] == 2
    assert not any(each.hint_ids for each in found.rollouts)


def test_wrong_replies_that_quote_their_hint_are_counted() -> None:
    saying = "as the hint says, it is 2"
    its = group(rollout(saying, hint="it is 2\n"), rollout(saying, hint="it says: it is 2"))
    assert hinted(its)[1]["hints_quoted"] == 0
    its = group(*(rollout(saying, reward, hint="no: it\nthe hint says, it") for reward in (0.0, 1.0)))
    assert hinted(its)[1]["hints_quoted"] == 1


def test_what_a_loss_chooses_is_checked() -> None:
    hints = Hints(choose=lambda its: [3], who="the loss")  # type: ignore[list-item]
    with pytest.raises(PluginError, match=r"the loss: hints \[3\]; expected a text or None"):
        run(hints.added(group(rollout()), FakeRenderer()))


def test_a_hint_is_stored_with_its_rollout(tmp_path: Path) -> None:
    found, _ = hinted(group(rollout(hint="it is 2", tools=({"name": "f"},))))
    (tmp_path / "step-000001.jsonl").write_bytes(texts([found]))
    (tmp_path / "step-000001.safetensors").write_bytes(tokens([found]))
    (again,) = groups_in(tmp_path / "step-000001.jsonl")
    (its,) = again.rollouts
    assert (its.hint, its.hint_ids) == ("it is 2", found.rollouts[0].hint_ids)
    assert its.tools == ()


# ---------------------------------------------------------------------------------- in a run


def a_run(hint: str | None, **changes: Any) -> Run:
    def feedback(episode: Any) -> Feedback:
        return Feedback(reward=0.0, hint=hint)

    seen: list[str] = []

    def reply(request: Any, rng: Any) -> str:
        seen.append(text(request.prompt_ids.tolist()))
        return rng.choice("ab")

    made = Run(environment=FakeEnvironment(feedback), engine=FakeEngine(reply=reply), steps=2, **changes)
    made.seen = seen
    return made


def test_a_run_trains_hinted_rollouts_without_an_advantage_and_shows_no_hint_to_the_engine() -> None:
    hints = Hints(choose=lambda its: [each.hint for each in its.rollouts], who="loss")
    made = a_run("the secret", hints=hints, needs_hints=True)
    made.stream.prompts = [attrs.evolve(each, hint="known before") for each in made.stream.prompts]
    made()
    rows = [each for one in made.trainer.batches for each in one.rows]
    assert len(rows) == 2 * 4 * 4
    assert all("secret" in text(each.hint_ids) for each in rows)
    groups = [one for event in made.of(GroupsReady) for one in event.groups]
    shown = [text(part.prompt_ids) for one in groups for each in one.rollouts for part in each.segments]
    written = [text(each.prompt_ids) for each in rows]
    assert not any("secret" in each or "known" in each for each in (*made.seen, *shown, *written))
    assert made.of(StepEnded)[0].metrics["hints"] >= 16
    assert not made.of(WarningRaised)


def test_hints_that_the_loss_ignores_are_said_once() -> None:
    made = a_run("the secret")()
    (said,) = [event.message for event in made.of(WarningRaised) if event.cause == "hints"]
    assert "from which the loss does not learn" in said
    assert not any(len(each.hint_ids) for one in made.trainer.batches for each in one.rows)


def test_a_loss_of_hints_in_a_run_without_any_ends_after_the_first_step() -> None:
    hints = Hints(choose=lambda its: [each.hint for each in its.rollouts], who="loss")
    with pytest.raises(ConfigError, match="no rollout of step 1 had one: the environments of task set"):
        a_run(None, hints=hints, needs_hints=True)()


# ---------------------------------------------------------------------------------- what is no hint


def test_a_hint_that_is_no_text_is_one_error() -> None:
    for kind in (Feedback, partial(Prompt, messages="q")):
        with pytest.raises(TypeError, match=r"hint is 3 \(int\); expected a text or None"):
            kind(hint=3)
    (found,) = as_feedback([Feedback(reward=1.0, hint="\ud800")], 1, "env")
    assert found.hint == "\ufffd"
    reader, row = RowReader("task", "rows", RowOptions()), Prompt(messages="q", hint="x")
    made = reader.prompt(row, reader.fields(row, 0), 0)
    assert (made.hint, plain(made)["hint"]) == ("x", "x")


def test_a_trainer_that_does_not_score_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def __init__(self, setup): ...\n")
    tables = {"trainer": {"name": f"{file}:Mine"}, "loss": {"name": "self_distillation"}}
    config = build([{"tasks": {"sort": {"env": "math:sort"}}}, tables])
    with pytest.raises(ConfigError, match=r"needs scores.hinted by the weights 'start', and trainer.name"):
        make(config, PluginHost.discover())


# ---------------------------------------------------------------------------------- the trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    return str(directory)


def taught(model: str, options: dict[str, Any] | None = None, **given: Any) -> TorchTrainer:
    made = setup(model, **{"proximal": "generation", **given})
    return TorchTrainer(attrs.evolve(made, loss=LossConfig(name="self_distillation", options=options or {})))


def with_hint_before(rows: list[Row], hint: str) -> list[Row]:
    """Every second row has a hint before its prompt; the first of them is in a later segment."""
    return [
        attrs.evolve(
            each, hint_prefix=each.prompt_ids[:1], hint_ids=(*tiny.encode(hint), *each.prompt_ids[:1])
        )
        if i % 2
        else each
        for i, each in enumerate(rows)
    ]


@pytest.mark.parametrize("options", [{}, {"packing": False, "tokens_per_microbatch": 24}])
def test_hinted_rows_learn_from_their_score_and_the_others_from_rewards(
    model: str, options: dict[str, Any]
) -> None:
    rows = scores(model, ragged())
    given = with_hint_before(rows, "abc")
    contexts = [in_hinted_context(each) for each in given]
    assert [each is None for each in contexts] == [True, False] * 4

    def advantages(mine: Row, context: Row | None) -> Row:
        if context is None:
            return mine
        (hinted,) = scores(model, [context])
        difference = (hinted.tokens.logprobs - mine.tokens.logprobs)[mine.tokens.sampled]
        return attrs.evolve(mine, token_advantages=difference.clip(-0.01, 0.01).astype(np.float32))

    expected = [advantages(mine, context) for mine, context in zip(rows, contexts, strict=True)]
    trainer, other = taught(model, {"clip": 0.01}, **options), TorchTrainer(setup(model, **options))
    metrics = trainer.step(batch(given)).metrics
    other.step(batch(expected))
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, weights(other)[name], rtol=1e-3, atol=1e-5)
    share = sum(each.tokens.n_sampled for each in rows[1::2]) / sum(each.tokens.n_sampled for each in rows)
    assert metrics["hinted"] == pytest.approx(share)


def test_the_gradient_reads_the_prompt_without_the_hint(model: str) -> None:
    (given,) = with_hint_before([row("a", "b"), row("ab", "cd")], "fgh")[1:]
    micro = collate([given], CPU)
    assert micro.input_ids.tolist()[0] == [*tiny.encode("ab"), *tiny.encode("c")]
    trainer = taught(model)
    read: list[Any] = []
    trained, start = trainer.model.policy.module, trainer.model.kept["start"].module
    for module in (trained, start):
        for each in (module, module.base_model):
            each.register_forward_pre_hook(
                lambda module, args, named: (
                    read.append((torch.is_grad_enabled(), named["input_ids"].numel()))
                    if "input_ids" in named
                    else None
                ),
                with_kwargs=True,
            )
    trainer.step(batch([given]))
    assert set(read) == {(False, 6), (True, 3)}


def test_a_score_that_is_nan_ends_the_run_with_its_name(model: str) -> None:
    made = setup(model, loss={"kl": {"coefficient": 0.1}}, reference=ScoreConfig())
    trainer = TorchTrainer(made)
    next(iter(trainer.model.kept["start"].module.parameters())).data.fill_(torch.nan)
    with pytest.raises(TrainerError, match="step 0: the score 'reference' by the weights 'start' is NaN"):
        trainer.step(batch(ragged()))


# ---------------------------------------------------------------------------------- what teaches


def test_the_reply_of_another_right_rollout_is_the_hint() -> None:
    its = group(rollout("a", 1.0), rollout("b"), rollout("c", 1.0), rollout("d"))
    assert chosen_hints(its, hint=RightRollout()) == [None, "c", None, "a"]
    assert chosen_hints(its, hint=RightRollout(), teach="all") == ["c", "c", "a", "a"]
    assert RightRollout().of(group(rollout("a", 1.0), rollout("b"))) == [None, "a"]
    assert RightRollout().of(group(rollout("a"), rollout("b"))) == [None, None]


def test_a_group_that_is_all_wrong_is_kept_if_hints_teach_it() -> None:
    wrong = group(rollout(), rollout())
    (taught_by, _) = hinted(group(rollout(hint="2"), rollout()))
    assert equal_rewards(wrong) is not None
    assert pass_rate(wrong, low=0.1) is not None
    assert equal_rewards(taught_by) is None
    assert pass_rate(taught_by, low=0.1) is None
    rows = make_batch(with_advantages([taught_by], lambda groups: [[0.0, 0.0]]), step=0, temperature=1.0).rows
    assert len(rows) == 1
