"""The page of this gateway's settings and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from litestar import Response

from gateway.console.access import page, visit_of
from gateway.console.pages.filters import asked_of
from gateway.console.rendering import page_response
from gateway.deps import ShownSetting
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.people.roles import Act

PATH = "/console/settings"


def chosen(settings: Iterable[ShownSetting], text: str, *, only_set: bool) -> list[ShownSetting]:
    """Settings whose name or meaning contains the text; `only_set`: and that are set."""
    wanted = text.casefold()
    return [
        setting
        for setting in settings
        if (setting.source or not only_set) and wanted in f"{setting.name} {setting.meaning}".casefold()
    ]


def grouped(settings: Iterable[ShownSetting]) -> Sequence[tuple[str, list[ShownSetting]]]:
    """By the word before the point; those without one come first, as `process`."""

    def group(setting: ShownSetting) -> str:
        return setting.name.partition(".")[0] if "." in setting.name else "process"

    return [(name, list(rows)) for name, rows in groupby(settings, group)]


@page(PATH, act=Act.READ_PLATFORM)
async def settings_page(request: Request) -> Response[str]:
    """Of secrets only whether they are set."""
    deps = gateway_of(request).deps
    asked = asked_of(request, "text", "only")
    only_set = asked["only"] == "set" or not any(asked.values())
    settings = chosen(deps.shown_settings, asked["text"], only_set=only_set)
    return page_response(
        "platform/settings.html",
        visit_of(request),
        gateway_id=deps.gateway_id,
        groups=grouped(settings),
        given=sum(bool(setting.source) for setting in deps.shown_settings),
        total=len(deps.shown_settings),
        asked=asked,
    )


HANDLERS = [settings_page]
