"""A role's figures for Prometheus: the newest of each kind, read when somebody asks.

Writing is a look-up in a dictionary and the answer is given in a thread of its own, so that
neither a scrape nor its absence ever holds up a role.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common import metric
from common.catalog import CATALOG
from common.errors import ConfigError
from common.log import get_logger

OFFSETS = {"learner": 0, "verifier": 10, "generator": 50}
"""Of a role's ports, from metrics.port."""
PORTS = 40
"""Members of one role on one machine; the learner has one."""
LABELS = ("role", "member")
log = get_logger(__name__)


class Prometheus(Collector):
    """Holds the newest figures of one member, in a registry of its own."""

    def __init__(self, role: str, member: str) -> None:
        self.role, self.member = role, member
        self.registry = CollectorRegistry()
        self._rows: dict[str, dict[str, Any]] = {}
        self._metrics = [item for item in CATALOG if role in item.roles]
        self.registry.register(self)

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Take the figures of a report or of a row; `kind` is their source in the catalogue."""
        self._rows = self._rows | {kind: row}  # replaced as a whole: a scrape is in another thread

    def close(self) -> None:
        """Nothing to write out: the server ends with the process."""

    def describe(self) -> Iterator[Metric]:
        """Every metric that this role can have, without a value."""
        for item in self._metrics:
            yield _family(item)

    def collect(self) -> Iterator[Metric]:
        """What there is by now; a figure that is missing or not finite has no sample."""
        rows = self._rows
        for item in self._metrics:
            row = rows.get(self.role if item.source == "every" else item.source, {})
            family = _family(item)
            for label, value in _values(item, row.get(item.key)):
                labels = [self.role, self.member, *([label] if item.label else [])]
                family.add_metric(labels, value * item.scale)
            if family.samples:
                yield family

    def serve(self, host: str, port: int | None) -> str:
        """Answer at the first free port of this role's; returns host:port, empty if it is off.

        Raises:
            ConfigError: none of them is free, or the host is not this machine's.
        """
        if port is None:
            return ""
        first = port + OFFSETS[self.role]
        for chosen in range(first, first + (1 if self.role == "learner" else PORTS)):
            try:
                start_http_server(chosen, host, self.registry)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(f"metrics.host = {host}: {error}; set another") from None
            log.info("figures for Prometheus", address=f"{host}:{chosen}")
            return f"{host}:{chosen}"
        raise ConfigError(
            f"no port is free for the figures of this {self.role} from {first} on; stop what "
            "listens there, or set another metrics.port"
        )


def _family(item: metric.Metric) -> Any:
    """An empty family; prometheus_client appends `_total` to a counter's name by itself."""
    labels = [*LABELS, *([item.label] if item.label else [])]
    kind = CounterMetricFamily if item.is_counter else GaugeMetricFamily
    return kind(item.full_name, f"{item.means} Healthy: {item.healthy}.", labels=labels)


def _values(item: metric.Metric, value: Any) -> Iterator[tuple[str, float]]:
    """The figure, or each of a mapping, as far as they are finite numbers."""
    pairs = value.items() if item.label and isinstance(value, dict) else [("", value)]
    for label, number in pairs:
        if isinstance(number, int | float) and math.isfinite(number):
            yield str(label), float(number)
