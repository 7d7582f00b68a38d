"""
Requests made of the API's description: nothing of them makes the aggregator fail, and every answer is as described.

What a path names exists in half of them. A wrong body (a member too many, a number for a word) must be refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks

from checks.contract import Status
from healthd.aggregator.identity.tokens import Scope
from tests.aggregator.described import description
from tests.aggregator.parts import KEY
from tests.patience import PATIENCE
from tests.profile import THOROUGH
from tests.ui.stage import Stage, stage, tokens

API = schemathesis.openapi.from_dict(description())
OPERATIONS = [one.ok() for one in API.get_all_operations()]
CONFORMANCE: list[Callable[..., Any]] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def meant(**members: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {name: one if isinstance(one, st.SearchStrategy) else st.just(one) for name, one in members.items()}
    )


WORDS = st.text("ab é-", min_size=1, max_size=20).map(lambda text: f"w{text}")
NODES = {"nodes": ["n1", "n3"], "pool": None, "count": None, "min_nodes": None, "wait_seconds": 1.0}
# What makes sense together: of the rest alone most bodies contradict themselves, and come no further than that.
MEANT: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "POST /v1/gates": meant(**NODES, job=WORDS, attempt=0, workload=None, join=None, max_age_seconds=60.0),
    "POST /v1/validations": meant(**NODES),
    "POST /v1/gates/{gate}/handshake": meant(node="n1"),
    "POST /v1/nodes/{node}/sync": meant(protocol=1, incarnation="i1", seq=1000),
    "PUT /v1/nodes/{node}/quarantine": meant(reason=WORDS, owner=None, until=None, for_seconds=60.0),
    "PUT /v1/overrides/{job}": meant(reason=WORDS, owner=None, until=None, for_seconds=60.0),
    "POST /v1/preflight/ranks": meant(node="n1", rank=0, local_rank=0, wait_seconds=1.0),
}
HEADERS = {"x-healthd-node-key": KEY}


def bounds(operation: Any) -> settings:
    """Failing requests are shown as they are: making one smaller takes minutes, and a node's state alone a second."""
    return settings(
        max_examples=2 if operation.path.endswith("/sync") else 12 if THOROUGH else 4,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class Served:
    """A running aggregator with three nodes, a gate and an override; `names` are by path parameter."""

    stage: Stage
    session: requests.Session
    names: dict[str, tuple[str, ...]]

    def fill(self) -> None:
        """Once more, since requests before may have forgotten or taken back any of it."""
        self.stage.nodes.clear()
        for name, status in (("n1", Status.PASS), ("n2", Status.FAIL), ("n3", Status.PASS)):
            self.session.delete(f"{self.stage.url}/v1/nodes/{name}/leases").close()
            self.session.delete(f"{self.stage.url}/v1/nodes/{name}").close()
            self.stage.say(name, status=status, pool="train")
        word = {"reason": "r", "for_seconds": 3600}
        self._send("PUT", "/v1/overrides/by-hand", word)
        self._send("PUT", "/v1/nodes/n3/quarantine", word)
        asked = {"job": "train", "nodes": ["n1"], "lease": False}
        gate = self._send("POST", "/v1/gates?wait=5", asked)["id"]
        self.names = {"node": ("n1", "n2", "n3"), "gate": (gate, "train"), "job": ("by-hand",), "member": ("m",)}

    def _send(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = self.session.request(method, self.stage.url + path, json=body, timeout=20 * PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzzed")
    file, made = tokens(folder, boss=Scope.ADMIN)
    with (
        requests.Session() as session,
        stage(folder, token_table=file, sync_token=made["boss"], preflight=True, hold_max_seconds=0.05) as found,
    ):
        session.trust_env = False
        session.headers["authorization"] = f"Bearer {made['boss']}"
        yield Served(found, session, {})


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.label)
def test_every_answer_is_as_described(served: Served, operation: Any) -> None:
    served.fill()
    named = {name: st.sampled_from(served.names[name]) for name in re.findall(r"\{(\w+)\}", operation.path)}

    @settings(bounds(operation))
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy())
        if named and data.draw(st.booleans()):
            case.path_parameters = data.draw(st.fixed_dictionaries(named))
        if operation.label in MEANT and data.draw(st.booleans()):
            case.body.update(data.draw(MEANT[operation.label]))
        send(served, case, CONFORMANCE)

    ask()


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.body], ids=lambda one: one.label)
def test_a_wrong_body_is_refused(served: Served, operation: Any) -> None:
    served.fill()
    named = {name: names[0] for name, names in served.names.items() if f"{{{name}}}" in operation.path}
    made = operation.as_strategy(GenerationMode.NEGATIVE, path_parameters=named or None, query={}, headers=HEADERS)

    @settings(bounds(operation))
    @given(case=made)
    def ask(case: Any) -> None:
        send(served, case, [*CONFORMANCE, checks.negative_data_rejection])

    ask()


def send(served: Served, case: Any, checked: list[Callable[..., Any]]) -> None:
    case.headers.update(HEADERS)
    answer = case.call(base_url=served.stage.url, session=served.session, timeout=20 * PATIENCE)
    try:
        case.validate_response(answer, checks=checked)
    except (Failure, FailureGroup) as error:
        raise AssertionError(f"{case.as_curl_command()}\n{error}") from None
