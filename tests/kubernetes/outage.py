"""What a discovery thread costs while its API server is away: `python -m tests.kubernetes.outage SECONDS`.

Runs one as production has it, with an API server that answers once and then ends, for so many seconds, and prints its
processor time and its tries as JSON. A process of its own: it can wait while other tests run.
"""

import asyncio
import json
import sys
import threading
import time
from functools import partial

from prometheus_client import REGISTRY

from common.discovery_kubernetes import KubernetesMembers
from common.kubernetes_api import connect
from tests.kubernetes.fake_api import NAMESPACE, endpoint, endpoint_slice, fake_api

SERVICE = "decoder"


def processor_s(thread: threading.Thread) -> float:
    """User and system time of one thread that lives."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def measure(seconds: float) -> dict[str, float]:
    """Be without a server for so long."""
    async with fake_api() as api:
        api.put(endpoint_slice("d", SERVICE, [endpoint("10.0.0.1")], {"control": 7201}))
        source = KubernetesMembers(partial(connect, api.url), NAMESPACE, SERVICE, ["control"])
        told: list[object] = []
        task = asyncio.create_task(source.run(told.append))
        await api.until(lambda: told and api.num_open, timeout_s=60.0)
        (thread,) = (t for t in threading.enumerate() if t.name.startswith("discovery-"))
        await api.stop()
        before_s = processor_s(thread)
        await asyncio.sleep(seconds)
        used_s = processor_s(thread) - before_s
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    failures = {"source": source.name, "reason": "unreachable"}
    tries = REGISTRY.get_sample_value("tandem_discovery_errors_total", failures) or 0.0
    return {"seconds": seconds, "processor_s": used_s, "tries": tries, "members": len(told)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(float(sys.argv[1])))))
