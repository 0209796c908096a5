"""Checks of the values that admin acts set."""

from __future__ import annotations

from tenants.nouns.checks import MAX_MODEL_CHARS as MAX_MODEL_CHARS
from tenants.nouns.checks import MAX_REASON_CHARS as MAX_REASON_CHARS
from tenants.nouns.checks import MAX_ZONE_CHARS as MAX_ZONE_CHARS
from tenants.nouns.checks import NAME as NAME
from tenants.nouns.checks import ZONE as ZONE
from tenants.nouns.checks import choice as choice
from tenants.nouns.checks import finite as finite
from tenants.nouns.checks import iana_zone as iana_zone
from tenants.nouns.checks import instant as instant
from tenants.nouns.checks import model as model
from tenants.nouns.checks import models as models
from tenants.nouns.checks import name as name
from tenants.nouns.checks import plain_text as plain_text
from tenants.nouns.checks import reason as reason
from tenants.nouns.checks import seconds as seconds
from tenants.nouns.checks import whole as whole
from tenants.nouns.key import MAX_EXPIRY_S as MAX_EXPIRY_S
from tenants.nouns.key import MAX_GRACE_S as MAX_GRACE_S
from tenants.nouns.key import expires_us as expires_us
from tenants.nouns.key import networks as networks
from tenants.nouns.key import scopes as scopes
