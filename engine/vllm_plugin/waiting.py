"""`OfferedRequests`: vLLM's waiting queue; it offers only what the plan of a step admits, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized

from engine.vllm_plugin.seam import VllmRequest


class OfferedRequests(Sized):
    """Implements vLLM's `RequestQueue`: false while nothing is offered; its length counts all that wait."""

    def __init__(self) -> None:
        self.requests: dict[str, VllmRequest] = {}
        self._offered: deque[VllmRequest] = deque()

    def offer(self, requests: Iterable[VllmRequest]) -> None:
        """Replaces what is offered; in this order."""
        self._offered = deque(requests)

    def add_request(self, request: VllmRequest) -> None:
        self.requests[request.request_id] = request

    def prepend_request(self, request: VllmRequest) -> None:
        """Does not change the order. One that vLLM skipped is not offered again in this step."""
        self.requests[request.request_id] = request

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            self.requests[request.request_id] = request

    def peek_request(self) -> VllmRequest:
        """Raises IndexError where nothing is offered."""
        return self._offered[0]

    def pop_request(self) -> VllmRequest:
        """Raises IndexError where nothing is offered."""
        request = self._offered.popleft()
        del self.requests[request.request_id]
        return request

    def remove_request(self, request: VllmRequest) -> None:
        """Nothing happens where it does not wait."""
        if self.requests.pop(request.request_id, None) is not None and request in self._offered:
            self._offered.remove(request)

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        for request in list(requests):
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._offered)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[VllmRequest]:
        return iter(list(self.requests.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.requests


class PassedOn(Sized):
    """vLLM's queue of skipped requests (0.29), which it reads first: they wait in the one queue instead."""

    def __init__(self, queue: OfferedRequests) -> None:
        self._queue = queue

    def add_request(self, request: VllmRequest) -> None:
        self._queue.add_request(request)

    def prepend_request(self, request: VllmRequest) -> None:
        self._queue.add_request(request)

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        self._queue.prepend_requests(requests)

    def peek_request(self) -> VllmRequest:
        """Always raises IndexError."""
        raise IndexError("skipped requests wait in the one queue")

    def pop_request(self) -> VllmRequest:
        """Always raises IndexError."""
        raise IndexError("skipped requests wait in the one queue")

    def remove_request(self, request: VllmRequest) -> None:
        """The one queue is asked as well."""

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        """The one queue is asked as well."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[VllmRequest]:
        return iter(())
