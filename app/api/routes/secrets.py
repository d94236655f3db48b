"""Secrets: values that tasks get as environment variables, stored encrypted and never shown.

A user sees and sets own secrets, and sees those of the own tenant.  Administrators set those of
tenants.  No operation returns a value.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import Path, Query, Response
from pydantic import Field, SecretStr
from sqlalchemy import and_, or_, select

from app.api.access.auth import Authed, Submitter, check_role
from app.api.access.caller import Caller
from app.api.access.visibility import of_caller
from app.api.cursors import Paged
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import EXAMPLE_AT, EXAMPLE_TENANT, EXAMPLE_USER, In, Out, Page, example
from app.core.model.provisions.variables import VARIABLE, VARIABLE_RULE, why_refused
from app.core.security import redaction
from app.db.models import Secret, Tenant
from app.db.transactions import Db
from app.errors import BadInput, NotFound
from app.identity import secret_store

router = v1_router("secrets")

_SECRET = "sct_0192f0c1b7e97d3e9a4c5b6d7e8f9a22"
_NAME = "HF_TOKEN"

Name = Annotated[str, Path(description="Name of the environment variable.", examples=[_NAME])]
TenantWide = Annotated[
    bool, Query(description="The secret of all users of the tenant, instead of your own.")
]
OfTenant = Annotated[
    str | None, Query(description="With `tenant_wide`: the tenant; default: your own.")
]


class SecretIn(In):
    model_config = example(value="hf_…the token…")
    value: SecretStr = Field(
        description="At least 6 bytes, at most 32 KiB. It is stored encrypted and never shown."
    )


class SecretOut(Out):
    model_config = example(
        id=_SECRET,
        name=_NAME,
        tenant_id=EXAMPLE_TENANT,
        user_id=EXAMPLE_USER,
        version=2,
        set_by=EXAMPLE_USER,
        set_at=EXAMPLE_AT,
        last_used_at=None,
    )
    id: str
    name: str = Field(description="Name of the environment variable that tasks get.")
    tenant_id: str
    user_id: str | None = Field(description="null: all users of the tenant may use it.")
    version: int = Field(description="It grows each time that the value is set.")
    set_by: str = Field(description="Id of the user who set the value.")
    set_at: datetime
    last_used_at: datetime | None = Field(description="When a task that uses it was last launched.")


@router.get("/secrets", response_model=Page[SecretOut], summary="List secrets")
def list_secrets(
    paging: Paged, caller: Authed, session: Db, tenant_id: OfTenant = None
) -> dict[str, Any]:
    """Lists your own secrets, and those of the tenants that you see; never a value."""
    mine = secret_store.whose(caller.tenant_id, caller.user_id)
    of_tenants = and_(Secret.user_id.is_(None), of_caller(caller, Secret.tenant_id))
    query = select(Secret).where(or_(mine, of_tenants))
    if tenant_id is not None:
        query = query.where(Secret.tenant_id == tenant_id)
    found = paging.read(session, query, by=Secret.id)
    return found.page([_shown(row) for row in found.rows])


@router.put(
    "/secrets/{name}",
    response_model=SecretOut,
    summary="Set a secret",
    responses={201: {"model": SecretOut, "description": "It is new."}, **declared(403, 409, 503)},
)
def set_secret(
    name: Name,
    body: SecretIn,
    response: Response,
    caller: Submitter,
    session: Db,
    tenant_wide: TenantWide = False,
    tenant_id: OfTenant = None,
) -> dict[str, Any]:
    """Sets the value for tasks that name it in `secrets`, from their next launch on.  Your own
    secret is for your tasks only; with `tenant_wide` an administrator sets it for all users of the
    tenant, each of whom can read it in a task.
    """
    owner = _owner(caller, tenant_wide, tenant_id)
    value = body.value.get_secret_value()
    _check(name, value)
    # Lock the tenant, so that two concurrent calls cannot make the same secret.
    tenant = select(Tenant.id).where(Tenant.id == owner[0], _may_change(caller))
    if session.scalar(tenant.with_for_update(key_share=True)) is None:
        told = f"there is no tenant with id {tenant_id}"
        raise BadInput.at("?tenant_id", told, "unknown-tenant")
    row, is_new = secret_store.put(session, *owner, name, value, by=caller.user_id)
    if is_new:
        response.status_code = 201
    return _shown(row)


@router.delete(
    "/secrets/{name}", status_code=204, summary="Remove a secret", responses=declared(403, 404)
)
def remove_secret(
    name: Name,
    caller: Submitter,
    session: Db,
    tenant_wide: TenantWide = False,
    tenant_id: OfTenant = None,
) -> None:
    """Removes the secret.  Tasks that name it fail at their next launch, with this reason."""
    owner = _owner(caller, tenant_wide, tenant_id)
    query = select(Secret).join(Tenant, Tenant.id == Secret.tenant_id)
    query = query.where(secret_store.whose(*owner), Secret.name == name, _may_change(caller))
    row = session.scalar(query.with_for_update(of=Secret))
    if row is None:
        raise NotFound("secret", name)
    session.delete(row)


def check_submitter(caller: Caller) -> None:
    """Raise Forbidden for a caller who submits no work and so has no secrets."""
    check_role(caller, "platform_admin", "tenant_admin", "member")


# --- shared -------------------------------------------------------------------------------------


def _owner(caller: Caller, tenant_wide: bool, tenant_id: str | None) -> tuple[str, str | None]:
    """Return the tenant and the user whose secret is meant; raises Forbidden or BadInput."""
    if not tenant_wide:
        if tenant_id is not None:
            raise BadInput.at("?tenant_id", "only tenant-wide secrets name a tenant")
        return caller.tenant_id, caller.user_id
    check_role(caller, "platform_admin", "tenant_admin")
    return tenant_id or caller.tenant_id, None


def _may_change(caller: Caller) -> Any:
    return of_caller(caller, Tenant.id)


def _check(name: str, value: str) -> None:
    if not VARIABLE.fullmatch(name):
        raise BadInput.at("{name}", f"the name of a secret must be {VARIABLE_RULE}")
    if why := why_refused(name, is_command=True):
        raise BadInput.at("{name}", f"{name} cannot be set: {why}", "reserved")
    if fault := redaction.fault_of(value):
        raise BadInput.at("/value", fault, "value")


def _shown(row: Secret) -> dict[str, Any]:
    return {field: getattr(row, field) for field in SecretOut.model_fields}
