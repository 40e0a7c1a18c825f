"""openapi.json: it has every route, each with a summary, examples that hold, and its errors. And the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from mok_api.docs import request_schemas
from mok_api.schemas.runs import JOB_EXAMPLE, NewRun
from mok_api.schemas.verifications import NewVerification
from mok_service.spec import job_json_schema, parse_job
from tests.api.conftest import routes
from tests.services import spec


@pytest.fixture
def description(api: httpx.Client) -> dict[str, Any]:
    return dict(api.get("/openapi.json").json())


def operations(description: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, operation) for path, item in description["paths"].items() for method, operation in item.items()]


def test_every_route_is_described(description: dict[str, Any]) -> None:
    expected = {(route.path, method.lower()) for route in routes() for method in route.methods if route.path != "/"}
    assert {(path, method) for path, method, _ in operations(description)} == expected
    assert len(expected) == 45
    for path, method, operation in operations(description):
        assert operation["summary"] and operation["description"].endswith("."), (path, method)
        answers = [content for status, answer in operation["responses"].items() if status.startswith("2")
                   for content in answer.get("content", {}).values()]
        assert answers and all("schema" in content for content in answers), (path, method)
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (path, parameter["name"])


def test_every_post_says_what_it_takes_with_an_example_that_is_valid(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    checked = 0
    for _, method, operation in operations(description):
        if method == "post" and "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            assert content["schema"]["$ref"].removeprefix("#/components/schemas/") in schemas
            resolved = {**content["schema"], "components": {"schemas": schemas}}
            jsonschema.validate(content["example"], resolved)
            checked += 1
    assert checked == 6
    assert parse_job(JOB_EXAMPLE).training.seed == 7


def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    text = str(description)
    for name in set(re.findall(r"#/components/schemas/([A-Za-z_-]+)", text)):
        assert name in description["components"]["schemas"], name
    assert "#/$defs/" not in text


def test_the_described_spec_is_the_one_that_is_read() -> None:
    assert request_schemas()["JobSpec"]["properties"].keys() == job_json_schema()["properties"].keys()
    for model in (NewRun, NewVerification):
        assert request_schemas()[model.__name__]["additionalProperties"] is False


def test_the_page_loads_nothing_from_elsewhere(api: httpx.Client) -> None:
    answer = api.get("/")
    assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/html")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        inline = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(inline) == 1 and answer.text.count(f"<{tag}") == 1
        digest = base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    addresses = set(re.findall(r"https?://[^'\" )]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_the_page_makes_no_markup_of_text(api: httpx.Client) -> None:
    """A job may be called <script>: names become text nodes."""
    page = api.get("/").text
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick="):
        assert way not in page, way
    assert not re.search(r"<[a-z]+[^>]* style=", page)


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1])
def test_the_page_reads_a_seed_as_text(api: httpx.Client, seed: int) -> None:
    """Case 21: what JavaScript's numbers can't hold exactly is put in quotes before it is parsed."""
    found = re.search(r"replace\(/(.+?)/g, '(.+?)'\)", api.get("/").text)
    assert found is not None
    job = api.post("/v1/jobs", json=spec(seed=seed)).json()["job"]
    text = re.sub(found[1], found[2].replace("$", "\\"), api.get(f"/v1/jobs/{job['id']}").text)
    read = json.loads(text, parse_int=float)["seed"]  # numbers as the page would have them
    assert (read if isinstance(read, str) else f"{read:.0f}") == str(seed)


def test_the_page_asks_only_for_routes_that_exist(api: httpx.Client) -> None:
    asked = set(re.findall(r"[`\"](/v1/[^`\"?]*)", api.get("/").text))
    assert asked
    known = [re.sub(r"\{\w+\}", "X", route.path) for route in routes()]
    for path in asked:
        plain = re.sub(r"\$\{[^}]*\}", "X", path)
        assert plain.rstrip("/") in known or f"{plain}X" in known, path
