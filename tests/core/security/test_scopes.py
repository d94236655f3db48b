"""What a scope opens, and which key may do no more than another."""

from __future__ import annotations

import pytest

from app.core.security.scopes import SCOPES, allows, within


@pytest.mark.parametrize(
    ("scopes", "needed", "found"),
    [
        (None, "admin:write", True),
        (["work:read"], "work:read", True),
        (["work:read"], "work:write", False),
        (["work:write"], "work:read", True),
        (["work:write"], "usage:read", False),
        ([], "work:read", False),
    ],
)
def test_write_scope_includes_read_scope_of_the_same_area(scopes, needed, found):
    assert allows(scopes, needed) is found


@pytest.mark.parametrize(
    ("scopes", "others", "found"),
    [
        (None, None, True),
        (["work:read"], None, True),
        (None, [*SCOPES], False),  # what comes later is not in the list
        (["work:read"], ["work:write"], True),
        (["work:write"], ["work:read"], False),
        (["work:read", "usage:read"], ["work:read"], False),
    ],
)
def test_narrower_scopes_are_recognised(scopes, others, found):
    assert within(scopes, others) is found
