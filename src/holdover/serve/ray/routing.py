"""To which replica a request goes: one that has its prompt's embeddings, unless it would wait there for nothing.

Requests carry a digest of their prompt as Serve's session id. The router remembers where each was sent, as many as a
replica remembers prompts, and prefers that replica while its queue is among the shortest; while all of them are busy,
one request more is allowed. Otherwise the shortest queue wins; of equal ones, a digest of prompt and replica decides,
so that routers of several processes agree without asking each other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class PromptRouter(RequestRouter):  # type: ignore[misc]
    """Serve makes one in each process that sends requests to replicas."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`prompts`: how many of them a replica remembers."""
        self._most: int = kwargs["prompts"]
        self._sent: defaultdict[ReplicaID, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._drawing: defaultdict[ReplicaID, set[str]] = defaultdict(set)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that has the prompt, where there is one to prefer; then the two with the shortest queues."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request = pending_request.metadata
        prompt, lengths = request.session_id, {one.replica_id: self._length(one) for one in candidate_replicas}

        def rank(one: RunningReplica) -> tuple[int, bytes]:
            drawn = f"{prompt or request.internal_request_id} {one.replica_id.unique_id}"
            return lengths[one.replica_id], hashlib.blake2b(drawn.encode(), digest_size=8).digest()

        shortest = sorted(candidate_replicas, key=rank)
        least = lengths[shortest[0].replica_id]
        bearable = [one for one in shortest if lengths[one.replica_id] <= least + (least > 0)]
        having = [one for one in bearable if prompt in self._sent[one.replica_id]]
        return [having[:1], shortest[:1], shortest[1:2]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where the prompt is now, and that the replica has one request more."""
        request, sent = pending_request.metadata, self._sent[replica_id]
        if request.is_streaming:  # it draws; others are over in no time
            self._drawing[replica_id].add(request.internal_request_id)
        if request.session_id:
            sent[request.session_id] = None
            sent.move_to_end(request.session_id)
            while len(sent) > self._most:
                sent.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The replica has one request less."""
        self._drawing[replica_id].discard(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        super().update_replicas(replicas)
        for gone in (self._sent.keys() | self._drawing.keys()) - self.curr_replicas.keys():
            self._sent.pop(gone, None)
            self._drawing.pop(gone, None)

    def _length(self, replica: RunningReplica) -> int:
        """Requests it has: those that it told of lately, and no less than were sent from here."""
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(told, len(self._drawing[replica.replica_id]))
