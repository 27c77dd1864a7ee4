"""The stream of a task's prompts is endless, reshuffled each epoch, and resumed exactly."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.errors import CheckpointError, PluginError
from grpo_core.contracts.protocols import Loader
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import IndexedLoader


def prompts(n, task="a"):
    return [Prompt(messages=f"{task} {i}", id=str(i), environment=task, answer=i) for i in range(n)]


def ids(taken):
    return [prompt.id for prompt in taken]


def through_json(state):
    return json.loads(json.dumps(state))


def test_each_epoch_is_every_prompt_once_in_another_order():
    loader = IndexedLoader("a", prompts(50), seed=1)
    epochs = [ids(loader.take(50)) for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert isinstance(loader, Loader)


def test_the_order_depends_on_seed_and_task_alone():
    def order(task, seed):
        return ids(IndexedLoader(task, prompts(50), seed=seed).take(50))

    assert order("a", 1) == order("a", 1)
    assert order("a", 1) != order("a", 2)
    assert order("a", 1) != order("b", 1)


@given(takes=st.lists(st.integers(0, 23), max_size=12))
def test_how_much_is_taken_at_once_does_not_matter(takes):
    loader, other = IndexedLoader("a", prompts(7), seed=3), IndexedLoader("a", prompts(7), seed=3)
    taken = [prompt for n in takes for prompt in loader.take(n)]
    assert [len(loader.take(n)) for n in takes] == takes
    assert taken == other.take(sum(takes))


@given(n=st.integers(1, 9), before=st.lists(st.integers(1, 12), max_size=6), unused=st.integers(0, 20))
def test_a_resumed_stream_continues_where_it_was(n, before, unused):
    loader = IndexedLoader("a", prompts(n), seed=5)
    for take in before:
        loader.take(take)
    state = through_json(loader.state_dict())
    resumed = IndexedLoader("a", prompts(n), seed=5)
    resumed.take(unused)
    resumed.load_state_dict(state)
    assert resumed.rows == loader.rows
    assert through_json(resumed.state_dict()) == state
    assert [resumed.take(k) for k in (1, 5, 30)] == [loader.take(k) for k in (1, 5, 30)]
    assert len(json.dumps(state)) < 500


def test_drawing_leaves_the_random_numbers_of_torch_alone():
    import torch

    torch.manual_seed(0)
    before = torch.get_rng_state()
    IndexedLoader("a", prompts(9), seed=0).take(20)
    assert torch.equal(torch.get_rng_state(), before)


def test_prompts_in_flight_are_found_by_id():
    loader = IndexedLoader("a", prompts(5), seed=0)
    assert loader.prompt("3").answer == 3
    with pytest.raises(CheckpointError, match=r"task 'a': the checkpoint mentions prompt '9', which is not"):
        loader.prompt("9")


@pytest.mark.parametrize(
    ("changed", "seed", "message"),
    [
        (prompts(6), 0, r"\(prompts is 6, in the checkpoint 5\)"),
        (prompts(5, task="b"), 0, r"\(fingerprint is '\w+', in the checkpoint '\w+'\)"),
        (prompts(5), 1, r"\(seed is 1, in the checkpoint 0\)"),
    ],
)
def test_a_changed_source_is_not_resumed(changed, seed, message):
    state = IndexedLoader("a", prompts(5), seed=0).state_dict()
    with pytest.raises(
        CheckpointError, match=r"task 'a': its prompts differ from the checkpoint's " + message
    ):
        IndexedLoader("a", changed, seed=seed).load_state_dict(state)


def test_a_run_resumes_after_an_answer_was_corrected():
    state = IndexedLoader("a", [Prompt(messages="1+1=", answer="3", id="0")], seed=0).state_dict()
    IndexedLoader("a", [Prompt(messages="1+1=", answer="2", id="0")], seed=0).load_state_dict(state)


def test_a_task_without_prompts_is_an_error():
    with pytest.raises(PluginError, match="task 'a': its environment has no training prompts"):
        IndexedLoader("a", [], seed=0).take(1)


def test_torch_is_not_imported():
    code = """if True:
        import sys
        from grpo_core.data.loaders import IndexedLoader
        from grpo_core.contracts.records import Prompt
        loader = IndexedLoader("a", [Prompt(messages="x", id="0")], seed=0)
        loader.take(3)
        loader.load_state_dict(loader.state_dict())
        loader.take(1)
        print("torch" in sys.modules)
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


# ---------------------------------------------------------------------------------- lazy


class Watched(list):
    """Prompts that say when they are looked at."""

    def __len__(self):
        raise AssertionError("somebody looked at the prompts")


def test_nothing_is_looked_at_before_the_first_prompt_is_taken():
    loader = IndexedLoader("a", Watched(prompts(5)), seed=0)
    loader.take(0)
    with pytest.raises(AssertionError, match="somebody looked"):
        loader.take(1)


def resumed(state, n):
    loader = IndexedLoader("a", prompts(n), seed=5)
    loader.load_state_dict(through_json(state))
    return loader


def check_every_position(n, positions):
    """Cut there, resume, cut again at once and after one more prompt: it continues as if uncut."""
    stream = ids(IndexedLoader("a", prompts(n), seed=5).take(max(positions) + 6))
    loader = IndexedLoader("a", prompts(n), seed=5)
    for position in positions:
        once = resumed(loader.state_dict(), n)
        twice = resumed(once.state_dict(), n)
        assert ids(twice.take(1)) == stream[position : position + 1]
        thrice = resumed(twice.state_dict(), n)
        assert ids(thrice.take(4)) == stream[position + 1 : position + 5]
        assert thrice.rows == position + 5
        assert ids(loader.take(1)) == stream[position : position + 1]


def test_a_stream_is_resumed_at_every_position_of_two_epochs():
    check_every_position(5, range(11))
