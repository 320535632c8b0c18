"""How many replicas there should be, for `autoscaling_config` in a Serve config file.

```yaml
autoscaling_config:
  min_replicas: 1
  max_replicas: 4
  policy: {policy_function: "ray_lora.serve.scaling_policy:scale_by_load"}
```

Serve's own policy counts requests; what fills a replica is rows of a step, or KV cache, whichever is first.

With `min_replicas: 0` the last one goes as well, and the next request waits for a new one: Serve starts one for whoever
waits, without asking a policy. `downscale_to_zero_delay_s` must then be longer than `look_back_period_s`, or what was
asked before brings the replica back at once.
"""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.handle import DeploymentHandle

TARGET_LOAD = 0.7
"""Of a replica's capacity: what is left is for adapters that become hot, and for the time that a new replica needs."""


def load(num_requests: int, max_num_seqs: int, kv_cache_usage: float) -> float:
    """What a replica has to do, in units of its capacity; more than 1 is a queue."""
    return max(num_requests / max_num_seqs, kv_cache_usage)


def scale_by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many as bring the load that there was lately to the target. Serve adds the delays and the bounds."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    return sum(loads.values()) / TARGET_LOAD, {}


def wants_none(replicas: DeploymentHandle[Any]) -> bool:
    """Whether there is no replica because none is needed: the next request will start one. Asks Serve's controller."""
    found = serve.status().applications[replicas.app_name].deployments[replicas.deployment_name]
    return found.status == "HEALTHY" and not found.replica_states
