"""The metrics of the HTTP half: requests, latencies, tokens and media, by Prometheus' naming rules.

One object per registry, so that a test can have its own. Label values are bounded: routes are templates, never paths
of clients.
"""

from prometheus_client import CollectorRegistry

from common.metrics import SECONDS_BUCKETS, Counter, Histogram


class HttpMetrics:
    """Counters and histograms of one gateway process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tandem_requests_total", "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "tandem_request_seconds",
            "Time from a request's arrival to the last byte of its answer.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "tandem_ttft_seconds",
            "Time from a request's arrival to its first token.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.tpot_seconds = Histogram(
            "tandem_tpot_seconds",
            "Time per output token after the first, one observation for a request.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.media_items = Counter(
            "tandem_media_items_total",
            "Media items by where their embedding came from.",
            ["modality", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter("tandem_prompt_tokens_total", "Prompt tokens of requests.", registry=registry)
        self.completion_tokens = Counter("tandem_completion_tokens_total", "Tokens generated.", registry=registry)
