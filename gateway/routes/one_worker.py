"""What only one worker of a port has (a log, a run): other workers pass the request on to it.

The worker of the query's number answers, else the first that lives. Guards let the request pass in both.
"""

from __future__ import annotations

from urllib.parse import urlencode

from litestar import Response

from gateway import errors
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of, is_of_sibling
from gateway.workers.siblings import CLIENT, WORKER

NOT_PASSED = {"host", "connection", "content-length", "accept-encoding"}
OF_EACH = {"connection", "content-length", "date", "openai-processing-ms", "x-request-id"}
"""Headers that each worker writes into its own answer."""


async def by_one_worker(request: Request) -> Response[bytes] | None:
    """`before_request` of a route. None: this worker answers. Raises `ApiError` (400)."""
    workers = gateway_of(request).deps.workers
    if workers is None or is_of_sibling(request):
        return None
    wanted = request.query_params.get(WORKER, "")
    numbers = [int(wanted)] if wanted.isdecimal() and len(wanted) < 4 else range(workers.seat.count + 1)
    visit, raw_path = request.scope["state"].get("visit"), request.scope["raw_path"]
    headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED}
    headers[CLIENT] = "" if request.client is None else request.client.host
    for number in numbers:
        if number == workers.seat.number:
            return None
        answer = await workers.siblings.send(
            number,
            request.method,
            (raw_path + b"?" + request.scope["query_string"]).decode("latin-1"),
            headers,
            "" if visit is None else urlencode(visit.form),
        )
        if answer is not None:
            kept = {name: text for name, text in answer.headers.items() if name not in OF_EACH}
            return Response(answer.content, status_code=answer.status_code, headers=kept)
    raise errors.bad_request(f"Invalid 'worker': no worker has the number {wanted} now.", WORKER)
