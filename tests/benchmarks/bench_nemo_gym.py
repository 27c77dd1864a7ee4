"""How many of NeMo Gym's recorded rewards come out again when its rollouts are replayed through our plugin.

    python tests/benchmarks/bench_nemo_gym.py PYTHON [SERVER ...]

PYTHON is an interpreter (3.12 or newer) with nemo-gym 0.4.  Its wheel has recorded rollouts of its resources
servers.  Each server runs for real, on the loopback address.  The plugin opens a session, makes each recorded
tool call again, in turn, and asks for the reward of the recorded messages.  With no SERVER, all are replayed;
those that need a judge, a key, a download or another package tell what they need.  The last lines count the
rollouts by the reason for which their reward was not seen again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

import grpo_core as grpo
from grpo_core.environments.host import EnvironmentHost
from grpo_plugin_nemo_gym.environment import NeMoGym, _prompt
from grpo_plugin_nemo_gym.responses import messages_of

NEAR = 1e-6
TIMEOUT = 60.0
SILENT = 2
"""Rollouts without an answer, after which a server is left alone: its judge or sandbox is not here."""
MOST_STEPS = 64
REASONS = {
    "images, which the plugin refuses": "input_image",
    "chance: the server has no seed, and begins otherwise": "the rollouts of a prompt begin alike",
    "the wheel has no row, or only a part of it": r"Field required|input is \[\]|no such row",
    "a service, a sandbox or a key": r"\$\{oc.env|%7B|SANDBOX|[Aa]pptainer|[Ss]ingularity|api_key",
    "a download, or a package that is missing": (
        "ModuleNotFound|No module|'git'|git clone|URLError|uv is|FileNotFound"
    ),
    "a judge model": "Mock|NeMoGymResponse|NeMoGymChatCompletion|JSONDecodeError",
}
"""Why a reward is not seen again, with a pattern of what is told then; the first that fits counts."""
OTHER = "other reasons"
JUDGES = re.compile(r"server_client\.post|judge_model_server")


@define
class Outcome:
    recorded: int = 0
    same: int = 0
    answers: int = 0
    same_answers: int = 0
    different: list[str] = field(factory=list)
    unscored: collections.Counter[str] = field(factory=collections.Counter)


class Servers:
    """Starts one server after the other in the interpreter of nemo-gym."""

    def __init__(self, python: str) -> None:
        command = [python, str(Path(__file__).with_name("serve_nemo_gym.py"))]
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def start(self, name: str) -> dict[str, Any]:
        """Return ``{"port": ...}`` or ``{"error": ...}``."""
        print(name, file=self._process.stdin, flush=True)
        told: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        return told

    def close(self) -> None:
        self._process.communicate()


def wheel(python: str) -> Path:
    code = "import nemo_gym, pathlib; print(pathlib.Path(nemo_gym.__file__).parent.parent)"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(told.stdout.split("\n")[-2]) / "resources_servers"


def recordings(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield rows with what was recorded for them."""
    rows = {}
    for path in sorted((folder / "data").glob("example*.jsonl")):
        if "rollouts" not in path.name:
            rows |= {asked(row): row for row in read(path)}
    inputs = {place_of(row): row for path in (folder / "data").glob("*_materialized_inputs.jsonl")
              for row in read(path)}  # fmt: skip
    for path in sorted((folder / "data").glob("example_rollouts*.jsonl")):
        for recorded in read(path):
            if "response" not in recorded or "reward" not in recorded:
                continue  # materialized inputs and profiles
            row = {key: value for key, value in recorded.items() if key not in ("response", "reward")}
            known = inputs.get(place_of(recorded)) or rows.get(asked(recorded), {})
            params = {
                key: value for key, value in row["responses_create_params"].items() if value is not None
            }
            yield known or {**row, "responses_create_params": params}, recorded


def read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file; in some files of the wheel an object takes several lines."""
    text, place, decoder = path.read_text().lstrip(), 0, json.JSONDecoder()
    rows = []
    while place < len(text):
        if text[place] == "<":  # a placeholder stands for a recording that is not published
            place = (text + "\n").index("\n", place) + 1
            continue
        row, place = decoder.raw_decode(text, place)
        rows.append(row)
        while place < len(text) and text[place].isspace():
            place += 1
    return rows


def place_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return which rollout of which task it is, or a place where no input is."""
    task = row.get("_ng_task_index", "unknown")
    return task, row.get("_ng_rollout_index")


