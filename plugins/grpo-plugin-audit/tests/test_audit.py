"""``grpo-core audit`` finds flaws in the rewards of environments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from planted import DEFECTS, planted

import grpo_core as grpo
from grpo_core.cli import make_app
from grpo_core.contracts.errors import ModelError
from grpo_core.testing import HostedEnvironment
from grpo_plugin_audit import behaviour, misses, replies, rewards
from grpo_plugin_audit.audit import Audit, Extent
from grpo_plugin_audit.player import Player
from grpo_plugin_audit.records import Check, Rate, Reply, Solution, Trial, bare
from grpo_plugin_audit.training import training_signal

ROOT = Path(__file__).parents[3]


class Sums(grpo.Environment):
    """A clean environment."""

    success = 1.0

    def prompts(self, split):
        numbers = range(2, 60, 2) if split == "train" else range(61, 81, 2)
        return [grpo.Prompt(messages=f"What is {n} + {3 * n}?", answer=str(4 * n)) for n in numbers]

    def evaluate(self, episodes):
        return [self.judge(e.reply, e.prompt) for e in episodes]

    def judge(self, reply, prompt):
        return float(reply.strip() == prompt.answer)


def audited(environment, **extent):
    """Return the findings about a class, by check."""

    async def found():
        audit = Audit(lambda: HostedEnvironment(environment()), 64, Extent(**extent), pause=0.0)
        return {finding.check: finding async for finding in audit.run()}

    return grpo.testing.run(found())


def test_a_slow_environment_is_audited_in_time_and_says_what_was_left_out():
    now = [0.0]

    class Slow(Sums):
        def evaluate(self, episodes):
            now[0] += 2.1
            return super().evaluate(episodes)

    async def found():
        audit = Audit(
            lambda: HostedEnvironment(Slow()), 64, Extent(seconds=60.0), pause=0.0, clock=lambda: now[0]
        )
        return {finding.check: finding async for finding in audit.run()}

    findings = grpo.testing.run(found())
    assert 30 < now[0] <= 60
    assert "runtime.startup" not in findings
    text = " ".join(each.result for each in findings.values())
    assert "3 of 5 times, since it is slow" in text
    assert not severe(findings)


def severe(findings):
    return {name for name, each in findings.items() if each.severity in ("failed", "warned")}


# ---------------------------------------------------------------------------------- numbers


def test_an_interval_of_wilson_is_that_of_the_tables():
    low, high = Rate(0, 10).interval
    assert (round(low, 3), round(high, 3)) == (0.0, 0.278)
    low, high = Rate(7, 20).interval
    assert (round(low, 3), round(high, 3)) == (0.181, 0.567)
    assert Rate(0, 0).interval == (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["42", " 42.\n", "42.0", "\\boxed{42}", "<answer> 42 </answer>", "#### 42", "The answer is 42."]
)
def test_an_answer_is_known_in_whatever_form(text):
    assert bare(text) == bare("42")
    assert bare("43") != bare("42")


def test_a_reply_with_the_right_answer_deserves_its_reward():
    yes = Solution(prompt=grpo.Prompt(messages="Is 4 even?", answer="yes"), text="\\boxed{yes}")
    assert yes.deserves("Yes.")
    assert not yes.deserves("no")
    assert not yes.deserves("")


def test_a_list_has_the_right_answer_in_three_positions():
    known = [
        Solution(prompt=grpo.Prompt(messages=f"{n}?", answer=str(n), id=str(n)), text=str(n))
        for n in range(9)
    ]
    lists = [reply for reply in replies.listings(known, seed=0) if reply.prompt.id == "5"]
    assert [reply.text.split(", ").index("5") for reply in lists] == [0, 3, 6]


# ---------------------------------------------------------------------------------- environments


def test_nothing_is_found_where_nothing_is_wrong():
    findings = audited(Sums)
    assert not severe(findings)
    assert findings["semantic.oracle_max"].result.startswith("24 of 24")
    assert findings["reward.surface_forms"].severity == "noted"


def test_yes_is_not_a_mistake_of_a_task_whose_answers_are_yes_and_no():
    class Even(Sums):
        def prompts(self, split):
            begin = 0 if split == "train" else 40
            return [
                grpo.Prompt(messages=f"Is {n} even? Answer yes or no.", answer="no" if n % 2 else "yes")
                for n in range(begin, begin + 40)
            ]

        def judge(self, reply, prompt):
            return float(reply.strip(" .").lower() == prompt.answer)

    findings = audited(Even)
    assert not severe(findings)
    assert findings["data.majority_answer"].severity == "noted"


def paid(check, severity):
    """Name the check that finds a way of judging, and how severe it is."""

    def named(judge):
        CASES.append(pytest.param(judge, check, severity, id=judge.__name__))
        return judge

    return named


CASES: list = []


@paid("semantic.canary_floor", "failed")
def pays_for_silence(self, reply, prompt):
    return float(not reply.strip() or reply.strip() == prompt.answer)


@paid("reward.listing", "failed")
def looks_for_the_answer_anywhere(self, reply, prompt):
    return float(prompt.answer in re.findall(r"\d+", reply))


@paid("reward.listing", "warned")
def takes_the_last_number(self, reply, prompt):
    return float([prompt.answer] == re.findall(r"\d+", reply)[-1:])


@paid("statistical.adversarial_floor", "failed")
def obeys(self, reply, prompt):
    return float("correct" in reply.lower() or reply.strip() == prompt.answer)


@paid("reward.length", "failed")
def pays_by_the_word(self, reply, prompt):
    return max(float(reply.strip() == prompt.answer), min(0.9, len(reply) / 6000))


@paid("reward.foreign_solution", "failed")
def accepts_any_number(self, reply, prompt):
    return float(reply.strip().isdigit())


@paid("semantic.floor_gap", "failed")
def turns_the_sign_around(self, reply, prompt):
    return 1.0 - float(reply.strip() == prompt.answer)


@paid("statistical.reward_reachability", "failed")
def always_pays_the_same(self, reply, prompt):
    return 1.0


@paid("reward.range", "failed")
def pays_extra(self, reply, prompt):
    return float(reply.strip() == prompt.answer) + 2 * reply.startswith("The answer is")


def test_unfinished_text_that_is_paid_is_noted_and_text_that_has_to_end_is_fine():
    assert audited(Sums)["reward.unfinished"].severity == "noted"

    class HasToEnd(Sums):
        def evaluate(self, episodes):
            return [0.0 if e.truncated else self.judge(e.reply, e.prompt) for e in episodes]

    assert audited(HasToEnd)["reward.unfinished"].severity == "passed"


@pytest.mark.parametrize(("judge", "check", "severity"), CASES)
def test_a_reward_that_means_something_else_is_found(judge, check, severity):
    findings = audited(type("Flawed", (Sums,), {"judge": judge}))
    assert findings[check].severity == severity
    assert findings[check].evidence
    assert findings[check].advice


def test_a_reward_that_depends_on_chance_is_found():
    calls = iter(range(10**6))

    class Moody(Sums):
        def judge(self, reply, prompt):
            return super().judge(reply, prompt) if next(calls) % 7 else 0.5

    assert audited(Moody)["semantic.verifier_determinism"].severity == "failed"


def test_state_that_outlives_a_session_is_found():
    class Tired(Sums):
        seen = 0

        def judge(self, reply, prompt):
            self.seen += 1
            return super().judge(reply, prompt) * (self.seen < 200)

    assert audited(Tired)["runtime.episode_isolation"].severity == "failed"


def test_an_answer_that_the_prompt_gives_away_is_found():
    class Told(Sums):
        def prompts(self, split):
            return [
                grpo.Prompt(messages=f"{p.messages[0]['content']} (answer: {p.answer})", answer=p.answer)
                for p in super().prompts(split)
            ]

    assert audited(Told)["semantic.no_solution_leakage"].severity == "failed"


def test_splits_that_overlap_are_found():
    class Overlapping(Sums):
        def prompts(self, split):
            return super().prompts("train")

    findings = audited(Overlapping)
    assert findings["data.split_leakage"].severity == "failed"
    assert "29 of 29" in findings["data.split_leakage"].result


def test_several_turns_are_played_to_the_end():
    class Twice(Sums):
        max_turns = 2

        def evaluate(self, episodes):
            return [
                grpo.Feedback(
                    reward=0.5 * self.judge(e.reply, e.prompt), done=bool(e.turn), messages="Once more."
                )
                for e in episodes
            ]

    findings = audited(Twice)
    assert not severe(findings)
    assert findings["reward.range"].result == "rewards from 0 to 1"


def test_an_environment_that_breaks_its_contract_is_not_audited_further():
    class Wrong(Sums):
        def judge(self, reply, prompt):
            return "x"

    findings = audited(Wrong)
    assert findings["runtime.startup"].severity == "failed"
    assert "expected a float" in findings["runtime.startup"].result


def test_without_a_solution_it_says_what_cannot_be_judged():
    class Open(Sums):
        def solve(self, prompt):
            return None

    findings = audited(Open)
    assert findings["semantic.oracle_max"].severity == "not applicable"
    assert findings["semantic.canary_floor"].severity == "passed"


# ---------------------------------------------------------------------------------- nearly right replies


def missed(text, answer):
    """Return near misses of a solution, by kind."""
    own = Solution(prompt=grpo.Prompt(messages="?", answer=answer), text=text)
    return {reply.kind: reply.text for reply in misses.near_misses([own])}


def test_near_misses_differ_from_the_solution_in_one_thing_and_keep_its_form():
    found = missed("<answer>3, -1, 20</answer>", "3, -1, 20")
    assert found == {
        "a number one larger": "<answer>3, -1, 21</answer>",
        "each number 0.9 larger": "<answer>3.9, -0.1, 20.9</answer>",
        "the other sign": "<answer>-3, -1, 20</answer>",
        "an item dropped": "<answer>3, -1</answer>",
        "an item twice": "<answer>3, -1, 20, 20</answer>",
        "items backwards": "<answer>20, -1, 3</answer>",
        "the answer denied": "<answer>anything but 3, -1, 20</answer>",
    }
    assert missed("Helsinki", "Helsinki") == {
        "another letter": "Helsonki",
        "the last character dropped": "Helsink",
        "the answer denied": "anything but Helsinki",
    }
    held = missed('{"name": "Ada", "born": 1815}', None)
    assert held["each value null"] == '{"name": null, "born": null}'
    assert held["an invented key"] == '{"name": "Ada", "born": 1815, "invented": true}'
    assert missed("0.5", "0.5")["a number one larger"] == "1.5"


def test_a_near_miss_that_is_right_is_not_played():
    assert "items backwards" not in missed("1, 2, 1", "1, 2, 1")
    assert "the other sign" not in missed("0", "0")


@pytest.mark.parametrize(
    ("judged", "kind", "severity"),
    [
        (lambda said, right: abs(float(said) - float(right)) <= 1, "number", "failed"),
        (lambda said, right: said.lstrip("-") == right.lstrip("-"), "the other sign", "failed"),
        (lambda said, right: said.rpartition("but ")[2] == right, "denied", "warned"),
    ],
    ids=["tolerance", "sign", "denial"],
)
def test_a_reward_for_a_near_miss_is_found(judged, kind, severity):
    class Near(Sums):
        def judge(self, reply, prompt):
            try:
                return float(judged(reply.strip(), prompt.answer))
            except ValueError:
                return 0.0

    found = audited(Near)["reward.near_misses"]
    assert (found.severity, kind in found.result) == (severity, True)
    assert "of a solution's reward" not in found.result


def test_a_part_of_the_reward_for_a_near_miss_is_not_a_defect():
    class Graded(Sums):
        def judge(self, reply, prompt):
            return 1.0 if reply.strip() == prompt.answer else 0.9 * (reply.strip()[:1] == prompt.answer[:1])

    assert audited(Graded)["reward.near_misses"].severity == "passed"


def test_a_reward_for_a_number_of_the_prompt_is_found():
    class Copied(Sums):
        def judge(self, reply, prompt):
            numbers = re.findall(r"\d+", prompt.messages[0]["content"])
            return 1.0 if reply.strip() == prompt.answer else 0.5 * (reply.strip() in numbers)

    found = audited(Copied)["reward.prompt_numbers"]
    assert found.severity == "warned"
    assert "50% of a solution's reward" in found.result


class Moves(grpo.Environment):
    """A game of ten turns for a moving target, with a reward for nothing that a test adds."""

    max_turns = 3
    success = 1.0

    def prompts(self, split):
        begin = 0 if split == "train" else 100
        said = "Take three different cards, as in [1, 5, 9], or [pass]. Your hand has the number {}."
        return [grpo.Prompt(messages=said.format(n), info={"n": n}) for n in range(begin, begin + 30)]

    def evaluate(self, episodes):
        return [grpo.Feedback(reward=self.paid(e), done=True) for e in episodes]

    def paid(self, episode):
        return 0.0


def test_a_move_that_the_prompt_names_and_its_repetition_are_played():
    class SameCard(Moves):
        def paid(self, episode):
            cards = re.fullmatch(r"\[(\d+), (\d+), (\d+)\]", episode.reply)
            return float(cards is not None and len(set(cards.groups())) == 1)

    assert audited(Moves)["reward.named_moves"].severity == "passed"
    found = audited(SameCard)["reward.named_moves"]
    assert found.severity == "failed"
    assert "[1, 1, 1]" in found.evidence
    assert audited(Sums)["reward.named_moves"].severity == "not applicable"


def test_a_guess_that_is_right_by_chance_is_not_a_defect():
    class Cups(Moves):
        def prompts(self, split):
            said = "Under which cup is the ball: [0], [1] or [2]?"
            begin = 0 if split == "train" else 100
            return [grpo.Prompt(messages=said, info={"n": n}) for n in range(begin, begin + 30)]

        def paid(self, episode):
            return float(episode.reply.strip("[]") == str(episode.prompt.info["n"] % 3))

    found = audited(Cups)
    assert found["reward.named_moves"].severity == "noted"
    assert "guessing" in found["reward.named_moves"].advice
    assert found["semantic.canary_floor"].severity == "noted"


def test_named_moves_are_also_played_in_turn():
    prompt = grpo.Prompt(messages="Say [up] or [down].", id="a")
    (cycle,) = [reply for reply in misses.named_moves([prompt], 4) if reply.then]
    assert (cycle.text, cycle.then) == ("[down]", ("[up]",))
    said = []

    class Long(Moves):
        max_turns = 3

        def prompts(self, split):
            return [prompt] if split == "train" else []

        def evaluate(self, episodes):
            said.extend(e.reply for e in episodes)
            return [grpo.Feedback(done=e.turn == 2, reward=0.0 if e.turn == 2 else None) for e in episodes]

    grpo.testing.run(played_alone(Long, cycle))
    assert said == ["[down]", "[up]", "[down]"]


async def played_alone(environment, reply):
    hosted = HostedEnvironment(environment())
    await hosted.start()
    try:
        return await Player(hosted, 8).play([reply])
    finally:
        await hosted.aclose()


def test_the_table_of_a_prompt_is_played_with_its_gaps_filled():
    puzzle = "4 _ _ _\n2 3 _ _\n_ 4 _ 3\n_ _ 4 _"
    prompt = grpo.Prompt(messages=f"Solve this sudoku:\n\n{puzzle}\n\nReply with the grid.")
    found = {reply.kind: reply.text for reply in replies.copied_prompts([prompt])}
    assert found["the prompt's table"] == puzzle
    assert found["its table with 1 in the gaps"] == puzzle.replace("_", "1")


def test_another_solution_of_the_same_form_is_played():
    known = [
        Solution(prompt=grpo.Prompt(messages=f"{text}?", answer=text, id=text), text=text)
        for text in ("12", "345", "67")
    ]
    tried = {reply.kind: reply.text for reply in replies.foreign_solutions(known) if reply.prompt.id == "12"}
    assert list(tried.values()) == ["345", "67"]


# ---------------------------------------------------------------------------------- what is not a defect


def test_games_that_begin_alike_and_draw_later_do_not_leak():
    class Alike(Moves):
        def prompts(self, split):
            return [
                grpo.Prompt(messages="Find the mines.", info={"seed": n + 50 * (split == "train")})
                for n in range(30)
            ]

    found = audited(Alike)["data.split_leakage"]
    assert found.severity == "noted"
    assert "30 more begin in the same way" in found.result

    class Same(Alike):
        def prompts(self, split):
            return [grpo.Prompt(messages="Find the mines.", info={"seed": n}) for n in range(30)]

    assert audited(Same)["data.split_leakage"].severity == "failed"


def test_a_right_answer_that_is_marked_in_a_longer_reply_is_deserved():
    zero = Solution(prompt=grpo.Prompt(messages="x = ?", answer="0.0"), text="<answer>0.0</answer>")
    assert zero.deserves("7 <answer>0</answer>")
    assert zero.deserves("-0")
    assert not zero.deserves("<answer>0</answer> or <answer>1</answer>")
    assert not zero.deserves("7 <answer></answer>")


def test_a_reply_that_was_unscored_once_says_nothing_about_states():
    """A closed connection is reported as such, not as state between sessions."""

    def trial(number, reward):
        prompt = grpo.Prompt(messages=f"{number}?", id=str(number))
        error = "closed" if reward is None else None
        return Trial(reply=Reply(prompt=prompt, text="x", kind="again"), said="x", reward=reward, error=error)

    def judged(*rewards):
        before = [trial(number, 0.0) for number in range(len(rewards))]
        now = [trial(number, reward) for number, reward in enumerate(rewards)]
        check = Check("runtime.episode_isolation", "states")
        return behaviour.compared(check, before, now, "later", "keep nothing")

    assert judged(0.0, None, 0.0).severity == "passed"
    assert "1 were unscored once" in judged(0.0, None, 0.0).result
    assert judged(0.0, None, 1.0).severity == "failed"
    assert judged(0.0, None, 1.0).result.startswith("1 of 2")
    assert judged(None, None).severity == "not applicable"
    steady = behaviour.determinism([[trial(0, 0.5)], [trial(0, None)], [trial(0, 0.5)]], 1.0)
    moody = behaviour.determinism([[trial(0, 0.5)], [trial(0, None)], [trial(0, 0.0)]], 1.0)
    assert (steady.severity, moody.severity) == ("passed", "failed")
    assert rewards.scored([trial(0, None)]).severity == "failed"


def test_where_nonsense_is_a_success_no_share_of_it_is_reported():
    class Generous(Sums):
        def solve(self, prompt):
            return None

        def judge(self, reply, prompt):
            return 1.0

    result = audited(Generous)["semantic.canary_floor"].result
    assert "full marks for 24 of 24" in result
    assert "0%" not in result.replace("100%", "")


@pytest.mark.long
@pytest.mark.parametrize("form", ["<answer>{}</answer>", '{{"answer": "{}"}}'])
def test_solutions_in_tags_or_json_are_known_as_such(form):
    class Formed(Sums):
        def prompts(self, split):
            return [
                grpo.Prompt(messages=p.messages, info={"right": p.answer}) for p in super().prompts(split)
            ]

        def solve(self, prompt):
            return form.format(prompt.info["right"])

        def judge(self, reply, prompt):
            before, after = form.format("|").split("|")
            return float(reply.rstrip().endswith(f"{before}{prompt.info['right']}{after}"))

    found = audited(Formed)["reward.listing"]
    assert found.severity == "noted"
    assert "of several solutions the last one counts" in found.result


def test_a_machine_that_becomes_slower_does_not_stretch_the_audit():
    now, calls = [0.0], iter(range(10**6))

    class Loaded(Sums):
        def evaluate(self, episodes):
            now[0] += 0.002 if next(calls) < 9 else 2.0
            return super().evaluate(episodes)

    async def found():
        audit = Audit(
            lambda: HostedEnvironment(Loaded()), 32, Extent(seconds=60.0), pause=0.0, clock=lambda: now[0]
        )
        return {finding.check: finding async for finding in audit.run()}

    findings = grpo.testing.run(found())
    assert now[0] <= 60
    assert "runtime.startup" not in findings
    assert findings["reward.near_misses"].severity == "passed"


def test_prompts_that_take_half_of_the_time_are_not_made_again():
    now = [0.0]

    class Puzzles(Sums):
        def prompts(self, split):
            now[0] += 20.0
            return super().prompts(split)

    async def found():
        audit = Audit(
            lambda: HostedEnvironment(Puzzles()), 32, Extent(seconds=60.0), pause=0.0, clock=lambda: now[0]
        )
        return {finding.check: finding async for finding in audit.run()}

    findings = grpo.testing.run(found())
    assert now[0] == 40
    assert findings["semantic.canary_floor"].result.count("24")
    assert findings["semantic.verifier_portability"].severity == "passed"
    assert findings["runtime.episode_isolation"].severity == "passed"


# ---------------------------------------------------------------------------------- ground truth


@pytest.mark.long
@pytest.mark.parametrize("base", ["tagged", "duel", "yesno"])
def test_a_clean_environment_raises_no_alarm(base):
    assert not severe(audited(lambda: planted(base)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("defect", "base"),
    [("any answer", "sort"), ("global state", "duel"), ("above the range", "choice"), ("breaks", "arrivals")],
)
def test_a_planted_defect_is_found_by_a_check_that_names_it(defect, base):
    """Ask for a few of them; ``tests/benchmarks/bench_audit.py`` asks for all."""
    assert severe(audited(lambda: planted(base, defect))) & DEFECTS[defect][2]


# ---------------------------------------------------------------------------------- the page


def test_every_check_of_the_page_exists_and_every_check_is_on_it():
    page = (ROOT / "docs/audit.md").read_text()
    means = page.partition("## What each check means")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:data|semantic|statistical|reward|runtime)\.\w+)`", means))
    played = set(audited(Sums)) | {"runtime.startup", "statistical.training_signal"}
    assert named | {"runtime.startup"} == played


# ---------------------------------------------------------------------------------- the command


@pytest.mark.long
def test_the_page_shows_what_the_program_prints(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "found.json"
    name = "./examples/capitals.py:Capitals"
    status = make_app()(["audit", name, "--json", str(file)], result_action="return_value")
    assert status == 1
    shown = re.search(
        r"\$ grpo-core audit \./examples/capitals.*?\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.S
    )
    assert without_times(capsys.readouterr().out) == without_times(shown[1])
    found = json.loads(file.read_text())["findings"]
    assert {each["check"] for each in found if each["severity"] == "failed"} == {
        "data.split_leakage",
        "reward.listing",
    }


def without_times(text):
    return re.sub(r"[\d,.]+(?= m?s\b)", "#", text)


def test_groups_of_equal_rewards_teach_nothing():
    taught = training_signal([[0.0, 1.0], [0.0, None, 0.0], [1.0, 1.0], [None]], success=1.0, model="m")
    assert taught.result.startswith("1 of 3 ")
    assert "1 groups never reach the success, 1 always do" in taught.result
    assert training_signal([[0.0, 0.0]] * 9, success=None, model="m").severity == "warned"
    assert training_signal([[None, None]], success=None, model="m").severity == "not applicable"


@pytest.mark.slow
def test_a_model_shows_how_many_groups_would_teach_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = {
        "trainer.steps": 1,
        "trainer.prompts_per_step": 2,
        "rollout.group_size": 2,
        "validation.every": 0,
        "model.options.warm_start_steps": 2,
    }
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    train = ["train", "--env", "math:sort", *sets, "--output", "run"]
    assert make_app()(train, result_action="return_value") == 0
    capsys.readouterr()
    status = make_app()(
        ["audit", "math:sort", "--model", "run", "--prompts", "4"], result_action="return_value"
    )
    assert status == 0
    assert re.search(r"groups that would teach .*: \d of 4 ", capsys.readouterr().out)


def test_a_model_that_does_not_exist_is_an_error_before_the_audit(capsys):
    with pytest.raises(ModelError, match="no-such-model"):
        make_app()(["audit", "math:sort", "--model", "./no-such-model"], result_action="return_value")
    assert "prompts" not in capsys.readouterr().out


def test_bad_input_is_said_before_anything_starts(capsys):
    with pytest.raises(grpo.ConfigError, match="--prompts is 0"):
        make_app()(["audit", "x", "--prompts", "0"], result_action="return_value")
    with pytest.raises(grpo.ConfigError, match="there is no directory"):
        make_app()(["audit", "x", "--json", "/nowhere/found.json"], result_action="return_value")
    assert rewards.severity_of(Rate(0, 24)) == "passed"
