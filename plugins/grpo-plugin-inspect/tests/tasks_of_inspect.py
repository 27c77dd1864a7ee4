"""Tasks of Inspect, as its users write them; the tests of the plugin play them."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import (
    Score,
    accuracy,
    choice,
    includes,
    match,
    mean,
    model_graded_qa,
    pattern,
    scorer,
)
from inspect_ai.solver import generate, multiple_choice, solver, system_message, use_tools
from inspect_ai.tool import tool

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Egypt": "Cairo"}


def sums(number=6):
    return MemoryDataset(
        [Sample(input=f"{n} + {2 * n} =", target=str(3 * n), id=f"s{n}") for n in range(number)]
    )


@task
def matching(location: str = "end", numeric: bool = False):
    return Task(sums(), solver=[system_message("Add."), generate()], scorer=match(location, numeric=numeric))


@task
def including():
    return Task([Sample(input=f"Capital of {k}?", target=v) for k, v in CAPITALS.items()], scorer=includes())


@task
def extracting():
    return Task(sums(), scorer=pattern(r"ANSWER:\s*(\d+)"), config=GenerateConfig(system_message="Add."))


@task
def choosing():
    names = list(CAPITALS.values())
    samples = [
        Sample(input=f"Capital of {k}?", choices=names, target="ABCDE"[names.index(v)])
        for k, v in CAPITALS.items()
    ]
    return Task(MemoryDataset(samples), solver=multiple_choice(), scorer=choice())


@scorer(metrics=[mean()])
def brevity():
    async def score(state, target):
        text = state.output.completion
        if text == "nothing":
            return None
        if text == "outage":
            return Score.unscored(reason="grader_failed", explanation="the judge is away")
        if text == "raise":
            raise RuntimeError("the judge is broken")
        return Score(value={"short": float(len(text) < 10), "polite": "C" if "please" in text else "I"})

    return score


@task
def two_scorers():
    return Task(sums(), scorer=[includes(), brevity()])


@scorer(metrics=[accuracy()])
def labels():
    async def score(state, target):
        return Score(value="a label")

    return score


@task
def labelled():
    return Task(sums(), scorer=labels())


@solver
def asks_again():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Are you sure? Answer again."))
        return await generate(state)

    return solve


@task
def twice():
    return Task(sums(), solver=asks_again(), scorer=match())


@solver
def forgets():
    async def solve(state, generate):
        state = await generate(state)
        state.messages = [ChatMessageUser(content="Let us begin anew.")]
        return await generate(state)

    return solve


@task
def rewriting():
    return Task(sums(), solver=forgets(), scorer=match())


@modelapi(name="lenient")
class Lenient(ModelAPI):
    """A model that accepts what says "right", and gives no grade to what says "mumble"."""

    async def generate(self, input, tools, tool_choice, config):
        text = input[-1].text
        grade = "" if "mumble" in text else f"GRADE: {'C' if 'right' in text else 'I'}"
        return ModelOutput.from_content("lenient/model", grade)


@task
def graded():
    return Task(sums(), scorer=model_graded_qa())


@task
def thinking():
    return Task(sums(), scorer=match("exact"))


@task
def shuffled():
    return Task(
        [Sample(input="Which?", choices=list("abcdefgh"), target="A") for _ in range(4)],
        solver=multiple_choice(shuffle=True),
        scorer=choice(),
    )


@task
def reordered(order: int = 1, letters: int = 1):
    """The seeds stand for what a shuffle without a seed does in another process."""
    names = list(CAPITALS.values())
    data = MemoryDataset(
        [
            Sample(input=[ChatMessageUser(content=f"Capital of {k}?")], choices=names, target=letter)
            for (k, v), letter in zip(CAPITALS.items(), "ABCDE", strict=True)
        ]
    )
    data.shuffle(seed=order)
    data.shuffle_choices(seed=letters)
    return Task(data, solver=multiple_choice(), scorer=choice())


@task
def sandboxed():
    return Task(sums(), scorer=match(), sandbox="docker")


@task
def unscored():
    return Task(sums())


@tool
def clock():
    async def execute():
        """Tell the time."""
        return "noon"

    return execute


@task
def with_tools():
    return Task(sums(), solver=[use_tools(clock()), generate()], scorer=match())


@task
def broken():
    raise ConnectionError("cannot fetch the data set")
