"""Exercises: exact answers, disjoint and reproducible splits."""

import pytest

import grpo_core as grpo
from grpo_plugin_math import exercises, grpo_environments

NAMES = ("copy", "reverse", "sort", "maximum", "addition", "subtraction", "modulo")


def content(prompt):
    (message,) = prompt.messages
    return message["content"]


def reply(prompt, text):
    return grpo.Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": text}])


CHECKS = {
    "copy": lambda question: question[1:-1],
    "reverse": lambda question: question[-2:0:-1],
    "sort": lambda question: "".join(sorted(question[:-1])),
    "maximum": lambda question: str(max(map(int, question.removeprefix("max ")[:-1].split(",")))),
    "addition": lambda question: str(sum(map(int, question[:-1].split("+")))),
    "subtraction": lambda question: str(int(question[:2]) - int(question[3:5])),
    "modulo": lambda question: str(int(question[:3]) % int(question[4:6])),
}
EXAMPLES = {
    "copy": 5 + 2,
    "reverse": 5 + 2,
    "sort": 5 + 1,
    "maximum": len("max 31,75,42="),
    "addition": len("23+45="),
    "subtraction": len("23-45="),
    "modulo": len("731%45="),
}


def test_the_plugin_offers_these():
    assert set(grpo_environments()) == {*NAMES, "gsm8k", "arrivals", "calculator"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_right_and_splits_share_no_prompt(name):
    environment = getattr(exercises, name)(train=2000, validation=300)
    train, validation = environment.prompts("train"), environment.prompts("validation")
    assert (len(train), len(validation)) == (2000, 300)
    assert len({content(prompt) for prompt in [*train, *validation]}) == 2300
    assert len({prompt.id for prompt in [*train, *validation]}) == 2300
    for prompt in validation:
        assert len(content(prompt)) == EXAMPLES[name]
        assert prompt.answer == CHECKS[name](content(prompt))
        assert environment.solve(prompt) == prompt.answer


@pytest.mark.parametrize("name", NAMES)
def test_two_instances_offer_the_same_and_another_seed_others(name):
    def questions(**options):
        environment = getattr(exercises, name)(train=50, validation=5, **options)
        return [content(prompt) for split in ("train", "validation") for prompt in environment.prompts(split)]

    assert questions() == questions()
    assert questions() != questions(seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_exact_answer_is_rewarded(name):
    environment = getattr(exercises, name)(train=100, validation=100)
    prompts = environment.prompts("validation")
    replies = [f" {prompt.answer}\n" for prompt in prompts]
    right = environment.evaluate(list(map(reply, prompts, replies)))
    assert [each.reward for each in right] == [1.0] * 100
    assert [each.answer for each in right] == [prompt.answer for prompt in prompts]
    for wrong in (
        "",
        "0",
        "12345",
        " ".join(prompts[0].answer),
        prompts[0].answer + "0",
        "\ud800",
        "9" * 20_000,
    ):
        earned = environment.evaluate([reply(prompt, wrong) for prompt in prompts])
        assert sum(each.reward for each in earned) <= 10, f"the constant reply {wrong[:9]!r} earns too much"


def test_few_exercises_are_shared_out():
    environment = exercises.addition(digits=1)
    assert (len(environment.prompts("train")), len(environment.prompts("validation"))) == (90, 10)


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_the_largest_size_work(name):
    sized = {"copy": "length", "reverse": "length", "sort": "length"}.get(name, "digits")
    for size in (1, 6):
        environment = getattr(exercises, name)(**{sized: size}, train=5, validation=2)
        assert [len(environment.prompts(split)) for split in ("train", "validation")] == [5, 2]
        assert all(prompt.answer for prompt in environment.prompts("train"))


def test_the_order_of_the_alphabet_counts():
    prompt = exercises.sort(length=3, alphabet="zyx").prompts("train")[0]
    assert prompt.answer == "".join(sorted(content(prompt)[:-1], reverse=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exercises.sort(length=0), "length is 0, expected a whole number of at least 1"),
        (lambda: exercises.sort(length=2.5), "length is 2.5, expected a whole number of at least 1"),
        (
            lambda: exercises.sort(length=40),
            "these options make 1e+40 different exercises, expected 2 to 4.6",
        ),
        (lambda: exercises.addition(digits=30), "these options make 8.1e+59 different exercises"),
        (lambda: exercises.sort(alphabet="aab"), "alphabet is 'aab', expected at least two different char"),
        (lambda: exercises.sort(alphabet="a b"), "alphabet is 'a b', expected no white space and no '='"),
        (lambda: exercises.addition(digits=True), "digits is True, expected a whole number of at least 1"),
        (lambda: exercises.addition(train=0), "train is 0, expected a whole number of at least 1"),
    ],
)
def test_bad_options_are_reported(make, message):
    with pytest.raises(grpo.ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)
