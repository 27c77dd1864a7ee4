"""``grpo-core watch`` serves the report of a running run at a secret address."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from grpo_core import ConfigError, Run
from grpo_core.config import build
from grpo_core.storage.run_directory import RunDirectory
from grpo_plugin_report.watch import WatchServer, watch

GRPO = Path(sys.executable).with_name("grpo-core")


@pytest.fixture
def run(tmp_path):
    """A running run, after one step."""
    config = build([{"tasks": {"sort": {"env": "math:sort"}}, "trainer": {"steps": 4}}])
    run = RunDirectory.create(tmp_path / "r", config)
    steps(run, 1)
    yield run
    run.unlock()


def steps(run, number):
    rows = [{"step": n, "time": n, "reward/sort": 0.5, "time/step": 1.0} for n in range(1, number + 1)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "events.jsonl").write_text('{"time": 0.5, "event": "Opened", "step": -1}\n')


def fetched(url):
    with urlopen(url, timeout=20) as answer:
        return answer.read().decode(), answer.headers


def served(run, story, **options):
    """Run a story with the address and a function that fetches it; return its result."""

    async def main():
        server = WatchServer(Run(run.path), **options)
        url = await server.start()
        try:
            return await story(url, lambda url: asyncio.to_thread(fetched, url))
        finally:
            await server.aclose()

    return asyncio.run(main())


def test_the_page_is_the_report_and_follows_the_run(run):
    async def story(url, fetch):
        html, headers = await fetch(url)
        assert "Content-Security-Policy" in html
        assert "<h1>r</h1>" in html
        assert headers["Refresh"] == "15"
        assert headers["Cache-Control"] == "no-store"
        assert "1 of 4" in html
        steps(run, 3)
        assert "3 of 4" in (await fetch(url))[0]
        run.unlock()
        _, ended = await fetch(url)
        assert ended["Refresh"] is None, "nothing changes any more"

    served(run, story)


def test_an_address_without_the_secret_shows_nothing(run):
    async def story(url, fetch):
        base, _, token = url.rstrip("/").rpartition("/")
        assert url.startswith("http://127.0.0.1:")
        for other in (f"{base}/", f"{base}/{token[:-1]}/", f"{base}/{token}x/", f"{base}/report.html"):
            with pytest.raises(HTTPError, match="404") as answered:
                await fetch(other)
            assert b"is the one that grpo-core watch printed" in answered.value.read()

    served(run, story)


def test_the_page_is_made_once_for_each_change(run, monkeypatch):
    from grpo_plugin_report import watch as module

    made, render = [], module.render
    monkeypatch.setattr(module, "render", lambda files: made.append(1) or render(files))

    async def story(url, fetch):
        await asyncio.gather(*(fetch(url) for _ in range(4)))
        steps(run, 2)
        await fetch(url)

    served(run, story, refresh=0)
    assert len(made) == 2


@pytest.mark.parametrize(
    "request_line", [b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"\x16\x03\x01\xff", b"GET\0"]
)
def test_malformed_requests_are_refused_without_a_word_in_the_terminal(run, request_line, capsys):
    async def story(url, fetch):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        writer.write(request_line + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer, await fetch(url)

    answer, (page, _) = served(run, story)
    assert answer[:13] in (b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")
    assert "<h1>r</h1>" in page
    assert not capsys.readouterr().err


def test_wrong_input_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        watch(tmp_path, port=0, refresh=1)
    with pytest.raises(ConfigError, match="--refresh is -1"):
        watch(run.path, port=0, refresh=-1)
    with pytest.raises(ConfigError, match="--port is 70000"):
        watch(run.path, port=70000, refresh=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot be opened: .*in use"):
            watch(run.path, port=port, refresh=1)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_and_ends_with_ctrl_c(run, how):
    child = subprocess.Popen([GRPO, "watch", str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        url = child.stdout.readline().strip()
        assert "<h1>r</h1>" in fetched(url)[0]
        child.send_signal(how)
        assert child.wait(30) == 130
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
