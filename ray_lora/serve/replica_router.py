"""Which replica a call goes to."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaRouter(RequestRouter):
    """The shorter queue of two, as Serve's own; but an outbox is the one of the replica that was named."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and pending_request.metadata.call_method == "outbox":
            wanted = pending_request.args[0]
            for replica in candidate_replicas:
                if replica.replica_id.unique_id == wanted:
                    return [[replica]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
