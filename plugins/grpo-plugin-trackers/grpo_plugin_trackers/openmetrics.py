"""The tracker ``openmetrics``: an address that Prometheus and others read the newest numbers from."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import grpo_core as grpo

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class OpenMetrics(grpo.Tracker):
    """Serves the newest value of each metric as ``grpo_core_NAME{run="...", of="..."}``.

    The metrics of a step take the place of those of the step before, and those of a validation of the ones
    that its set had: what is absent is served no longer.

    A name's second part is the label ``of``: ``reward/sort`` is ``grpo_core_reward{of="sort"}``, and
    ``validation/sort/accuracy`` is ``grpo_core_validation_accuracy{of="sort"}``.  What is not a letter
    or digit of ASCII becomes ``_``, or its code if it is no sign of ASCII either: ``_f6_``.

    Args:
        port: port of the address; 0 takes a free one, and the log says which.
        host: the address; anybody who reaches it can read the numbers.
    """

    def __init__(self, run: grpo.RunInfo, port: int = 9464, host: str = LOOPBACK) -> None:
        self._run, self._port, self._host = run.name, port, host
        self._registry: Any = None
        self._server: Any = None
        self._gauges: dict[str, Any] = {}
        self._shown: dict[str, set[tuple[str, str]]] = {}
        """Gauges and labels that are served, by validation set; "" stands for those of the last step."""

    @property
    def address(self) -> str:
        """The address, once it serves."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/metrics"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self._server is None:
            from prometheus_client import CollectorRegistry, start_http_server

            self._registry = CollectorRegistry()
            self._server, _ = start_http_server(self._port, self._host, self._registry)
            if not self._port:
                log.warning("tracker openmetrics serves %s", self.address)
        found: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            found.setdefault(_set_of(name), {})[name] = value
        self._show({"validation_step" if any(found) else "step": float(step)})
        for name, its in found.items():
            shown = self._show(its)
            for gauge, of in self._shown.get(name, set()) - shown:
                self._gauges[gauge].remove(self._run, of)
            self._shown[name] = shown

    def _show(self, values: Mapping[str, float]) -> set[tuple[str, str]]:
        """Set the gauges of these metrics; return their names and labels."""
        shown = {}
        for name, value in values.items():
            gauge, of = key = named(name)
            self._gauge(gauge).labels(run=self._run, of=of).set(value)
            shown[key] = value
        return set(shown)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from prometheus_client import Gauge

            self._gauges[name] = Gauge(name, name, ["run", "of"], registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _set_of(metric: str) -> str:
    """Return the task or set whose validation a metric is of; "" for the metrics of a step."""
    first, *rest = metric.split("/")
    return rest[0] if first == "validation" and rest else ""


def named(metric: str) -> tuple[str, str]:
    """Return the gauge's name for a metric, and its label."""
    first, *rest = metric.split("/")
    of, *inner = rest or [""]
    return re.sub(r"\W", _letter, "_".join(["grpo_core", first, *inner]), flags=re.ASCII), of


def _letter(found: re.Match[str]) -> str:
    """Return what stands for a character; those outside of ASCII stay apart, a name may have nothing else."""
    return "_" if found[0].isascii() else f"_{ord(found[0]):x}_"
