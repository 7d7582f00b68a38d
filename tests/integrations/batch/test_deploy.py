"""The shapes of AWS Batch are what AWS takes, and what the gate needs; the user data does what it says."""

from __future__ import annotations

import base64
import email
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from checks import catalog
from deploy.batch import definitions, hosts
from healthd.cli.hooks.preflight import preflight
from healthd.integrations.batch import launcher
from healthd.integrations.batch.settings import BatchActuatorSettings
from healthd.postmortem import EXIT_CODES
from tests.deploy.aws_kit import complaints, load_settings
from tests.every import every
from tests.integrations.batch.batch_kit import FOLDER, ROOT, load

SCRIPT = FOLDER / "user-data.sh"

OPERATIONS = {
    "single-node.json": ("batch", "RegisterJobDefinition"),
    "single-node-container.json": ("batch", "RegisterJobDefinition"),
    "multi-node.json": ("batch", "RegisterJobDefinition"),
    "multi-node-container.json": ("batch", "RegisterJobDefinition"),
    "multi-node-standing.json": ("batch", "RegisterJobDefinition"),
    "multi-node-run.json": ("batch", "RegisterJobDefinition"),
    "launch-template.json": ("ec2", "CreateLaunchTemplate"),
    "compute-environment.json": ("batch", "CreateComputeEnvironment"),
    "job-queue.json": ("batch", "CreateJobQueue"),
}
DEFINITIONS = [name for name, (_, operation) in OPERATIONS.items() if operation == "RegisterJobDefinition"]


