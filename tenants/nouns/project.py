"""A project: how it is made, stored and shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec

from tenants.fields import Field
from tenants.nouns import checks
from tenants.nouns.columns import Record
from tenants.nouns.tenant import EndsRunning, Id, Status

MAX_PROJECTS_PER_TENANT = 200
DEFAULT_PROJECT = "default"
"""Each tenant has it."""


@dataclass(frozen=True, slots=True)
class Project(Record):
    """A part of a tenant; every key belongs to one."""

    project_id: Id
    tenant_id: str
    name: str
    status: Status
    created_at: datetime
    ends_running: EndsRunning = False


class ProjectCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/projects`."""

    name: Annotated[str, Field(is_argument=True, schema={"pattern": f"^({checks.NAME.pattern})$"})]
    tenant: Annotated[str, Field("Tenant (name or id).")]