def asked(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(messages_of(row["responses_create_params"]))
    except (grpo.ConfigError, KeyError, ValueError, TypeError):
        return json.dumps(row.get("responses_create_params"))


def said(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return recorded items as messages: calls that stand together are of one message."""
    messages: list[dict[str, Any]] = []
    for item in output:
        kind, last = item.get("type") or "message", messages[-1] if messages else {}
        if kind == "message":
            parts = item.get("content") or ""
            text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
            messages.append({"role": item.get("role", "assistant"), "content": text})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": arguments(item["arguments"])}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if last.get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(answer)
        elif kind == "reasoning":
            told = "".join(part.get("text", "") for part in item.get("summary") or ())
            if told:  # an encrypted one says nothing
                messages.append({"role": "assistant", "content": "", "reasoning_content": told})
    return merged(messages)


def arguments(given: str) -> Any:
    try:
        return json.loads(given)
    except ValueError:
        return given


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join reasoning with the message that follows it, as a completion is one message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {}
        if before.get("reasoning_content") and not before.get("content") and message["role"] == "assistant":
            found[-1] = {**message, "reasoning_content": before["reasoning_content"]}
        else:
            found.append(message)
    return found


def replay(host: EnvironmentHost, prompt: grpo.Prompt, recorded: dict[str, Any], outcome: Outcome) -> None:
    (start,) = host.call("open", [("s", prompt)])
    if start.error:
        outcome.unscored[start.error] += 1
        return
    total, messages = 0.0, list(prompt.messages)
    script = [each for each in said(recorded["response"]["output"]) if each["role"] == "assistant"]
    answers = [item["output"] for item in recorded["response"]["output"]
               if item.get("type") == "function_call_output"]  # fmt: skip
    for message in script[:MOST_STEPS]:
        messages.append(message)
        judged = "turns" if message is script[-1] and not answers else "stop"  # a call that was not made
        episode = grpo.Episode(prompt=prompt, messages=messages, session="s", finish_reason=judged)
        (feedback,) = host.call("evaluate", [episode])
        for got in feedback.messages:
            if got["role"] == "tool" and answers:
                outcome.answers += 1
                outcome.same_answers += arguments(got["content"]) == arguments(answers.pop(0))
        messages += feedback.messages
        total += feedback.reward or 0.0
        if feedback.done:
            break
    host.call("close", ["s"])
    if feedback.error or (feedback.done is False and feedback.reward is None):
        outcome.unscored[(feedback.error or "its rollout goes on")[:200]] += 1
    elif abs(total - recorded["reward"]) <= NEAR:
        outcome.same += 1
    else:
        outcome.different.append(f"{total:g} instead of {recorded['reward']:g}")


def reason(told: str, judged: bool) -> str:
    for name, pattern in REASONS.items():
        if re.search(pattern, told):
            return name
    return "a judge model" if judged else OTHER


def ready(url: str) -> None:
    """Wait until a server answers at all; its first answer takes seconds on a machine that is in use."""
    end = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < end:
        with contextlib.suppress(grpo.Unavailable):
            grpo.fetch_json(f"{url}/openapi.json", seconds=TIMEOUT)
            return


def measure(port: int, folder: Path) -> Outcome:
    outcome = Outcome()
    ready(f"http://127.0.0.1:{port}")
    environment = NeMoGym(f"http://127.0.0.1:{port}", timeout=TIMEOUT, retries=0)
    host = EnvironmentHost(environment)  # one event loop for all
    for row, recorded in recordings(folder):
        outcome.recorded += 1
        if sum(number for told, number in outcome.unscored.items() if "no answer within" in told) >= SILENT:
            outcome.unscored["no answer within the time for the rollouts before"] += 1
            continue
        if not isinstance(recorded["response"], dict) or "output" not in recorded["response"]:
            outcome.unscored["the recording has no response"] += 1
            continue
        try:
            replay(host, _prompt(row, environment._begun([row])[0]), recorded, outcome)
        except Exception as error:
            outcome.unscored[f"{type(error).__name__}: {str(error)[:200]}"] += 1
    host.end()
    return outcome


def outcome_of(servers: Servers, name: str, folder: Path) -> Outcome:
    """Start a server and replay its rollouts; all are unscored if it does not start."""
    where, number = servers.start(name), len(list(recordings(folder)))
    failed = where.get("error")
    try:
        found = measure(where["port"], folder) if failed is None else Outcome()
    except grpo.ConfigError as error:
        found, failed = Outcome(), str(error)
    if failed is not None:
        found = Outcome(recorded=number, unscored=collections.Counter({f"not started: {failed}": number}))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("servers", nargs="*")
    given = parser.parse_args()
    folder = wheel(given.python)
    names = given.servers or sorted(path.parent.name for path in folder.glob("*/app.py"))
    total, why = collections.Counter[str](), {each: collections.Counter[str]() for each in (*REASONS, OTHER)}
    with contextlib.closing(Servers(given.python)) as servers:
        for name in names:
            found = outcome_of(servers, name, folder / name)
            judged = bool(JUDGES.search((folder / name / "app.py").read_text()))
            total += collections.Counter(
                recorded=found.recorded, same=found.same, different=len(found.different),
                unscored=found.unscored.total(), answers=found.answers, same_answers=found.same_answers,
            )  # fmt: skip
            for told, number in [*found.unscored.items(), *((told, 1) for told in found.different)]:
                why[reason(told, judged)][name] += number
            print(f"{name}: {found.recorded} recorded, {found.same} same, different: {found.different}, "
                  f"unscored: {dict(found.unscored)}, tools: {found.same_answers}/{found.answers}",
                  flush=True)  # fmt: skip
    for each, places in why.items():
        print(f"{each}: {places.total()} ({', '.join(f'{name} {n}' for name, n in places.items())})")
    print(dict(total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
