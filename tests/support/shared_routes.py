"""One registration of the gateway's routes for all the applications of a process.

Registering them takes Litestar half a second of processor, longer than most tests that want an application.
Importing this module makes `gateway.app.create_app` return copies of one application, each with a gateway, a
state and a lifespan of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from copy import copy
from functools import cache

from litestar import Litestar
from litestar.datastructures import State
from litestar.events import SimpleEventEmitter

import gateway.app
from gateway.app import Resources
from tenants.resources.all import RESOURCES

_register = gateway.app.register_routes


@cache
def registered(cors_origins: tuple[str, ...] = (), resources: Resources = RESOURCES) -> Litestar:
    """Registered once for these origins; processes forked after a call share it."""
    return _register(cors_origins, State(), contextlib.nullcontext, resources)


def _copied(
    cors_origins: tuple[str, ...],
    state: State,
    lifespan: Callable[[Litestar], contextlib.AbstractAsyncContextManager[None]],
    resources: Resources = RESOURCES,
) -> Litestar:
    app = copy(registered(cors_origins, resources))
    app.state, app._lifespan_managers = state, [lifespan]
    app.asgi_router = copy(app.asgi_router)
    app.asgi_router.app = app  # whose lifespan it runs
    app.event_emitter = SimpleEventEmitter(listeners=[])
    return app


gateway.app.register_routes = _copied