def containers(definition: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every container of a definition, of whatever shape."""
    parts = definition.get("nodeProperties", {}).get("nodeRangeProperties", [definition])
    for part in parts:
        if "ecsProperties" in part:
            yield from (one for task in part["ecsProperties"]["taskProperties"] for one in task["containers"])
        else:
            yield part.get("container") or part["containerProperties"]


@every(("name", "operation"), OPERATIONS.items())
def test_every_shape_is_one_that_the_service_model_takes(name: str, operation: tuple[str, str]) -> None:
    assert complaints(*operation, load(name)) == ""


def test_an_unknown_or_misspelt_member_would_be_seen() -> None:
    body = load("multi-node.json")
    body["nodeProperties"]["nodeRangeProperties"][0]["container"]["linuxParameters"]["device"] = []
    assert "Unknown parameter" in complaints("batch", "RegisterJobDefinition", body)


def test_what_is_committed_is_what_the_code_writes(tmp_path: Path) -> None:
    assert definitions.main(["--out", str(tmp_path)]) == 0
    for name in OPERATIONS:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), (
            f"{name} is old: python -m deploy.batch.definitions"
        )


@every("name", DEFINITIONS)
def test_every_container_is_given_all_neuron_and_all_efa_devices_of_the_machine(name: str) -> None:
    for container in containers(load(name)):
        paths = [device["hostPath"] for device in container["linuxParameters"]["devices"]]
        assert paths.count("/dev/neuron15") == 1
        assert sum(path.startswith("/dev/neuron") for path in paths) == 16
        assert sum(path.startswith("/dev/infiniband/uverbs") for path in paths) == 8
        assert len(set(paths)) == len(paths) == 24
        assert container["ulimits"] == [{"name": "memlock", "softLimit": -1, "hardLimit": -1}]
        assert container["user"] == "root"


@pytest.mark.parametrize("kind", hosts.MACHINES)
def test_devices_of_every_instance_type_are_those_of_the_catalogue(kind: str) -> None:
    known = catalog.TYPES[kind]
    assert len(hosts.MACHINES[kind].devices) == (known.devices or 0) + (known.efa_interfaces or 0) > 0
    for apart in (False, True):
        body = definitions.multi_node("t", hosts.MACHINES[kind], "i", ["true"], nodes=2, apart=apart)
        assert complaints("batch", "RegisterJobDefinition", body) == ""


@every("name", DEFINITIONS)
def test_nothing_is_asked_twice_of_the_machine(name: str) -> None:
    machine = hosts.MACHINES["trn1.32xlarge"]
    for kind, most in (("VCPU", machine.vcpus), ("MEMORY", machine.memory_mib)):
        asked = [
            int(need["value"])
            for container in containers(load(name))
            for need in container["resourceRequirements"]
            if need["type"] == kind
        ]
        assert 0 < sum(asked) <= most
    for container in containers(load(name)):
        memory = next(int(need["value"]) for need in container["resourceRequirements"] if need["type"] == "MEMORY")
        assert container["linuxParameters"]["sharedMemorySize"] < memory, "/dev/shm counts as the container's memory"


@pytest.mark.parametrize("name", ["single-node.json", "multi-node.json"])
def test_by_default_the_gate_becomes_the_job(name: str) -> None:
    (container,) = containers(load(name))
    assert container["command"][:3] == ["healthd", "preflight", "--"]
    assert container["command"][3:] == ["/opt/train/train.sh"]


@pytest.mark.parametrize("name", ["single-node-container.json", "multi-node-container.json"])
def test_the_gate_apart_must_succeed_and_may_not_be_essential(name: str) -> None:
    gate, job = containers(load(name))
    assert gate["command"] == ["healthd", "preflight", "--", "true"]
    assert gate["essential"] is False, "Batch takes no SUCCESS of an essential container"
    assert job["essential"] is True
    assert job["dependsOn"] == [{"containerName": gate["name"], "condition": "SUCCESS"}]
    wait = next(one["value"] for one in gate["environment"] if one["name"] == "HEALTHD_PREFLIGHT_WAIT")
    assert int(wait.removesuffix("m")) * 60 < job["startTimeout"], "the job would be given up before the gate"


@every("name", DEFINITIONS)
def test_settings_of_the_gate_are_settings_that_healthd_has(name: str) -> None:
    for container in containers(load(name)):
        given = {one["name"]: one["value"] for one in container["environment"]}
        assert not [key for key in given if key.startswith("AWS_BATCH")], "reserved by Batch"
        mine = {key: value for key, value in given.items() if key.startswith("HEALTHD_")}
        settings = load_settings(mine)
        waits = settings.gate.wait_seconds if name == "multi-node-standing.json" else settings.preflight.wait_seconds
        assert waits == 1800
        assert settings.probe.on_cold_cache == "compile"
        assert str(settings.probe.compile_cache) in [mount["containerPath"] for mount in container["mountPoints"]]


def test_options_leave_no_placeholder_in_the_three_files_to_register(tmp_path: Path) -> None:
    """Where the aggregator or the host's package is not used, a user edits nothing by hand."""
    given = {
        "--image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:7",
        "--subnet": "subnet-0a1b",
        "--security-group": "sg-0c2d",
        "--instance-role": "arn:aws:iam::123456789012:instance-profile/hosts",
        "--checkpoint": "s3://runs/train-7b",
    }
    arguments = [word for pair in given.items() for word in pair]
    assert definitions.main(["--out", str(tmp_path), *arguments]) == 0
    names = ("launch-template.json", "compute-environment.json", "multi-node.json")
    texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in names}
    for name, text in texts.items():
        assert complaints(*OPERATIONS[name], json.loads(text)) == ""
        assert not re.search(r"0123456789abcdef0|ACCOUNT|REGION|BUCKET", text), name
    environment = json.loads(texts["compute-environment.json"])["computeResources"]
    assert environment["subnets"] == ["subnet-0a1b"]
    assert environment["instanceRole"] == given["--instance-role"]
    interfaces = json.loads(texts["launch-template.json"])["LaunchTemplateData"]["NetworkInterfaces"]
    assert {(one["SubnetId"], *one["Groups"]) for one in interfaces} == {("subnet-0a1b", "sg-0c2d")}
    (container,) = containers(json.loads(texts["multi-node.json"]))
    assert {"name": "CHECKPOINT_PATH", "value": "s3://runs/train-7b"} in container["environment"]


