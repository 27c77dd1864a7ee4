"""Tasks of Inspect as environments: equal to Inspect's own evaluation, and what is refused.

Inspect is not among the packages that the project is developed with.  Most tests need it in the Python that
runs them; one needs it in another virtual environment, whose Python GRPO_INSPECT_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_core.testing import HostedEnvironment, finished, make_offer
from grpo_plugin_devkit.environments import check_environment

HERE = Path(__file__).parent
TASKS = HERE / "tasks_of_inspect.py"
OTHER = os.environ.get("GRPO_INSPECT_PYTHON", "")
INSTALLED = importlib.util.find_spec("inspect_ai") is not None
with_inspect = pytest.mark.skipif(not INSTALLED, reason="needs Inspect: pip install inspect-ai")
REPLIES = [
    "{}",
    "I think it is {}",
    "{}.",
    "ANSWER: {}",
    "The answer is {}!\nANSWER: {}",
    "ANSWER: 7",
    "ANSWER: B",
    "",
    "  ",
    "{} or 4",
    "<think>ANSWER: 1</think>ANSWER: {}",
    "answer: {} ",
    "**{}**",
    "no idea",
]
"""Replies that a model might give; the braces stand for a sample's target."""


def run(task, story, **options):
    """Run a story with an environment, as the core calls it."""
    offer = make_offer("environment", f"inspect:{TASKS}@{task}", plugins=["inspect"], **options)
    hosted = HostedEnvironment(offer)
    try:
        return finished(story(hosted))
    finally:
        hosted.host.end()


def episode(prompt, *replies, between=(), session="", finish_reason="stop"):
    messages = list(prompt.messages)
    for turn, reply in enumerate(replies):
        messages += [{"role": "assistant", "content": reply}]
        messages += between[turn : turn + 1]
    return grpo.Episode(
        prompt=prompt,
        messages=messages,
        turn=len(replies) - 1,
        finish_reason=finish_reason,
    )


async def everything(process):
    return [*await process.prompts("train"), *await process.prompts("validation")]


# ---------------------------------------------------------------------------------- equal to Inspect


BY_INSPECT = """
import json, sys
from inspect_ai import eval
from inspect_ai._eval.loader import load_tasks
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float
from inspect_ai.solver._task_state import sample_state

def say(*_):
    output = ModelOutput.from_content("mockllm/model", sample_state().metadata["reply"])
    output.usage = ModelUsage()  # otherwise it counts tokens with a vocabulary that it downloads
    return output

(task,) = load_tasks([sys.argv[1]])
task.dataset = type(task.dataset)([
    sample.model_copy(update={"metadata": {"reply": reply}, "id": f"{i}-{j}"})
    for i, sample in enumerate(task.dataset)
    for j, reply in enumerate(json.loads(sys.argv[2]))
])
model = get_model("mockllm/model", custom_outputs=say)
(log,) = eval(task, model=model, display="none", log_dir=sys.argv[3], log_level="error")
assert log.status == "success", log.error
print(json.dumps([
    [sample.input, sample.metadata["reply"], value_to_float()(score.value)]
    for sample in log.samples for score in sample.scores.values()
]))
"""


