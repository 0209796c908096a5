"""OpenTelemetry's semantic conventions for generative AI: their names, and their server metrics as Prometheus
histograms.

All their names are here, also of spans, as they still change (status: development). In metrics dots become
underscores and the unit is added, as by OpenTelemetry's Prometheus exporter. A client's model is a label only
if it is ours, which bounds the series.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.domain.call import Call
from gateway.domain.estimate import Times
from gateway.metrics.loop_histogram import LoopHistogram
from gateway.upstream.base import RequestTask
from tenants.outcomes import RequestOutcome

CONVENTIONS = "open-telemetry/semantic-conventions-genai@004902b"
"""The version that the names below were taken from."""
OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
ERROR_TYPE = "error.type"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FAIRGATE = "fairgate"
"""The provider: the server that these metrics are of."""
OTHER = "_OTHER"
"""What the conventions call a value outside a known set."""
CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
RERANK = "rerank"
"""Not in the conventions, which allow further values."""
OPERATIONS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": TEXT_COMPLETION,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
}
"""By route."""

DURATION = "gen_ai.server.request.duration"
DURATION_BUCKETS_S = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN = "gen_ai.server.time_per_output_token"
PER_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_ANSWERED = (OPERATION, PROVIDER, REQUEST_MODEL, RESPONSE_MODEL)


def operation_of(call: Call) -> str:
    if call.task is RequestTask.COMPLETE:
        return CHAT if call.chat else TEXT_COMPLETION
    return EMBEDDINGS if call.task is RequestTask.EMBED else RERANK


def prometheus_name(name: str) -> str:
    """Of an attribute, or of a metric without its unit."""
    return name.replace(".", "_")


class GenAIMetrics(Collector):
    """Requests for answers, embeddings and rankings, refused ones included. Use from one event loop."""

    def __init__(self) -> None:
        self._metrics = [
            LoopHistogram(
                f"{prometheus_name(name)}_seconds",
                about,
                [prometheus_name(each) for each in labels],
                buckets=buckets,
                registry=None,
            )
            for name, about, labels, buckets in (
                (DURATION, "Arrival to end.", (*_ANSWERED, ERROR_TYPE), DURATION_BUCKETS_S),
                (FIRST_TOKEN, "Arrival to first token, of answers.", _ANSWERED, FIRST_TOKEN_BUCKETS_S),
                (PER_TOKEN, "Time per token after the first, of answers.", _ANSWERED, PER_TOKEN_BUCKETS_S),
            )
        ]
        # Cached: `labels` takes a lock and builds strings.
        self._duration, self._first_token, self._per_token = (cache(each.labels) for each in self._metrics)

    def ended(
        self,
        call: Call,
        outcome: RequestOutcome,
        times: Times,
        output_tokens: int,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """Counts a request that held budget; ended by it, it is no error. `exemplar`: its kept trace."""
        operation, asked, model = operation_of(call), call.model, call.pool or call.model
        error = "" if outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET) else outcome.value
        if (duration_s := times.e2e_s) is not None:
            self._duration(operation, FAIRGATE, asked, model, error).observe(duration_s, exemplar)
        if error:
            return
        if (first_s := times.ttft_s) is not None:
            self._first_token(operation, FAIRGATE, asked, model).observe(first_s, exemplar)
        if (per_token_s := times.tpot_s(output_tokens)) is not None:
            self._per_token(operation, FAIRGATE, asked, model).observe(per_token_s, exemplar)

    def refused(self, operation: str, asked: str, error: str, duration_s: float) -> None:
        """Counts one that held nothing. `asked` is a name from the settings, or `OTHER`; empty: none was
        read. `error` is a code from the error table."""
        self._duration(operation, FAIRGATE, asked, "", error).observe(duration_s)

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            yield from metric.collect()