def test_nothing_is_mounted_over_what_the_image_has_compiled(tmp_path: Path) -> None:
    warmed = "/opt/healthd/compile-cache"
    assert definitions.main(["--out", str(tmp_path), "--warmed", warmed]) == 0
    for name in ("single-node.json", "multi-node.json", "multi-node-standing.json"):
        body = json.loads((tmp_path / name).read_text())
        assert complaints("batch", "RegisterJobDefinition", body) == ""
        (container,) = containers(body)
        given = {one["name"]: one["value"] for one in container["environment"]}
        assert given["HEALTHD_PROBE_COMPILE_CACHE"] == warmed
        mounts = [one["containerPath"] for one in container["mountPoints"]]
        assert mounts
        assert not any(warmed.startswith(path) for path in mounts)
        assert {one["sourceVolume"] for one in container["mountPoints"]} == {
            one["name"] for one in container["volumes"]
        }


def test_what_the_guide_brings_in_an_image_is_where_its_definition_looks() -> None:
    text = (ROOT / "docs/batch.md").read_text(encoding="utf-8")
    (imported,) = re.findall(r"^COPY compile-cache (\S+)$", text, re.MULTILINE)
    assert f"--warmed {imported}" in text
    assert imported not in definitions.SHARED_FOLDERS.values()


def test_a_standing_gate_is_asked_by_every_node_with_what_its_host_has_for_it() -> None:
    (container,) = containers(load("multi-node-standing.json"))
    assert container["command"] == ["/opt/healthd/gated.sh", "/opt/train/train.sh"]
    given = {one["name"]: one["value"] for one in container["environment"]}
    settings = load_settings({key: value for key, value in given.items() if key.startswith("HEALTHD_")})
    assert settings.gate.aggregator.startswith("https://")
    (folder,) = (one for one in container["mountPoints"] if one["containerPath"] == "/var/lib/healthd/host")
    assert folder["readOnly"] is True
    written = SCRIPT.read_text(encoding="ascii")
    assert f"SHARED_DIR={folder['containerPath']}\n" in written
    for file in (settings.gate.token_file, settings.gate.ca_file):
        assert str(file.parent) == folder["containerPath"]
        assert f"$SHARED_DIR/{file.name}" in written


# --- retries ----------------------------------------------------------------------------------------------------------


def batch_retries(rules: list[Mapping[str, str]], *, code: str, reason: str, status: str) -> str:
    """Batch's own rule, from its user guide: the first entry all of whose conditions match; none: RETRY."""
    told = {"onExitCode": code, "onReason": reason, "onStatusReason": status}
    for rule in rules:
        conditions = [(key, value) for key, value in rule.items() if key != "action"]
        if all(
            re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), told[key], re.DOTALL) for key, pattern in conditions
        ):
            return rule["action"]
    return "RETRY"


@every("name", DEFINITIONS)
@every(
    ("code", "reason", "status", "action"),
    [
        ("75", "", "Essential container in task exited", "RETRY"),
        ("", "", "Host EC2 (instance i-0123456789abcdef0) terminated.", "RETRY"),
        ("", "CannotPullContainerError: pull access denied", "Task failed to start", "RETRY"),
        ("1", "", "Essential container in task exited", "EXIT"),
        ("2", "", "Essential container in task exited", "EXIT"),
        ("137", "OutOfMemoryError: Container killed", "Essential container in task exited", "EXIT"),
        ("139", "", "Essential container in task exited", "EXIT"),
        ("175", "", "Essential container in task exited", "EXIT"),
        ("", "", "", "EXIT"),
    ],
)
def test_only_what_another_attempt_can_help_is_tried_again(
    name: str, code: str, reason: str, status: str, action: str
) -> None:
    strategy = load(name)["retryStrategy"]
    assert 1 < strategy["attempts"] <= 10
    assert len(strategy["evaluateOnExit"]) <= 5
    assert batch_retries(strategy["evaluateOnExit"], code=code, reason=reason, status=status) == action


def test_without_the_catch_all_a_broken_script_would_run_five_times() -> None:
    rules = load("multi-node.json")["retryStrategy"]["evaluateOnExit"]
    assert batch_retries(rules[:-1], code="1", reason="", status="Essential container in task exited") == "RETRY"


