"""Requests made from our own OpenAPI document, well-formed and broken ones (OPENAI_API.md 6.4 row S32)."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.live_server import SETTINGS, serve

from stage6_api.server import Application

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DOCUMENT = schemathesis.openapi.from_dict(Application(SETTINGS).api.openapi())
OPERATIONS = {result.ok().label: result.ok() for result in DOCUMENT.get_all_operations()}
NEEDED = {  # by an answer; our clients may leave out the model
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "POST /v1/completions": {"prompt": "Hello"},
    "POST /v1/responses": {"input": "Hello"},
    "POST /tokenize": {"prompt": "Hello"},
    "POST /detokenize": {"tokens": [1, 2]},
}
pytestmark = pytest.mark.slow
fifty = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def base():
    """The URL of a live server, whose context is short so that answers without a bound soon end."""
    with serve(max_model_len=128) as live:
        yield live.base


def cases(name, mode):
    return OPERATIONS[name].as_strategy(generation_mode=mode)


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_by_the_document(base, name):
    """No 5xx, and status, content type and body of the answer as the document says."""

    @fifty
    @given(case=cases(name, GenerationMode.POSITIVE))
    def holds(case):
        case.call_and_validate(base_url=base, checks=CHECKS)

    holds()


@pytest.mark.parametrize("name", NEEDED)
def test_broken_requests(base, name):
    """The same for what the document forbids."""

    @fifty
    @given(case=cases(name, GenerationMode.NEGATIVE))
    def holds(case):
        case.call_and_validate(base_url=base, checks=CHECKS)

    holds()


@pytest.mark.parametrize("name", NEEDED)
def test_two_fields_at_a_time(base, name):
    """A good request with two more fields, or the one that cannot be served would hide all others."""
    statuses = set()

    @fifty
    @given(case=cases(name, GenerationMode.POSITIVE), data=st.data())
    def holds(case, data):
        more = sorted(case.body.keys() - NEEDED[name])
        kept = data.draw(st.lists(st.sampled_from(more), max_size=2)) if more else []
        case.body = NEEDED[name] | {field: case.body[field] for field in kept}
        statuses.add(case.call_and_validate(base_url=base, checks=CHECKS).status_code)

    holds()
    assert 200 in statuses
