"""Admin routes of the configuration file: export, plan and apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from litestar import Response, get, post
from litestar.params import FromQuery

from gateway.cluster.policy_check import parsed_policy
from gateway.http.asgi import Request, headers_of
from gateway.http.authentication import principal_of
from gateway.routes.admin.common import CHANGE, READ, actor, changed, if_match, tagged
from gateway.routes.context import asked, gateway_of, json_response
from tenants.admin.platform.policy import StoredPolicy
from tenants.config_file.config_file import ConfigFile
from tenants.config_file.document import Configuration, configuration_type
from tenants.config_file.export import as_yaml
from tenants.config_file.plan import PlanTerms
from tenants.config_file.steps import stored

if TYPE_CHECKING:
    from gateway.gateway import Gateway

YAML = "application/yaml"


@get(
    "/admin/v1/config",
    opt=READ,
    summary="The directory as a configuration file",
    description="Tenants, projects, keys by name, limits, prices, targets and the stored policy; `ETag`: the"
    f" directory's revision. With `Accept: {YAML}` the file itself, as `fairgate export` writes it.",
)
async def export_config(request: Request) -> Response[bytes]:
    exported = await file_of(gateway_of(request), parsed_policy).export()
    is_yaml = YAML in headers_of(request.scope).get("accept", "")

    def written() -> bytes:
        return as_yaml(exported.wanted).encode() if is_yaml else msgspec.json.encode(exported.as_json())

    body = await gateway_of(request).deps.threads.run(principal_of(request).tenant_id, written)
    answer = Response(body, media_type=YAML if is_yaml else "application/json")
    return tagged(answer, stored(exported.revision))


@post(
    "/admin/v1/config/plan",
    status_code=200,
    opt=READ | {"body": Configuration},
    summary="What applying a configuration file would do",
    description="Each step is an act, as the audit will have it; `unnamed` is there and not in the file, and"
    " stays. `etag` and `ETag` are the state that it was planned for.",
)
async def plan_config(request: Request) -> Response[bytes]:
    wanted = await asked(request, configuration_type(gateway_of(request).deps.resources))
    plan = await file_of(gateway_of(request), parsed_policy).plan(wanted)
    return tagged(json_response(plan.as_json()), stored(plan.revision))


@post(
    "/admin/v1/config/apply",
    status_code=200,
    opt=CHANGE | {"body": Configuration},
    summary="Make the directory as a configuration file says",
    description="All steps in one transaction, or none; with `If-Match` only at the state that was planned"
    " for. Answers the plan that was done, and `keys`: the new ones with their secrets, which cannot be read"
    " again. With `dry_run` everything is undone at the end.",
)
async def apply_config(request: Request, dry_run: FromQuery[bool] = False) -> Response[bytes]:
    condition = if_match(request)
    wanted = await asked(request, configuration_type(gateway_of(request).deps.resources))
    gateway = gateway_of(request)
    file = file_of(gateway, gateway.policy.checked)
    plan = await file.plan(wanted, if_match=condition)
    keys = await file.apply(actor(request), plan, is_rehearsal=dry_run)
    shown = plan.as_json() | {"dry_run": dry_run, "keys": []}
    if dry_run or not plan.steps:
        return tagged(json_response(shown), stored(plan.revision))
    shown["keys"] = [key.as_json() for key in keys]
    answer = await changed(request, shown, stored=stored(plan.revision + 1))
    await gateway.policy.follow()
    await gateway.slo.refresh()
    return answer


def file_of(gateway: Gateway, checked: Callable[[StoredPolicy], StoredPolicy]) -> ConfigFile:
    deps = gateway.deps
    multipliers = deps.admin.transactions.tier_multipliers
    terms = PlanTerms(multipliers, gateway.policy.settings, checked, deps.resources)
    return ConfigFile(deps.database, deps.admin, terms, deps.wall_clock)


HANDLERS = [export_config, plan_config, apply_config]