def test_the_code_that_is_tried_again_is_the_one_that_the_gate_ends_with() -> None:
    from healthd.hooks.preflight.hook import NOT_ADMITTED

    assert str(NOT_ADMITTED) == definitions.NOT_ADMITTED


@pytest.mark.parametrize(("outlook", "code"), EXIT_CODES.items())
def test_a_job_below_a_parent_is_tried_again_where_its_verdict_says_so(outlook: str, code: int) -> None:
    definition = load("multi-node-run.json")
    rules = definition["retryStrategy"]["evaluateOnExit"]
    retried = batch_retries(rules, code=str(code), reason="", status="Essential container in task exited") == "RETRY"
    assert retried == outlook.startswith("retry")
    (container,) = containers(definition)
    options = container["command"][2 : container["command"].index("--")]
    asked = preflight.make_context("preflight", [*options, "--", "true"], resilient_parsing=True).params
    assert (asked["run"], asked["exit_style"]) == (True, "verdict")


def test_the_main_node_of_the_definition_is_the_one_whose_gate_leads() -> None:
    nodes = load("multi-node.json")["nodeProperties"]
    environ = {
        "AWS_BATCH_JOB_ID": "j",
        "AWS_BATCH_JOB_NUM_NODES": str(nodes["numNodes"]),
        "AWS_BATCH_JOB_NODE_INDEX": str(nodes["mainNode"]),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(nodes["mainNode"]),
    }
    place = launcher.find(environ)
    assert place is not None
    assert place.rank == 0
    assert nodes["nodeRangeProperties"][0]["targetNodes"] == "0:"


# --- machines ---------------------------------------------------------------------------------------------------------


def test_the_launch_template_has_one_efa_interface_on_each_network_card() -> None:
    data = load("launch-template.json")["LaunchTemplateData"]
    cards = data["NetworkInterfaces"]
    assert [card["NetworkCardIndex"] for card in cards] == list(range(8))
    assert [card["DeviceIndex"] for card in cards] == [0, *itertools.repeat(1, 7)]
    assert {card["InterfaceType"] for card in cards} == {"efa"}
    assert data["MetadataOptions"]["HttpTokens"] == "required"


def test_user_data_is_mime_multi_part_as_batch_wants_it_and_holds_the_script() -> None:
    encoded = load("launch-template.json")["LaunchTemplateData"]["UserData"]
    raw = base64.b64decode(encoded, validate=True)
    assert len(raw) <= 16_384, "EC2 takes no more"
    message = email.message_from_bytes(raw)
    assert message.get_content_type() == "multipart/mixed"
    (part,) = message.get_payload()
    assert part.get_content_type() == "text/x-shellscript"
    assert part.get_payload().strip() == SCRIPT.read_text(encoding="ascii").strip()


@pytest.mark.parametrize("page", ["batch.md", "sagemaker.md"])
def test_settings_in_the_docs_are_settings_that_healthd_has(page: str, tmp_path: Path) -> None:
    from healthd.cli.settings.tree import Settings
    from healthd.core.config import load as load_config

    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    example = {
        "WAIT": "1m",
        "MODE": "observe",
        "TOKEN_FILE": "/t",
        "ATTEMPT": "1",
        "ON_COLD_CACHE": "compile",
        "RUN": "true",
    }
    for variable in set(re.findall(r"HEALTHD_(?:PREFLIGHT|PROBE)_[A-Z_]+", text)):
        load_settings({variable: example.get(variable.split("_", 2)[2], "/x")})
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)):
        file = tmp_path / f"{number}.toml"
        file.write_text(block, encoding="utf-8")
        defaults = {"node.name": "n", "node.state_dir": Path("/s"), "node.run_dir": Path("/r")}
        settings = load_config(Settings, file=file, environ={}, arguments={}, defaults=defaults)
        assert settings.actuator.kind == "batch"
        assert settings.actuator.mode == "observe"
        drained = settings.actuator.of("batch", BatchActuatorSettings).compute_environments
        assert drained == (load("compute-environment.json")["computeEnvironmentName"],)
