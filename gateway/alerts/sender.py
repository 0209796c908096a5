"""Sends webhooks from the outbox: signed, in order per tenant, retried after failures.

A gateway sends what it has claimed; claims of a dead gateway expire. A name is resolved before each attempt
and the connection goes to the checked address. Response bodies are not read and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client import Counter

from gateway.background import BackgroundWriter, Site
from tenants.errors import DatabaseUnavailable, Invalid, NotFound
from tenants.outbox import outbox
from tenants.outbox.address import Target, target_of
from tenants.outbox.lookup import LOOK_UP_S, address_of
from tenants.outbox.outbox import Delivery
from tenants.outbox.signing import headers
from tenants.storage.task_stop import stop

MOST_AT_ONCE = 16
CLAIM_MARGIN_S = 15.0

Secret = Callable[[str], Awaitable[tuple[str, bytes]]]
"""The URL and the secret of a webhook. Raises `NotFound`, `Invalid`, `DatabaseUnavailable`."""


class WebhookSender(BackgroundWriter):
    task_name = "gateway webhooks"
    log = logging.getLogger("fairgate.gateway.webhooks")
    failed = "webhooks were not sent; it goes on"
    unavailable = "webhooks are sent later"
    purge_every_s = 600.0

    def __init__(self, site: Site, secret: Secret) -> None:
        super().__init__(site)
        self._secret = secret
        self._gateway_id = site.gateway_id
        self._timeout_s = site.config.webhook_timeout_s
        self._allows_private = site.config.webhook_private
        self._sending: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None
        self._is_released = False
        self._attempts = Counter(
            "fairgate_webhook_attempts",
            "Attempts to send an event to a webhook: delivered, tried again later (pending), or given up"
            " (dead).",
            ["outcome"],
            registry=site.prometheus,
        )
        for outcome in ("delivered", "pending", "dead"):
            self._attempts.labels(outcome)

    async def flush(self) -> None:
        """Starts sending what is due. Raises `DatabaseUnavailable`."""
        if not self._is_released:
            await self._database.write(lambda one: outbox.release(one, self._gateway_id))
            self._is_released = True
        now_us, room = self._now_us(), MOST_AT_ONCE - len(self._sending)
        if not room or not await self._database.read(lambda one: outbox.is_any_due(one, now_us)):
            return
        lease_us = round((self._timeout_s + LOOK_UP_S + CLAIM_MARGIN_S) * 1e6)
        for delivery in await self._database.write(
            lambda one: outbox.claim(one, self._gateway_id, now_us, lease_us, room)
        ):
            task = asyncio.create_task(self._send(delivery), name=f"webhook {delivery.event_id}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def sent(self) -> int:
        """Waits for running attempts; returns how many there were."""
        return len(await asyncio.gather(*self._sending))

    async def purge(self) -> None:
        await self._database.write(lambda one: outbox.purge(one, self._now_us()))

    async def close(self) -> None:
        """Deliveries in progress are repeated after the claim, under the same id."""
        if self._task is not None:
            await stop([self._task])
        await stop(list(self._sending))
        with contextlib.suppress(DatabaseUnavailable):
            await self._database.write(lambda one: outbox.release(one, self._gateway_id))
        if self._client is not None:
            await self._client.aclose()

    async def _send(self, event: Delivery) -> None:
        try:
            error = await self._attempt(event)
            now_us = self._now_us()
            state = await self._database.write(
                lambda one: outbox.ended(one, event, self._gateway_id, error, now_us)
            )
        except NotFound:
            return  # removed meanwhile, and its rows with it
        except DatabaseUnavailable as unavailable:
            self.log.warning("%s: %s", self.unavailable, type(unavailable).__name__)
            return
        except Exception:  # tried again once its claim has run out
            self.log.exception("event %s was not sent", event.event_id)
            return
        if state:
            self._attempts.labels(state).inc()
        if state == "dead":
            self.log.warning("webhook %s was not told of %s: %s", event.webhook_id, event.event_id, error)

    async def _attempt(self, event: Delivery) -> str:
        """Why it failed; empty: delivered."""
        try:
            url, secret = await self._secret(event.webhook_id)
            target = target_of(url, allows_private=self._allows_private)
            address = await address_of(target, allows_private=self._allows_private)
        except Invalid as error:
            return error.message
        body = event.body.encode()
        signed = headers(secret, event.event_id, int(self._wall_clock()), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(url, target, address, signed, body)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, OSError) as error:
            return f"it could not be reached: {type(error).__name__}"

    async def _post(self, url: str, target: Target, address: str, signed: dict[str, str], body: bytes) -> str:
        if self._client is None:
            # A kept connection would be known by its address alone, whatever name it was opened for.
            limits = httpx.Limits(max_connections=MOST_AT_ONCE, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                limits=limits, timeout=self._timeout_s, follow_redirects=False, trust_env=False
            )
        host = f"[{address}]" if ":" in address else address
        parts = urlsplit(url)
        request = self._client.build_request(
            "POST",
            urlunsplit((parts.scheme, f"{host}:{target.port}", parts.path or "/", parts.query, "")),
            content=body,
            headers={
                "host": parts.netloc,
                "content-type": "application/json",
                "user-agent": "fairgate-webhooks",
                **signed,
            },
            extensions={"sni_hostname": target.host},
        )
        answer = await self._client.send(request, stream=True)
        try:
            if answer.is_success:
                return ""
            if answer.has_redirect_location:
                return f"it answered {answer.status_code}: redirects are not followed"
            return f"it answered {answer.status_code}"
        finally:
            await answer.aclose()
