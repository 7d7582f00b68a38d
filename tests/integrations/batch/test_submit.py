"""Submit, follow, submit anew, against moto's server: what is worth another job, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tenacity", reason="tenacity is not installed: pip install '.[aws]'")
from deploy.batch import definitions, hosts, submit
from deploy.batch.submit import End, Order, Patience
from tests.deploy.aws_kit import complaints
from tests.every import every
from tests.integrations.batch import moto_kit
from tests.integrations.batch.batch_kit import ROOT, load
from tests.integrations.batch.moto_kit import Aws

FAIL = "MOTO_SIMPLE_BATCH_FAIL_AFTER"  # set: every job that is submitted fails at once
ORDER = Order(job="train-1", queue="queue", definition="train", checkpoint="s3://b/train-1")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [(["--help"], 0, ""), (["--job", "a", "--queue", "q", "--definition", "d"], 2, "boto3 is not installed")],
)
def test_help_needs_none_of_the_packages(arguments: list[str], code: int, told: str) -> None:
    program = f"""
import sys
sys.modules.update(tenacity=None, boto3=None)
from deploy.batch import submit
sys.exit(submit.main({arguments!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr


@pytest.fixture(scope="module")
def aws() -> Iterator[Aws]:
    with moto_kit.running() as aws:
        batch = aws.client("batch")
        role = aws.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        made = batch.create_compute_environment(
            computeEnvironmentName="nodes", type="UNMANAGED", state="ENABLED", serviceRole=role
        )["computeEnvironmentArn"]
        order = [{"order": 1, "computeEnvironment": made}]
        batch.create_job_queue(jobQueueName="queue", state="ENABLED", priority=1, computeEnvironmentOrder=order)
        machine = hosts.MACHINES["trn1.32xlarge"]
        body = definitions.multi_node("train", machine, "image", ["train.sh"], nodes=2, apart=False)
        batch.register_job_definition(**body)
        yield aws


@pytest.fixture(autouse=True)
def no_failing_jobs() -> Iterator[None]:
    os.environ.pop(FAIL, None)
    yield
    os.environ.pop(FAIL, None)


class Course:
    """
    How the jobs end, one after another, and what is seen on the way.

    An end is an exit code, None for none, or a text: Batch's reason with no code. The job after the last one succeeds.
    """

    def __init__(self, aws: Aws, *ends: int | str | None) -> None:
        self.lines: list[str] = []
        self.pauses: list[float] = []
        self.submitted: list[str] = []
        self._aws, self._ends = aws, list(ends)
        self._set()

    def _set(self) -> None:
        if self._ends:
            os.environ[FAIL] = "0"
        else:
            os.environ.pop(FAIL, None)

    def say(self, line: str) -> None:
        self.lines.append(line)
        if "submitted as" in line:
            self.submitted.append(line.partition(":")[0])
            if self._ends:
                end = self._ends.pop(0)
                code, reason = (None, end) if isinstance(end, str) else (end, None)
                self._aws.end_job(self.submitted[-1], code, reason=reason)
            self._set()

    def run(self, order: Order, patience: Patience | None = None) -> End:
        batch = self._aws.client("batch")
        return submit.run(batch, order, patience or Patience(), sleep=self.pauses.append, say=self.say)


def order(name: str, **changes: Any) -> Order:
    return Order(**{**vars(ORDER), "job": name, **changes})


def test_a_job_that_was_not_admitted_is_submitted_again_and_succeeds(aws: Aws) -> None:
    course = Course(aws, 75, 75)
    assert course.run(order("a")) is End.SUCCEEDED
    assert len(course.submitted) == 3
    assert course.pauses == [60.0, 120.0]
    jobs = aws.client("batch").describe_jobs(jobs=course.submitted)["jobs"]
    assert [job["status"] for job in jobs] == ["FAILED", "FAILED", "SUCCEEDED"]


def test_a_host_that_went_away_is_no_fault_of_the_job(aws: Aws) -> None:
    course = Course(aws, "Host EC2 (instance i-0123456789abcdef0) terminated.")
    assert course.run(order("b")) is End.SUCCEEDED
    assert len(course.submitted) == 2


@pytest.mark.parametrize("end", [1, 2, 137, None, "Task failed to start"])
def test_a_fault_of_the_job_itself_or_an_end_that_nobody_tells_is_not_submitted_again(
    aws: Aws, end: int | str | None
) -> None:
    course = Course(aws, end, 75)
    assert course.run(order(f"c-{str(end).replace(' ', '-')}")) is End.FAILED
    assert len(course.submitted) == 1
    assert course.pauses == []


def test_after_so_many_jobs_it_is_told_that_none_was_admitted(aws: Aws) -> None:
    course = Course(aws, 75, 75, 75, 75)
    assert course.run(order("d"), Patience(jobs=3)) is End.NOT_ADMITTED
    assert len(course.submitted) == 3
    assert submit.EXIT_CODES[End.NOT_ADMITTED] == 75


def test_a_job_of_this_name_that_is_still_open_is_adopted_and_not_submitted_twice(aws: Aws) -> None:
    batch = aws.client("batch")
    job_id = batch.submit_job(jobName="e", jobQueue="queue", jobDefinition="train")["jobId"]
    aws.reopen(job_id)
    course = Course(aws)

    def sleep(seconds: float) -> None:
        course.pauses.append(seconds)
        if len(course.pauses) == 3:
            aws.close(job_id)

    end = submit.run(batch, order("e"), Patience(), sleep=sleep, say=course.say)
    assert end is End.SUCCEEDED
    assert course.submitted == []
    assert course.pauses == [5.0, 10.0, 20.0]
    assert any("adopted" in line for line in course.lines)


def test_a_definition_that_is_not_there_is_named(aws: Aws) -> None:
    with pytest.raises(ValueError, match=r"nowhere: Batch has no active job definition"):
        Course(aws).run(order("f", definition="nowhere"))


@pytest.mark.parametrize(
    "name", ["single-node.json", "single-node-container.json", "multi-node.json", "multi-node-container.json"]
)
def test_the_checkpoint_reaches_every_container_of_every_shape(name: str) -> None:
    definition = load(name)
    nodes = 8 if "nodeProperties" in definition else None
    request = submit.request_of(order("g", nodes=nodes), definition)
    assert complaints("batch", "SubmitJob", request) == ""
    found = list(environments(request))
    assert found == [[{"name": "CHECKPOINT_PATH", "value": "s3://b/train-1"}]] * (2 if "container.json" in name else 1)
    if nodes:
        assert request["nodeOverrides"]["numNodes"] == 8


def test_nodes_of_a_single_node_definition_are_an_error() -> None:
    with pytest.raises(ValueError, match="is for one node"):
        submit.request_of(order("h", nodes=2), load("single-node.json"))


def environments(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "environment":
                yield one
            else:
                yield from environments(one)
    elif isinstance(value, list):
        for one in value:
            yield from environments(one)


@every(
    ("job", "main", "end"),
    [
        ({"status": "SUCCEEDED"}, None, End.SUCCEEDED),
        ({"status": "FAILED", "container": {"exitCode": 75}}, None, End.NOT_ADMITTED),
        ({"status": "FAILED", "attempts": [{"container": {"exitCode": 1}}]}, None, End.FAILED),
        # Only the last attempt counts.
        (
            {"status": "FAILED", "attempts": [{"container": {"exitCode": 75}}, {"container": {"exitCode": 1}}]},
            None,
            End.FAILED,
        ),
        # The gate in a container of its own.
        (
            {"status": "FAILED", "attempts": [{"taskProperties": [{"containers": [{"exitCode": 75}, {}]}]}]},
            None,
            End.NOT_ADMITTED,
        ),
        # A multi-node job tells nothing itself, its main node does.
        ({"status": "FAILED", "attempts": []}, {"container": {"exitCode": 75}}, End.NOT_ADMITTED),
        ({"status": "FAILED"}, {"statusReason": "Host EC2 (instance i-1) terminated."}, End.HOST_LOST),
        ({"status": "FAILED"}, None, End.FAILED),
        # A person ended it while the gate asked.
        ({"status": "FAILED", "isTerminated": True, "container": {"exitCode": 75}}, None, End.FAILED),
        ({"status": "FAILED", "isCancelled": True, "statusReason": "Host EC2 x"}, None, End.FAILED),
        # A lost host whose job had ended before by a code of its own.
        ({"status": "FAILED", "statusReason": "Host EC2 x", "container": {"exitCode": 3}}, None, End.FAILED),
    ],
)
def test_how_a_job_ended(job: dict[str, Any], main: dict[str, Any] | None, end: End) -> None:
    assert submit.judge(job, main)[0] is end


codes = st.none() | st.integers(-1, 300) | st.text(max_size=3)
container = st.fixed_dictionaries({}, optional={"exitCode": codes, "reason": st.text(max_size=9)})
task = st.fixed_dictionaries({}, optional={"containers": st.none() | st.lists(container, max_size=2)})
attempt = st.fixed_dictionaries(
    {}, optional={"container": st.none() | container, "taskProperties": st.none() | st.lists(task, max_size=2)}
)
described = st.fixed_dictionaries(
    {"status": st.sampled_from(["FAILED", "", "NEW"])},
    optional={
        "statusReason": st.none() | st.sampled_from(["Host EC2 gone", "other", ""]),
        "attempts": st.none() | st.lists(attempt, max_size=3),
        "container": st.none() | container,
        "nodeProperties": st.just({}),
    },
)


@given(described, st.none() | described)
def test_whatever_batch_leaves_out_nothing_but_its_own_word_is_a_success(job: Any, main: Any) -> None:
    end, why = submit.judge(job, main)
    assert end is not End.SUCCEEDED
    assert why
    if end is End.NOT_ADMITTED:
        assert "75" in repr(job) + repr(main)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job", "-x", "--queue", "queue", "--definition", "d"],
        ["--job", "x" * 129, "--queue", "queue", "--definition", "d"],
        ["--job", "x", "--queue", "queue", "--definition", "d", "--jobs", "0"],
        ["--job", "x", "--queue", "queue", "--definition", "d", "--nodes", "0"],
        ["--queue", "queue", "--definition", "d"],
    ],
)
def test_what_cannot_be_meant_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        submit.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_what_aws_refuses_is_one_line_and_exit_code_2(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": aws.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": moto_kit.REGION,
    }.items():
        monkeypatch.setenv(name, value)
    common = ["--job", "z", "--definition", "train"]
    assert submit.main([*common, "--queue", "queue"]) == 0
    assert "succeeded" in capsys.readouterr().err
    assert submit.main([*common, "--queue", "nowhere"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert "nowhere" in error[-1]


def test_without_the_extra_it_says_what_to_install() -> None:
    """Of an interpreter without any package, as a person's own is."""
    line = [sys.executable, "-I", "-S", submit.__file__, "--job", "j", "--queue", "q", "--definition", "d"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "pip install '.[aws]'" in done.stderr
