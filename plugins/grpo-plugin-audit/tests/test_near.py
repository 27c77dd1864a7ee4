"""Near duplicates of training texts among held-out texts."""

from __future__ import annotations

import random

import pytest

from grpo_plugin_audit.near import nearly_leaked

CLIPS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
BAKER = "A baker bakes 12 loaves in the morning and 7 more after lunch; how many loaves does the baker have?"


@pytest.mark.parametrize(
    "planted",
    [
        CLIPS.upper().replace(",", ""),
        CLIPS.replace("altogether", "in total"),
        f"Solve this exercise. {CLIPS}",
        CLIPS.replace("friends", "colleagues"),
    ],
)
def test_held_out_texts_that_are_nearly_trained_on_are_found(planted):
    assert nearly_leaked(["1+1=", BAKER, planted], ["5+5=", CLIPS]) == {1: 2}


def exercises(template, seed, n):
    chance = random.Random(seed)
    words = ["apple", "pear", "plum", "fig", "lime", "kiwi", "mango", "grape", "peach", "melon", "cherry"]
    drawn = [[chance.randint(0, 99) for _ in range(3)] + chance.choices(words, k=6) for _ in range(n)]
    return [template.format(*one) for one in drawn]


@pytest.mark.parametrize(
    "template",
    [
        "{}+{}*{}=",
        "State the final answer to the following arithmetic problem, without any words: {} + {} - {} =",
        "Sort these words in the order of the alphabet, and separate them by commas only: {3}, {4}, {5}, {6}",
        "In a market there are {0} stands. Each of them sells {3}, {4}, {5}, {6}, {7} and {8} to everybody "
        "who comes by in the morning. What do you buy there, if you may take only what begins with a vowel?",
        "Solve: {} boxes hold {} balls each, and {} balls are lost on the way; how many balls are there now?",
    ],
)
def test_exercises_of_one_template_are_not_near_duplicates(template):
    assert nearly_leaked(exercises(template, 1, 3000), exercises(template, 2, 300)) == {}


def test_a_few_exercises_with_other_figures_are_not_near_duplicates():
    train = [CLIPS.replace("48", "52"), BAKER.replace("12", "7").replace(" 7 ", " 12 "), "2+3*4="]
    assert nearly_leaked(train, [CLIPS, BAKER, "2+3-4="]) == {}