@with_inspect
@pytest.mark.long
@pytest.mark.parametrize("task", ["matching", "including", "extracting", "choosing"])
def test_rewards_are_those_of_inspects_own_evaluation(task, tmp_path):
    targets = {"including": ["Paris", "Rome"], "choosing": ["A", "E"]}.get(task, ["0", "6"])
    plain = [reply for reply in REPLIES if "<think>" not in reply]  # mockllm keeps thinking in the text
    said = sorted({reply.format(*[target] * 2) for reply in plain for target in targets})
    by_inspect = subprocess.run(
        [sys.executable, "-c", BY_INSPECT, f"{TASKS}@{task}", json.dumps(said), str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert by_inspect.returncode == 0, by_inspect.stderr[-2000:]
    rows = json.loads(by_inspect.stdout.splitlines()[-1])
    expected = {(question, reply): value for question, reply, value in rows}
    questions = {question for question, _ in expected}

    async def story(process):
        prompts = await everything(process)
        plays = [(prompt, reply) for prompt in prompts for reply in said]
        feedback = await process.evaluate([episode(prompt, reply) for prompt, reply in plays])
        return [(prompt, reply, each) for (prompt, reply), each in zip(plays, feedback, strict=True)]

    rewards = set()
    for prompt, reply, feedback in run(task, story):
        question = next(text for text in questions if text in prompt.messages[-1]["content"])
        assert feedback.reward == expected[question, reply], (question, reply, feedback)
        rewards.add(feedback.reward)
    assert rewards == {0.0, 1.0}, "the replies are right and wrong ones"


@with_inspect
@pytest.mark.long
@pytest.mark.parametrize("task", ["matching", "including", "choosing"])
def test_a_task_passes_the_check_of_environments(task):
    offer = f"inspect:{TASKS}@{task}"
    check_environment(lambda: make_offer("environment", offer, plugins=["inspect"]))


@pytest.mark.long
@pytest.mark.skipif(
    not OTHER, reason="needs GRPO_INSPECT_PYTHON: a virtual environment with inspect-ai and without torch"
)
def test_tasks_run_in_a_separate_virtual_environment(tmp_path):
    command = [sys.executable, "-m", "grpo_core", "check", f"inspect:{TASKS}@choosing"]
    told = subprocess.run(
        [*command, "--set", f"environment.python={OTHER}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "a solution gets full marks: " in told.stdout
    without = subprocess.run([OTHER, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in without.stderr


# ---------------------------------------------------------------------------------- what becomes a reward


@with_inspect
@pytest.mark.long
def test_scorers_are_averaged_and_their_outages_are_unscored():
    async def story(process):
        prompt = (await process.prompts("train"))[0]
        said = [f"please {prompt.answer}", prompt.answer, "nothing", "outage", "raise"]
        return await process.evaluate([episode(prompt, reply) for reply in said])

    both, half, *unscored = run("two_scorers", story)
    assert (both.reward, half.reward) == (1.0, 0.75)
    assert both.metrics == {"includes": 1, "brevity": 1, "brevity_short": 1, "brevity_polite": 1}
    assert [each.reward for each in unscored] == [None] * 3
    told = [each.error for each in unscored]
    assert ["returned None" in told[0], "the judge is away" in told[1], "is broken" in told[2]] == [True] * 3

    once = run("two_scorers", story, weights={"brevity": 0})
    assert [each.reward for each in once] == [1.0, 1.0, 0.0, 0.0, None], (
        "an outage of a mere metric costs nothing"
    )


@with_inspect
@pytest.mark.long
def test_a_label_is_not_a_reward():
    async def story(process):
        return await process.evaluate([episode((await process.prompts("train"))[0], "x")])

    (feedback,) = run("labelled", story)
    assert feedback.reward is None
    assert "its value is 'a label'" in feedback.error


@with_inspect
@pytest.mark.long
def test_thinking_is_not_part_of_the_answer():
    async def story(process):
        prompt = (await process.prompts("train"))[0]
        said = [f"<think>hm</think>{prompt.answer}", f"<think>{prompt.answer}</think>no"]
        return await process.evaluate([episode(prompt, reply) for reply in said])

    assert [each.reward for each in run("thinking", story)] == [1.0, 0.0]


@with_inspect
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of packages that Inspect uses
def test_a_scorer_that_asks_for_a_model_gets_the_named_one_and_is_unscored_without():
    async def story(process):
        prompt = (await process.prompts("train"))[0]
        return await process.evaluate([episode(prompt, reply) for reply in ("right", "no", "mumble")])

    without = run("graded", story)
    assert [each.reward for each in without] == [None] * 3
    assert "No model specified" in without[0].error
    right, wrong, mumbled = run("graded", story, grader="lenient/model")
    assert (right.reward, wrong.reward, mumbled.reward) == (1.0, 0.0, None)
    assert "grader_failed" in mumbled.error


@with_inspect
@pytest.mark.long
def test_solvers_that_ask_again_take_further_turns():
    asks = {"role": "user", "content": "Are you sure? Answer again."}

    async def story(process):
        prompt = (await process.prompts("train"))[0]
        (first,) = await process.evaluate([episode(prompt, "4")])
        second = await process.evaluate(
            [
                episode(prompt, "4", prompt.answer, between=[asks]),
                episode(prompt, prompt.answer, "4", between=[asks]),
            ]
        )
        (cut,) = await process.evaluate([episode(prompt, prompt.answer, finish_reason="length")])
        return first, second, cut

    first, second, cut = run("twice", story)
    assert (first.done, first.reward, first.messages) == (False, None, (asks,))
    assert [each.reward for each in second] == [1.0, 0.0], "the last answer counts"
    assert cut.reward == 1.0, "what a limit ended is scored as it is"


@with_inspect
@pytest.mark.long
@pytest.mark.parametrize("other", [{"order": 2}, {"letters": 2}])
def test_a_data_set_that_another_process_shuffles_otherwise_never_scores_a_right_reply_0(other):
    right = [episode(prompt, f"ANSWER: {prompt.answer}") for prompt in run("reordered", everything)]

    async def judged(process):
        return await process.evaluate(right)

    assert {each.reward for each in run("reordered", judged)} == {1.0}
    feedback = run("reordered", judged, arguments=other)
    assert {each.reward for each in feedback} <= {None, 1.0}, "a sample that kept its place is scored"
    told = [each.error for each in feedback if each.reward is None]
    assert told
    assert all("has another sample in place" in error for error in told)


@with_inspect
@pytest.mark.long
def test_solvers_that_rewrite_the_conversation_get_an_error():
    async def story(process):
        return await process.evaluate([episode((await process.prompts("train"))[0], "4")])

    (feedback,) = run("rewriting", story)
    assert feedback.reward is None
    assert "rewrite the conversation" in feedback.error


# ---------------------------------------------------------------------------------- what is refused


@with_inspect
@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("sandboxed", "it needs a sandbox"),
        ("unscored", "it has no scorer"),
        ("broken", "ConnectionError: cannot fetch the data set"),
        ("missing", "'missing' not found"),
        ("shuffled", "make other messages each time"),
        ("with_tools", "give the model tools"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_the_start(task, why):
    async def story(process):
        return await process.prompts("train")

    with pytest.raises(grpo.GrpoError) as raised:
        run(task, story)
    assert why in str(raised.value)
    assert "Traceback" not in str(raised.value)


@with_inspect
@pytest.mark.long
def test_weights_of_unknown_scorers_are_refused():
    async def story(process):
        await process.start()

    with pytest.raises(grpo.GrpoError, match="Its scorers: includes, brevity"):
        run("two_scorers", story, weights={"brevety": 2})


@pytest.mark.skipif(INSTALLED, reason="Inspect is installed")
def test_without_inspect_the_message_says_what_to_install():
    with pytest.raises(grpo.PluginError, match=r"pip install 'inspect-ai>=0.3.285,<0.4'"):
        make_offer("environment", f"inspect:{TASKS}@matching", plugins=["inspect"])
