"""The tracker ``openmetrics``: an endpoint for Prometheus with the newest metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import grpo_core as grpo

log = logging.getLogger(__name__)


class OpenMetrics(grpo.Tracker):
    """Serves the newest value of each metric as ``grpo_core_NAME{run="...", of="...", metric="..."}``.

    The metrics of a step replace the previous step's, and a validation's replace the previous ones of its
    set; absent metrics are no longer served.

    The second part of a name becomes the label ``of``: ``reward/sort`` is ``grpo_core_reward{of="sort"}``,
    and ``validation/sort/accuracy`` is ``grpo_core_validation_accuracy{of="sort"}``.  ASCII characters other
    than letters and digits become ``_``, other characters their code: ``_f6_``.  The label ``metric`` is the
    name itself: two metrics are never one series.

    Args:
        port: port; 0 takes a free one, which is logged.
        host: address; everybody who can reach it can read the metrics.
    """

    def __init__(self, run: grpo.RunInfo, port: int = 9464, host: str = "127.0.0.1") -> None:
        self._run, self._port, self._host = run.name, port, host
        self._registry: Any = None
        self._server: Any = None
        self._gauges: dict[str, Any] = {}
        self._shown: dict[str, set[tuple[str, ...]]] = {}
        """Served gauges and labels by validation set; "" is the last step."""

    @property
    def address(self) -> str:
        """The address after the start."""
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
            for gauge, *labels in self._shown.get(name, set()) - shown:
                self._gauges[gauge].remove(self._run, *labels)
            self._shown[name] = shown

    def _show(self, values: Mapping[str, float]) -> set[tuple[str, ...]]:
        """Set the gauges of these metrics; return their names and labels."""
        shown: set[tuple[str, ...]] = set()
        for name, value in values.items():
            gauge, of = named(name)
            self._gauge(gauge).labels(run=self._run, of=of, metric=name).set(value)
            shown.add((gauge, of, name))
        return shown

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from prometheus_client import Gauge

            self._gauges[name] = Gauge(name, name, ["run", "of", "metric"], registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _set_of(metric: str) -> str:
    """Return the validation set of a metric; "" for the metrics of a step."""
    first, *rest = metric.split("/")
    return rest[0] if first == "validation" and rest else ""


def named(metric: str) -> tuple[str, str]:
    """Return name and label of the gauge for a metric."""
    first, *rest = metric.split("/")
    of, *inner = rest or [""]
    return re.sub(r"\W", _letter, "_".join(["grpo_core", first, *inner]), flags=re.ASCII), of


def _letter(found: re.Match[str]) -> str:
    """Replace a character; non-ASCII characters stay distinct, since a name may consist of them."""
    return "_" if found[0].isascii() else f"_{ord(found[0]):x}_"
