"""The warm-up: every ready replica serves every size, before any clock runs.

So no first-run cost is measured (kernels chosen, shared steps proven, memory grown). Requests are
sent until each replica has served its share, however the service deals them out. Does not know how
a request is sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from scripts.serving_bench.backend import Backend
from scripts.serving_bench.http_call import Caller, RequestFailed
from scripts.serving_bench.options import Options
from scripts.serving_bench.outcome import Reply
from scripts.serving_bench.planned_request import BenchRefused, PlannedRequest
from scripts.serving_bench.service_view import replicas_of, served_since

_MOST_SHAPES: Final = 8
_MOST_ROUNDS: Final = 20


class WarmUp:
    """What has to be served before the measurement, and by whom."""

    def __init__(self, backend: Backend, caller: Caller, model: str, options: Options) -> None:
        """Send through `backend`."""
        self._backend = backend
        self._caller = caller
        self._model = model
        self._options = options
        self.sent = 0

    async def run(self, requests: Sequence[PlannedRequest]) -> None:
        """Warm every replica for the sizes of the requests.

        Raises:
            BenchRefused: A warm-up request failed, or a replica stayed without one.
        """
        share = self._options.warmup_requests
        if share < 1:
            return
        for request in self._patterns(requests):
            replicas = await replicas_of(self._caller, self._model)
            if not replicas:
                await self._send([request] * share)
                continue
            # A replica that shares steps must have shared one.
            together = max(min(view.capacity, 2) for view in replicas)
            await self._each_replica(request, max(share, together))

    def _patterns(self, requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        """One short request for each of the most frequent sizes."""
        counts = Counter(request.shape for request in requests)
        shapes = [shape for shape, _ in counts.most_common(_MOST_SHAPES)]
        firsts = [next(one for one in requests if one.shape == shape) for shape in shapes]
        steps = self._options.warmup_num_inference_steps
        return [
            replace(one.with_(num_inference_steps=steps), prompt=f"warm-up {number}, {one.prompt}")
            for number, one in enumerate(firsts)
        ]

    async def _each_replica(self, request: PlannedRequest, share: int) -> None:
        before = await replicas_of(self._caller, self._model)
        for _ in range(_MOST_ROUNDS):
            after = await replicas_of(self._caller, self._model)
            served = served_since(before, after)
            missing = sum(max(0, share - completed) for completed, _ in served.values())
            if after and not missing:
                return
            await self._send([request] * max(missing, share * len(after)))
        left = [name for name, (completed, _) in served.items() if completed < share]
        raise BenchRefused(
            f"{', '.join(left)} got no warm-up request in {_MOST_ROUNDS} rounds; is it drained, or "
            "does another client keep it busy?"
        )

    async def _send(self, requests: Sequence[PlannedRequest]) -> None:
        self.sent += len(requests)
        for reply in await asyncio.gather(*(self._one(request) for request in requests)):
            if reply.request_id is not None and not self._options.keep_outputs:
                await self._backend.remove(reply.request_id)

    async def _one(self, request: PlannedRequest) -> Reply:
        try:
            async with asyncio.timeout(self._options.timeout):
                return await self._backend.run(request)
        except RequestFailed as failed:
            raise BenchRefused(
                f"a warm-up request failed ({failed.code}): {failed.message}"
            ) from None
        except TimeoutError:
            raise BenchRefused(
                f"a warm-up request took longer than {self._options.timeout:g} s (--timeout)"
            ) from None
