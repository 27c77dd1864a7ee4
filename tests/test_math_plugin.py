"""The math plugin in a run: by name, in a child process."""

import asyncio
import subprocess
import sys

import pytest

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.host import PluginHost, listing
from grpo_core.plugins.installed import PluginSelection

NAMES = (
    "addition",
    "arrivals",
    "calculator",
    "copy",
    "gsm8k",
    "maximum",
    "modulo",
    "reverse",
    "sort",
    "subtraction",
)


def episodes(prompts, replies):
    return [
        Episode(prompt=prompt, messages=[*prompt.messages, {"role": "assistant", "content": reply}])
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def run(spec, options, story):
    async def main():
        process = EnvironmentProcess(
            EnvironmentSpec(task="maths", env=spec, options=options, config=EnvironmentConfig(deadline=20.0)),
            plugins=PluginSelection(allow=("math",)),
        )
        try:
            return await story(process)
        finally:
            await process.aclose()

    return asyncio.run(main())


def test_it_is_found_and_its_offers_are_listed():
    plugins = {plugin["name"]: plugin for plugin in listing(PluginHost.discover(allow=["math"]))}
    assert plugins["math"]["error"] == ""
    assert plugins["math"]["offers"] == {"environment": sorted(NAMES)}


def test_listing_it_imports_nothing_heavy():
    code = """if True:
        import sys
        from grpo_core.plugins.host import PluginHost
        PluginHost.discover(allow=["math"]).find("environment", "math:gsm8k")
        print([name for name in ("sympy", "math_verify", "datasets", "grpo_plugin_math.gsm8k")
               if name in sys.modules])
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_a_misspelt_name_or_option_is_reported():
    host = PluginHost.discover(allow=["math"])
    with pytest.raises(
        PluginError, match=r"there is no environment 'math:adition'. Did you mean 'math:addition'"
    ):
        host.find("environment", "math:adition")
    with pytest.raises(
        PluginError, match=r"has no option 'lenght'. Did you mean 'length'\? Its options: length=5"
    ):
        host.make("environment", "math:sort", lenght=3)
    with pytest.raises(
        PluginError, match="cannot be made: length is 0, expected a whole number of at least 1"
    ):
        host.make("environment", "math:sort", length=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {"gsm8k", "arrivals", "calculator"}))
def test_solutions_earn_full_marks_and_nothing_else_does(name):
    async def story(process):
        prompts = await process.prompts("validation")
        assert len(prompts) == 200
        assert len(await process.prompts("train")) == 400
        for replies, reward in ((await process.solve(prompts), 1.0), (["x"] * 200, 0.0)):
            feedback = await process.evaluate(episodes(prompts, replies))
            assert [each.reward for each in feedback] == [reward] * 200

    run(f"math:{name}", {"train": 400, "validation": 200}, story)


@pytest.mark.slow
def test_hostile_replies_to_gsm8k_cost_nobody_a_reward():
    prompts = [Prompt(messages=f"{i} pens?", answer=str(i), id=str(i)) for i in range(18)]

    async def story(process):
        nasty = ["\\boxed{9^{9^{9^9}}}", f"\\boxed{{{'9' * 20_000}}}", "\\boxed{\ud800}", "\\boxed{" * 5000]
        nasty += ["#### (99999999)!", "#### " + "(" * 90 + "1" + ")" * 90, "\\boxed{x = 99}"]
        good = await process.solve(prompts)
        replies = [*nasty, *good[len(nasty) :]]
        feedback = await process.evaluate(episodes(prompts, replies))
        assert [each.reward for each in feedback] == [0.0] * len(nasty) + [1.0] * (18 - len(nasty))
        assert process.starts == 1, "nothing of this ended the process"

    run("math:gsm8k", {}, story)
