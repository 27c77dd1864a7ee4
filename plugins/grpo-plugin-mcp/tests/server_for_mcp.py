"""An MCP server for tests, which counts, and can fail, hang and die."""

import os
import sys
import time

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.types import CONNECTION_CLOSED

if "--broken" in sys.argv:
    sys.exit("no database")

server = MCPServer("counter")
counts = {"calls": 0}


@server.tool()
def add(number: int, times: int = 1) -> str:
    """Adds to the counter."""
    counts["calls"] += number * times
    return f"{counts['calls']}"


@server.tool()
def secret() -> str:
    """Tells an environment variable."""
    return f"{os.environ.get('COUNTER_KEY')} {os.environ.get('OTHER_KEY')}"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such number")


@server.tool()
def market() -> str:
    """Tells that the market is closed."""
    raise MCPError(CONNECTION_CLOSED, "the market is closed")


@server.tool()
def die() -> str:
    """Dies."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Hangs."""
    time.sleep(60)
    return "late"


server.run()
