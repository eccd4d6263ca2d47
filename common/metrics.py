"""The Prometheus metric types that services use, and the text that `/metrics` answers.

Metrics are constants of the module that measures them, in the process-wide default registry, which is what
Prometheus' own client intends. Names follow its conventions: `tandem_*_total`, `_seconds`, `_bytes`.
"""

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE_LATEST", "SECONDS_BUCKETS", "Counter", "Gauge", "Histogram", "generate_latest"]

# From a millisecond (a cache hit) to two minutes (a long video on a CPU).
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
