"""Memory for large request bodies: bounded in all and for one tenant, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.requests.inputs.large_bodies import LargeBodies, LargeBody


def test_ordinary_bodies_are_not_counted() -> None:
    bodies = LargeBodies(1000)
    body = LargeBody(bodies, "a", 100)
    body.grow(100)
    assert bodies.total_bytes == 0
    body.grow(101)
    assert bodies.total_bytes == 101


def test_one_tenant_has_at_most_half_and_all_together_no_more_than_all() -> None:
    bodies = LargeBodies(1000)
    LargeBody(bodies, "a", 10).grow(500)
    with pytest.raises(ApiError) as of_tenant:
        LargeBody(bodies, "a", 10).grow(11)
    assert (of_tenant.value.status, of_tenant.value.code) == (429, "large_bodies_full")
    LargeBody(bodies, "b", 10).grow(450)
    with pytest.raises(ApiError) as of_all:
        LargeBody(bodies, "c", 10).grow(100)
    assert of_all.value.status == 503
    LargeBody(bodies, "c", 10).grow(50)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400), st.booleans()), max_size=40))
def test_what_is_counted_is_what_is_here(steps: list[tuple[str, int, bool]]) -> None:
    bodies, kept, size = LargeBodies(1000), [], {}
    for tenant, num_bytes, is_closed in steps:
        body = LargeBody(bodies, tenant, 50)
        try:
            body.grow(num_bytes // 2)
            body.grow(num_bytes)
        except ApiError:
            body.close()
            continue
        if is_closed:
            body.close()
            body.close()
        else:
            kept.append(body)
            size[body] = num_bytes if num_bytes > 50 else 0
        assert bodies.total_bytes == sum(size.values()) <= 1000
    for body in kept:
        body.close()
    assert bodies.total_bytes == 0
