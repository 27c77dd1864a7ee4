"""Addresses of servers: whose they may be, and what answers there at the start."""

from __future__ import annotations

import pytest
from aiohttp import web
from serving import serving

from grpo_core import ConfigError, Unavailable, checked_url, fetch_json


def checked(url, remote=False):
    return checked_url(url, who="judge", remote=remote, risk="It sees all.", option="options.remote")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://localhost", "https://[::1]:2/v1"])
def test_an_address_of_this_machine_is_fine(url):
    assert checked(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b", "http://[::"]
)
def test_the_error_of_a_malformed_address_shows_a_valid_one(url):
    with pytest.raises(
        ConfigError, match=r"judge: url = .*; expected something like http://127\.0\.0\.1:8000"
    ):
        checked(url)


@pytest.mark.parametrize("url", ["http://me:SECRET1@127.0.0.1:1", "http://:SECRET1@127.0.0.1:1"])
def test_an_address_with_a_secret_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="judge: the url has a password") as refused:
        checked(url)
    assert "SECRET1" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://10.0.0.7:1", "https://judge.example", "http://localhost.example"])
def test_another_machine_needs_the_option(url):
    told = r"judge: .* is another machine. It sees all. .* set options.remote = true"
    with pytest.raises(ConfigError, match=told):
        checked(url)
    assert checked(url, remote=True) == url


def server():
    async def answer(request):
        match request.match_info["what"]:
            case "json":
                return web.json_response({"key": request.headers.get("X-Key"), "proxy": False})
            case "elsewhere":
                raise web.HTTPFound("/json")
            case "html":
                return web.Response(text="<html>")
        raise web.HTTPServiceUnavailable

    app = web.Application()
    app.router.add_get("/{what}", answer)
    return serving(app)


def test_json_is_fetched_without_a_proxy_of_the_system(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server() as url:
        assert fetch_json(f"{url}/json", headers={"X-Key": "k"}) == {"key": "k", "proxy": False}


@pytest.mark.parametrize(
    ("what", "told"),
    [("elsewhere", "status 302"), ("html", "expected JSON"), ("busy", "status 503")],
)
def test_any_other_answer_says_what_it_was(what, told):
    with server() as url, pytest.raises(Unavailable, match=f"GET {url}/{what}: {told}"):
        fetch_json(f"{url}/{what}")


def test_a_server_that_is_not_there_is_unavailable():
    with pytest.raises(Unavailable, match="no connection"):
        fetch_json("http://127.0.0.1:9/json")
