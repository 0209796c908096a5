"""One registration of the gateway's routes for all the applications of a process.

Registering them takes Litestar half a second of processor, longer than most tests that want an application.
Importing this module makes `gateway.app.create_app` answer copies of one application, each with a gateway, a
state and a lifespan of its own.
"""

from __future__ import annotations

from copy import copy
from typing import Any
from unittest.mock import Mock, patch

from litestar import Litestar
from litestar.events import SimpleEventEmitter

import gateway.app

_registered: dict[tuple[str, ...], Litestar] = {}
"""By the origins that browsers may call from, which is all that differs between gateways."""


def _application(*, lifespan: list[Any], state: Any, cors_config: Any, **config: Any) -> Litestar:
    """What `create_app` calls instead of `Litestar`."""
    origins = tuple(cors_config.allow_origins) if cors_config is not None else ()
    if origins not in _registered:
        _registered[origins] = Litestar(cors_config=cors_config, **config)
    app = copy(_registered[origins])
    app.state, app._lifespan_managers = state, lifespan
    app.asgi_router = copy(app.asgi_router)
    app.asgi_router.app = app  # whose lifespan it runs
    app.event_emitter = SimpleEventEmitter(listeners=[])
    return app


def register() -> None:
    """Registers them now, for the processes that are forked from this one."""
    with patch.object(gateway.app, "Gateway"), patch.object(gateway.app, "LiveHub"):
        gateway.app.create_app(Mock(config=Mock(cors_origins=())))


gateway.app.Litestar = _application  # type: ignore[assignment, misc]
