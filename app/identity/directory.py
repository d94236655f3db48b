"""Finds, for people known to the identity provider, their tenant, role and user here.

A user is created when a person comes for the first time. The id is derived from the person's
identity, so no lookup table is needed. The role is read from the token each time; it is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from app.core.security import grants
from app.db.models import Tenant, User
from app.db.transactions import transaction
from app.errors import Forbidden, Unauthenticated, Unavailable
from app.identity import audit
from app.identity.oidc import Away, BadToken, Provider
from app.settings import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    user_id: str
    user_name: str
    tenant_id: str
    tenant_name: str
    role: str
    in_root: bool


def provider() -> Provider | None:
    """Return the identity provider; None if the deployment has none."""
    given = settings()
    if not given.oidc_issuer:
        return None
    return _provider(
        given.oidc_issuer, given.oidc_client_id, given.oidc_client_secret.get_secret_value()
    )


_provider = lru_cache(Provider)


def of_token(session: Session, provider: Provider, token: str) -> Person:
    """Return the person named by a token. Raises Unauthenticated, Forbidden or Unavailable."""
    audience = settings().oidc_audience or provider.client_id
    return _person(session, provider, _claims(provider, token, audience))


def of_sign_in(
    session: Session,
    provider: Provider,
    code: str,
    *,
    redirect_uri: str,
    verifier: str,
    nonce: str,
) -> Person:
    """Return the person who signed in.  Raises Unauthenticated, Forbidden or Unavailable."""
    try:
        token = provider.redeem(code, redirect_uri=redirect_uri, verifier=verifier)
    except BadToken as error:
        raise Unauthenticated(str(error)) from error
    except Away as error:
        raise _away(error) from error
    return _person(session, provider, _claims(provider, token, provider.client_id, nonce))


def sign_in_address(provider: Provider, **how: str) -> str:
    """Return the address at which a browser signs in.  Raises Unavailable."""
    try:
        return provider.sign_in_address(**how)
    except Away as error:
        raise _away(error) from error


def _claims(
    provider: Provider, token: str, audience: str, nonce: str | None = None
) -> dict[str, Any]:
    try:
        return provider.claims(token, audience=audience, nonce=nonce)
    except BadToken as error:
        raise Unauthenticated(f"invalid token: {error}") from error
    except Away as error:
        raise _away(error) from error


def _away(error: Away) -> Unavailable:
    return Unavailable(f"the identity provider does not respond correctly: {error}")


def _person(session: Session, provider: Provider, claims: dict[str, Any]) -> Person:
    claim = settings().oidc_claim
    given = grants.of(claims.get(claim), grants.read(settings().oidc_grants))
    if given is None:
        raise Forbidden(f"your {claim!r} gives you no role here; ask an administrator")
    tenant = _tenant(session, given.tenant)
    if tenant is None:
        told = "a tenant that does not exist here, or a name that several tenants have"
        raise Forbidden(f"your {claim!r} names {told}; ask an administrator")
    id = grants.user_id(provider.issuer, str(claims["sub"]), tenant.id)
    name = _known(session, id) or _made(session, id, tenant, grants.name(claims))
    return Person(
        user_id=id,
        user_name=name,
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        role=given.role,
        in_root=tenant.parent_id is None,
    )


def _tenant(session: Session, named: str) -> Tenant | None:
    """Find a tenant by its id, or else by its name.

    If several have the name, the root or a tenant right below it is chosen, because only a platform
    administrator creates those. Otherwise the name must be unique.
    """
    query = select(Tenant).where(or_(Tenant.id == named, Tenant.name == named))
    root = select(Tenant.id).where(Tenant.parent_id.is_(None)).scalar_subquery()
    found = session.execute(query.add_columns(Tenant.parent_id == root)).all()
    sure = (
        [tenant for tenant, _ in found if tenant.id == named]
        or [tenant for tenant, _ in found if tenant.parent_id is None]
        or [tenant for tenant, is_top in found if is_top]
        or [tenant for tenant, _ in found]
    )
    return sure[0] if len(sure) == 1 else None


def _known(session: Session, id: str) -> str | None:
    """Return the name of the user, if there is one; raises Forbidden for a deleted one."""
    found = session.execute(select(User.name, User.deleted_at).where(User.id == id)).one_or_none()
    if found is not None and found.deleted_at is not None:
        raise Forbidden("an administrator deleted your user here")
    return found.name if found is not None else None


def _made(session: Session, id: str, tenant: Tenant, name: str) -> str:
    """Create the user in a transaction of its own; returns the name.

    The caller's transaction may not take locks after the audit log.  Another user of the tenant may
    already have the name; then a suffix is added.
    """
    with transaction() as own:
        for called in (name, f"{name} {id[-8:]}"):
            row = {"id": id, "tenant_id": tenant.id, "name": called}
            made = insert(User).values(row).on_conflict_do_nothing().returning(User.id)
            if own.scalar(made) is not None:
                call = audit.Call(operation="signIn", user=called, user_id=id, tenant_id=tenant.id)
                audit.append(own, call, "made", target=("user", id), tenant_id=tenant.id)
                break
            if _known(own, id):
                break  # another call by the same person created the user meanwhile
    found = _known(session, id)
    if found is None:
        raise Forbidden(f"the tenant has other users named {name!r}; ask an administrator")
    return found
