"""The workers' counters on the server's `/metrics`, beside vLLM's own: an endpoint plugin of vLLM.

vLLM loads endpoint plugins only by name: `VLLM_PLUGINS=skimkv vllm serve ...`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from vllm.v1.metrics.prometheus import get_prometheus_registry

from .options import KEY

COUNTERS = {
    "steps": "Rows of a batch that decoded with skimkv, summed over the layers.",
    "rows": "The same times the KV heads of the worker.",
    "bytes": "Bytes of the cache that these steps read and wrote.",
}


def exposition(workers: list[dict[str, Any]]) -> bytes:
    """The counters of all workers in the text format of Prometheus, labelled with method and rank."""

    class Families:
        """What the registry asks for."""

        def collect(self) -> Iterable[Any]:
            """One family for each counter, and the number of layers."""
            labels = ["method", "rank"]
            families: list[Any] = [GaugeMetricFamily("skimkv_layers", "Layers that decode with skimkv.", labels=labels)]
            families += [CounterMetricFamily(f"skimkv_{name}", text, labels=labels) for name, text in COUNTERS.items()]
            for family, name in zip(families, ("layers", *COUNTERS), strict=True):
                for worker in workers:
                    family.add_metric([worker["method"], str(worker["rank"])], worker[name])
            return families

    registry = CollectorRegistry()
    registry.register(Families())
    text: bytes = generate_latest(registry)
    return text


class MetricsPlugin:
    """Answers `GET /metrics` with vLLM's metrics and, if the engine decodes with skimkv, the workers' counters."""

    name = "skimkv"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Put the route in the place of vLLM's own."""
        app.add_api_route("/metrics", self.answer, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, whose workers are asked at every request."""
        self.engine = engine_client

    async def answer(self) -> Response:
        """All metrics as they are now."""
        text: bytes = generate_latest(get_prometheus_registry())
        config = None if self.engine is None else self.engine.vllm_config.additional_config
        if isinstance(config, dict) and KEY in config:
            text += exposition(await self.engine.collective_rpc("skimkv_counters"))
        return Response(text, media_type=CONTENT_TYPE_LATEST)
