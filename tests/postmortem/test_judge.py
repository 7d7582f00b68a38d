"""From lines and facts to a verdict: each signature in its real form and in noise, the chain of events, and honesty."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from checks.reasons import REASONS
from healthd.postmortem.catalogue import BY_NAME, SIGNATURES, Kind, Outlook, Place, Signature, Strength, Subject
from healthd.postmortem.judge import KIND_OF_REASON, Case, FailedCheck, Late, Measured, Stop, judge
from healthd.postmortem.observations import KEYS, SURVIVED_STEPS, Ended, Line, find, lines_of
from healthd.postmortem.verdicts import FAILED, OPEN, PASSED, row_of

EXAMPLES = {signature.name: signature.examples[0] for signature in SIGNATURES}
NOISE = "step {0} loss 2.31{0:03d} tokens/s 41{0:03d}"
NODE_PASSED = (Measured(node="n1", tier="quick", status="pass"),)


SUMMARY = """\
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_10:00:05
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 100)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_10:00:01
  host      : n1
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 103)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 103"""


def case(*texts: str, kernel: bool = False, **more: object) -> Case:
    lines = lines_of("n1", "stderr", [(100.0 + at, f"{text}\n") for at, text in enumerate(texts)])
    given: dict[str, object] = {"ended": (Ended(node="n1", rank=None, at=105.0 + len(texts), code=1),), **more}
    return dataclasses.replace(Case(lines=tuple(dataclasses.replace(line, kernel=kernel) for line in lines)), **given)


def noise(count: int) -> list[str]:
    return [NOISE.format(number) for number in range(count)]


def expected(signature: Signature) -> Kind:
    """What is said of a job of which only this line is known: a mention and a consequence explain nothing."""
    return signature.kind if signature.strength in (Strength.FACT, Strength.REPORT) else Kind.UNKNOWN


def for_each(signatures: Iterable[Signature]) -> Callable[[Callable[[Signature], None]], Callable[[], None]]:
    """One test over many signatures: as a test of its own each would cost more than what it does."""

    def decorate(test: Callable[[Signature], None]) -> Callable[[], None]:
        def over_all() -> None:
            for signature in signatures:
                try:
                    test(signature)
                except AssertionError as error:
                    raise AssertionError(f"{signature.name}: {error}") from error

        return over_all

    return decorate


FORMS: Mapping[str, Callable[[str], list[str]]] = {
    "alone": lambda text: [text],
    "after noise": lambda text: [*noise(60), text],
    "between noise": lambda text: [*noise(30), text, *noise(20)],
    "coloured": lambda text: [f"\x1b[1m\x1b[31m{text}\x1b[0m"],
    "with a title of the terminal": lambda text: [f"\x1b]0;train\x07{text}"],
    "after a progress bar": lambda text: [f"  5%|#    | 1/20\r 10%|##   | 2/20\r{text}"],
    "below a traceback": lambda text: [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        text,
    ],
    "in another line's middle": lambda text: ["é" * 50, text, "\x00\xff binary"],
}


@for_each(SIGNATURES)
def test_signature_is_found_in_its_real_form(signature: Signature) -> None:
    kind = expected(signature)
    for form, texts in FORMS.items():
        given = case(*texts(EXAMPLES[signature.name]), kernel=signature.kernel)
        verdict = judge(given)
        assert verdict.kind is kind, form
        assert kind is Kind.UNKNOWN or verdict.name == signature.name, form
        found = {finding.signature.name for finding in find(given.lines)}
        assert (signature.name in found) is (signature.strength is not Strength.MENTION), form


@for_each(each for each in SIGNATURES if not each.kernel and each.strength is not Strength.MENTION)
def test_signature_is_given_to_its_rank_among_interleaved_ones(signature: Signature) -> None:
    others = [f"[rank{number % 4}]: {NOISE.format(number)}" for number in range(40)]
    verdict = judge(case(*others[:30], f"[rank2]: {EXAMPLES[signature.name]}", *others[30:]))
    (finding,) = find(case(f"[rank2]: {EXAMPLES[signature.name]}").lines)
    told = re.search(r"\b(?:task|Rank|rank) (\d+)", EXAMPLES[signature.name])
    names = "(?P<rank" in str(signature.patterns)
    assert finding.rank == (int(told[1]) if told and names else 2)
    if expected(signature) is not Kind.UNKNOWN and signature.subject in (Subject.RANK, Subject.DEVICE, Subject.NODE):
        assert verdict.rank == finding.rank


@for_each(each for each in SIGNATURES if not each.kernel)
def test_text_that_was_cut_never_accuses_the_hardware_or_the_data_instead(signature: Signature) -> None:
    text = EXAMPLES[signature.name]
    for length in range(0, len(text), 17):
        verdict = judge(case(text[:length]))
        assert verdict.kind in (signature.kind, Kind.UNKNOWN, Kind.SOFTWARE), text[:length]
        assert verdict.kind is signature.kind or verdict.suspected or verdict.kind is Kind.UNKNOWN


@for_each(SIGNATURES)
def test_signature_has_all_that_a_reader_needs(signature: Signature) -> None:
    assert signature.source.startswith("https://")
    for text in (signature.suggests, signature.settles, signature.action):
        assert text.endswith(".")
    assert signature.others
    assert not signature.search(NOISE.format(1))


def test_no_signature_takes_the_line_of_another_one() -> None:
    for signature in SIGNATURES:
        alike = [each for each in SIGNATURES if each.kernel == signature.kernel]
        assert signature.examples
        for text in signature.examples:
            assert next(each.name for each in alike if each.search(text)) == signature.name, text
        for text in signature.negative:
            assert not signature.search(text), text


def test_table_of_verdicts_has_a_row_for_everything() -> None:
    for strength in (Strength.FACT, Strength.REPORT, None):
        for kind in Kind if strength is not None else (Kind.UNKNOWN,):
            for measurement in (FAILED, PASSED, OPEN):
                for program, own in itertools.product((True, False), repeat=2):
                    row = row_of(strength, kind, measurement, program=program, own=own)
                    certain = not row.suspected and (row.kind or kind) is Kind.HARDWARE
                    assert not certain or strength is Strength.FACT or measurement == FAILED
                    certain = not row.suspected and (row.kind or kind) is Kind.SOFTWARE
                    assert not certain or strength is Strength.FACT or measurement == PASSED


def test_texts_in_other_locales_are_known_by_their_numbers() -> None:
    for text, kind in (
        ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/x'", Kind.STORAGE),
        ("OSError: [Errno 28] Aucun espace disponible sur le périphérique", Kind.STORAGE),
        ("OSError: [Errno 24] 打开的文件过多: '/data'", Kind.HOST),
        ("OSError: [Errno 5] Eingabe-/Ausgabefehler", Kind.STORAGE),
        ("OSError: [Errno 113] Keine Route zum Zielrechner", Kind.NETWORK),
    ):
        assert judge(case(text)).kind is kind, text


@pytest.mark.parametrize(
    "text",
    [
        "step 10 loss 0.31 no error",
        "INFO retry policy: on errors 3 times",
        "loss: nan-safe scaling is on",
        "Killed 3 stale workers at start",
        "epoch 3: exception rate 0.0",
        "NCCL INFO comm 0x1 rank 0 nranks 8 cudaDev 0 busId 1000 - Init COMPLETE",
        "UserWarning: something is deprecated",
        "NCCL INFO NET/OFI Selected Provider is efa",
    ],
)
def test_ordinary_lines_are_no_findings(text: str) -> None:
    assert find(case(text).lines) == []


@pytest.mark.parametrize(
    ("texts", "kind", "rank"),
    [
        # The watchdog of another library repeats an error of the device: it is that of the device.
        (["[rank29]:[E1002 12:20:55.1 ProcessGroupNCCL.cpp:1923] [PG ID 5 PG GUID 83(TP) Rank 1] "
          "Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure"],
         Kind.SOFTWARE, 29),
        # A group's own count of its members is no rank of the job.
        (["[E1002 12:20:55.1 ProcessGroupNCCL.cpp:1923] [PG ID 5 PG GUID 83(TP) Rank 1] x", "ValueError: y"],
         Kind.SOFTWARE, None),
        # Warned of at the start, tried again, and well.
        (["[W1120 10:00:00.1 socket.cpp:697] [c10d] The client socket has timed out after 1s",
          "WARNING: [Errno 104] Connection reset by peer", "ValueError: y"], Kind.SOFTWARE, None),
        (["Timeout waiting for RX - retrying", "RX, connection closed by remote peer"], Kind.UNKNOWN, None),
        (["(TrainWorker pid=950, ip=10.67.132.202) ValueError: y"], Kind.SOFTWARE, None),
        (["2026-11-20T10:00:00.123456789Z stderr F [rank4]: ValueError: y"], Kind.SOFTWARE, 4),
        (["2026-11-20T10:00:00.123456789Z stderr F OSError: [Errno 28] No space left on device"], Kind.STORAGE, None),
        (["worker-1: ValueError: y"], Kind.SOFTWARE, None),
        (["[1,26]<stderr>:ValueError: y"], Kind.SOFTWARE, 26),
        (["terminate called after throwing an instance of 'c10::DistBackendError'"], Kind.UNKNOWN, None),
        (["train.sh: line 21: 4711 Segmentation fault      (core dumped) python train.py"], Kind.SOFTWARE, None),
        (["train.sh: line 21: 4711 Killed                  python train.py"], Kind.UNKNOWN, None),
        (["E0813 06:19:49.8 1 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) "
          "local_rank: 2 (pid: 161617) of binary: /usr/bin/python3.11"], Kind.SOFTWARE, None),
        (["NCCL WARN Cuda failure 'out of memory'"], Kind.SOFTWARE, None),
        (["srun: error: n2: task 3: Exited with exit code 1", EXAMPLES["Slurm cancellation"]], Kind.UNKNOWN, 3),
        ([EXAMPLES["NCCL timeout"], *SUMMARY.format(code=-6).replace("SEGV", "ABRT").splitlines()],
         Kind.UNKNOWN, None),
        (["[launch.py:319:sigkill_handler] Killing subprocess 4", "[launch.py:325] cmd exits with return code = -11"],
         Kind.SOFTWARE, None),
        (["OSError: libcudart.so.12: cannot open shared object file: No such file or directory"], Kind.SOFTWARE, None),
        (["1: [NMGR:exec_wait] Inference completed with err; nrt status code 1004, details x"], Kind.UNKNOWN, None),
    ],
)  # fmt: skip
def test_forms_that_logs_have_in_the_wild(texts: list[str], kind: Kind, rank: int | None) -> None:
    verdict = judge(case(*texts))
    assert (verdict.kind, verdict.rank) == (kind, rank)
    assert verdict.suspected or kind in (Kind.UNKNOWN, Kind.STORAGE)


def test_a_copy_of_the_kernel_log_in_the_output_proves_nothing() -> None:
    verdict = judge(case(EXAMPLES["GPU fell off the bus or asks for a reset"]))
    assert (verdict.kind, verdict.suspected) == (Kind.HARDWARE, True)


def test_what_the_job_survived_is_no_cause() -> None:
    early = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert find(case(early, *noise(SURVIVED_STEPS + 1)).lines) == []
    assert len(find(case(early, *noise(SURVIVED_STEPS - 1)).lines)) == 1


def test_the_first_rank_is_told_from_those_that_waited_for_it() -> None:
    verdict = judge(
        case(
            "[rank3]: ValueError: label 17 is out of range",
            *(f"[rank{rank}]: {EXAMPLES['gloo lost a peer or waited in vain']}" for rank in (0, 1, 2)),
            EXAMPLES["ended by its launcher"],
        )
    )
    assert (verdict.kind, verdict.rank, verdict.waited) == (Kind.SOFTWARE, 3, (0, 1, 2))
    assert [each.place for each in verdict.evidence][:2] == [Place.INITIATING, Place.CASCADE]


def test_order_of_arrival_does_not_matter_where_times_are_known() -> None:
    early = list(lines_of("n2", "stderr", [(50.0, "[rank9]: OSError: [Errno 28] No space left on device\n")]))
    late = list(lines_of("n1", "stderr", [(60.0, "[rank1]: ValueError: x\n")]))
    for lines in (early + late, late + early):
        verdict = judge(Case(lines=tuple(lines)))
        assert (verdict.kind, verdict.rank, verdict.node) == (Kind.STORAGE, 9, "n2")


def test_an_exception_that_follows_a_lost_peer_is_no_cause() -> None:
    lost = EXAMPLES["gloo lost a peer or waited in vain"]
    verdict = judge(
        case(lost, "During handling of the above exception, another exception occurred:", "RuntimeError: x")
    )
    assert verdict.kind is Kind.UNKNOWN


def test_the_kernels_finding_explains_the_text_that_it_caused() -> None:
    lines = (
        Line(node="n1", source="stderr", text="RuntimeError: CUDA error: unspecified launch failure", rank=2, at=100.0),
        Line(
            node="n1",
            source="kernel log",
            text=EXAMPLES["GPU fell off the bus or asks for a reset"],
            at=100.4,
            kernel=True,
        ),
    )
    verdict = judge(Case(lines=lines))
    assert (verdict.kind, verdict.suspected, verdict.confidence) == (Kind.HARDWARE, False, "high")
    assert verdict.outlook is Outlook.ELSEWHERE


def test_nothing_is_unknown() -> None:
    for given in (case(), case(*noise(50)), case("something odd happened")):
        verdict = judge(given)
        assert (verdict.kind, verdict.confidence, verdict.node) == (Kind.UNKNOWN, "low", None)


@for_each(each for each in SIGNATURES if expected(each) is Kind.HARDWARE)
def test_hardware_is_only_said_where_measured_or_found_by_the_kernel(signature: Signature) -> None:
    text = EXAMPLES[signature.name]
    verdict = judge(case(text, kernel=signature.kernel))
    assert verdict.suspected is (signature.strength is not Strength.FACT)
    problem = FailedCheck(reason="WrongResult", target="gpu:3", message="1 of 262144 elements")
    failed = Measured(node="n1", tier="quick", status="fail", problems=(problem,))
    confirmed = judge(case(text, kernel=signature.kernel, measured=(failed,)))
    assert (confirmed.kind, confirmed.suspected, confirmed.confidence) == (Kind.HARDWARE, False, "high")


@pytest.mark.parametrize("name", ["Neuron DMA error", "Neuron DMA abort"])
def test_what_a_program_can_cause_is_not_the_device_where_that_passes(name: str) -> None:
    verdict = judge(case(EXAMPLES[name], kernel=BY_NAME[name].kernel, measured=NODE_PASSED))
    assert (verdict.kind, verdict.suspected) == (Kind.SOFTWARE, True)


@for_each(each for each in SIGNATURES if each.kind is Kind.SOFTWARE and each.place is Place.INITIATING)
def test_software_is_only_said_where_the_nodes_passed(signature: Signature) -> None:
    text = EXAMPLES[signature.name]
    assert judge(case(text, kernel=signature.kernel)).suspected
    assert not judge(case(text, kernel=signature.kernel, measured=NODE_PASSED)).suspected
    silent = (Measured(node="n1", tier="quick", status="unknown", note="Busy: x"),)
    assert judge(case(text, kernel=signature.kernel, measured=silent)).suspected
    two = (Ended(node="n1", rank=None, at=105.0, code=1), Ended(node="n2", rank=None, at=105.0, code=1))
    assert judge(case(text, kernel=signature.kernel, measured=NODE_PASSED, ended=two)).suspected  # n2 has not passed


def test_a_device_that_computes_wrongly_explains_an_exception_and_a_full_disk_does_not() -> None:
    def failed(reason: str) -> tuple[Measured, ...]:
        problem = FailedCheck(reason=reason, target="node", message="m")
        return (Measured(node="n1", tier="quick", status="fail", problems=(problem,)),)

    text = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)"
    assert judge(case(text, measured=failed("WrongResult"))).kind is Kind.HARDWARE
    other = judge(case(text, measured=failed("DiskFull")))
    assert (other.kind, other.suspected) == (Kind.SOFTWARE, True)
    assert "DiskFull" in other.measurement


def test_a_device_of_another_node_and_a_slow_one_are_not_said_to_be_the_cause() -> None:
    def failed(reason: str, node: str) -> tuple[Measured, ...]:
        problem = FailedCheck(reason=reason, target="gpu:1", message="m")
        return (Measured(node=node, tier="quick", status="fail", problems=(problem,)),)

    lost = "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<1> with error 12, opcode 0, len 0, vendor err 129"
    other = judge(case(f"[rank1]: {lost}", measured=failed("DeviceLost", "n2")))
    assert (other.kind, other.suspected, other.node, other.rank) == (Kind.HARDWARE, True, "n2", None)
    assert other.evidence[0].node == "n1"
    own = judge(case(f"[rank1]: {lost}", measured=failed("DeviceLost", "n1")))
    assert (own.kind, own.suspected, own.node, own.rank) == (Kind.HARDWARE, True, "n1", None)
    slow = judge(case(f"[rank1]: {lost}", measured=failed("Throttled", "n1")))
    assert (slow.kind, slow.node) == (Kind.UNKNOWN, None)
    killed = (Ended(node="n1", rank=1, at=1.0, code=137, signal=9),)
    silent = judge(case(ended=killed, measured=failed("WrongResult", "n1")))
    assert (silent.kind, silent.suspected) == (Kind.HARDWARE, True)


def test_what_fails_now_is_only_suspected_where_the_output_says_nothing() -> None:
    failed = Measured(node="n1", tier="passive", status="fail",
                      problems=(FailedCheck(reason="EccErrors", target="gpu:1", message="2"),))  # fmt: skip
    verdict = judge(case(measured=(failed,)))
    assert (verdict.kind, verdict.suspected, verdict.node) == (Kind.HARDWARE, True, "n1")


def test_reporter_of_an_error_in_collectives_is_not_accused() -> None:
    verdict = judge(case(f"[rank5]: {EXAMPLES['Neuron waits for another worker']}"))
    assert (verdict.kind, verdict.rank, verdict.waited) == (Kind.UNKNOWN, None, (5,))


@pytest.mark.parametrize(
    ("by", "pid", "uid", "number", "name", "outlook"),
    [
        ("the terminal", 0, 0, 2, "stopped from the terminal", Outlook.STOPPED),
        ("bash", 7, 1000, 2, "stopped from the terminal", Outlook.STOPPED),
        ("slurmstepd", 7, 0, 15, "stopped by a scheduler or container runtime", Outlook.ELSEWHERE),
        ("", 0, 0, 15, "stopped by a scheduler or container runtime", Outlook.ELSEWHERE),
        ("bash", 7, 0, 15, "stopped by a signal from outside", Outlook.STOPPED),
    ],
)
def test_who_stopped_it(by: str, pid: int, uid: int, number: int, name: str, outlook: Outlook) -> None:
    stop = Stop(node="n1", at=100.0, signal=number, by=by, pid=pid, uid=uid)
    ended = (Ended(node="n1", rank=None, at=101.0, code=128 + number, signal=number),)
    verdict = judge(case(stops=(stop,), ended=ended))
    assert (verdict.kind, verdict.suspected, verdict.name, verdict.outlook) == (Kind.STOPPED, False, name, outlook)


def test_a_failure_before_the_stop_is_the_cause_of_both() -> None:
    stop = Stop(node="n1", at=500.0, signal=15, by="slurmstepd", pid=7, uid=0)
    assert judge(case("OSError: [Errno 28] x", stops=(stop,))).kind is Kind.STORAGE


def test_a_stop_after_the_ranks_have_lost_each_other_is_not_the_cause() -> None:
    stop = Stop(node="n1", at=500.0, signal=15, by="slurmstepd", pid=7, uid=0)
    assert judge(case(EXAMPLES["NCCL timeout"], stops=(stop,))).kind is Kind.UNKNOWN
    assert judge(case(EXAMPLES["NCCL timeout"], stops=(dataclasses.replace(stop, at=50.0),))).kind is Kind.STOPPED


def test_a_rank_that_its_launcher_ended_is_no_cause() -> None:
    stop = Stop(node="n1", at=99.0, signal=15, by="torchrun", pid=7, uid=0)
    ended = (Ended(node="n1", rank=1, at=101.0, code=143, signal=15),)
    assert judge(case(stops=(stop,), ended=ended)).kind is Kind.UNKNOWN


def test_oom_kill_is_known_by_the_count_of_the_control_group() -> None:
    ended = (Ended(node="n1", rank=1, at=101.0, code=137, signal=9),)
    killed = judge(case(ended=ended, oom_kills={"n1": 2}))
    assert (killed.kind, killed.suspected, killed.rank) == (Kind.HOST, False, 1)
    other = judge(case(ended=ended, oom_kills={"n1": 0}))
    assert other.kind is Kind.UNKNOWN
    assert "no OOM kill" in other.sentence


@pytest.mark.parametrize(
    ("number", "kind"), [(11, Kind.SOFTWARE), (7, Kind.HOST), (6, Kind.SOFTWARE), (4, Kind.SOFTWARE)]
)
def test_crash_without_a_word(number: int, kind: Kind) -> None:
    verdict = judge(case(ended=(Ended(node="n1", rank=2, at=1.0, code=128 + number, signal=number),)))
    assert (verdict.kind, verdict.suspected, verdict.rank) == (kind, True, 2)


def test_oom_kill_of_another_job_on_the_node_is_not_ours() -> None:
    text = EXAMPLES["kernel OOM kill"]
    assert judge(case(text, kernel=True, oom_kills={"n1": 0})).kind is Kind.UNKNOWN
    assert judge(case(text, kernel=True, oom_kills={"n1": 1})).kind is Kind.HOST
    assert judge(case(text, kernel=True)).kind is Kind.HOST


@pytest.mark.parametrize(("code", "kind"), [(-11, Kind.SOFTWARE), (1, Kind.UNKNOWN), (-9, Kind.UNKNOWN)])
def test_first_rank_by_torchruns_summary(code: int, kind: Kind) -> None:
    verdict = judge(case(*SUMMARY.format(code=code).splitlines()))
    assert (verdict.kind, verdict.rank) == (kind, 3)


def test_rank_that_ended_early_without_an_error() -> None:
    ended = (Ended(node="n1", rank=0, at=10.0, code=0), Ended(node="n1", rank=1, at=12.0, code=1))
    verdict = judge(case(f"[rank1]: {EXAMPLES['gloo lost a peer or waited in vain']}", ended=ended))
    assert (verdict.kind, verdict.suspected, verdict.rank) == (Kind.SOFTWARE, True, 0)


def test_rank_of_which_there_is_no_word_is_named_where_all_others_waited() -> None:
    waited = [f"[rank{rank}]: {EXAMPLES['gloo lost a peer or waited in vain']}" for rank in (0, 1, 3)]
    verdict = judge(case(*waited, world_size=4))
    assert (verdict.kind, verdict.rank, verdict.waited) == (Kind.UNKNOWN, 2, (0, 1, 3))
    assert judge(case(*waited[:2], world_size=4)).rank is None  # two are silent: nobody is named


def test_what_was_measured_is_told_run_by_run_also_where_a_reason_has_several_parts() -> None:
    kept_out = Measured(node="n1", tier="quick", status="unknown", note="n1 is quarantined; seen once; out for 10 min")
    verdict = judge(case("x", measured=(*NODE_PASSED, kept_out)))
    told = ["n1: quick tier pass", "n1: quick tier unknown (n1 is quarantined, seen once, out for 10 min)"]
    assert verdict.measurement.split("; ") == told


def test_a_rank_on_a_node_that_has_not_told_is_laid_to_no_other_node() -> None:
    waited = [f"[rank{rank}]: {EXAMPLES['gloo lost a peer or waited in vain']}" for rank in (0, 1)]
    told = tuple(Ended(node=f"n{rank + 1}", rank=rank, at=900.0, code=1) for rank in (0, 1))
    verdict = judge(case(*waited, world_size=3, ended=told, nodes={0: "n1", 1: "n2"}))
    assert (verdict.kind, verdict.rank, verdict.node) == (Kind.UNKNOWN, 2, None)
    one = judge(case(waited[0], world_size=2, ended=told[:1], nodes={0: "n1"}))
    assert (one.rank, one.node) == (1, None)
    assert judge(case(*waited, world_size=3)).node == "n1"  # of one node, where all ranks are below one parent


def test_rank_that_the_flight_recorder_names() -> None:
    waited = [f"[rank{rank}]: {EXAMPLES['NCCL timeout'].replace('Rank 1', f'Rank {rank}')}" for rank in (0, 1, 2)]
    verdict = judge(case(*waited, late=(Late(rank=2, why="it is behind"),), nodes={2: "n7"}))
    assert (verdict.rank, verdict.node, verdict.evidence[0].text) == (2, "n7", "it is behind")


def test_times_in_lines_order_files_without_times() -> None:
    lines = [
        *lines_of(
            "n1", "a.log", [(None, "2026-11-20T10:00:09Z [rank0]: x\n2026-11-20T10:00:09Z OSError: [Errno 28] x\n")]
        ),
        *lines_of("n1", "b.log", [(None, "2026-11-20T10:00:04Z MemoryError: [Errno 12] x\n")]),
    ]
    assert judge(Case(lines=tuple(lines))).kind is Kind.HOST


def test_prefixes_of_launchers_name_the_rank() -> None:
    for text, labelled in (
        ("[rank7]:[E1120 10:00:00.1 x.cpp:1] hello", False),
        ("[default7]:hello", False),
        ("[1,7]<stderr>:hello", False),
        ("7: hello", True),
        ("[E1120 x.cpp:1] [Rank 7] hello", False),
    ):
        assert [line.rank for line in lines_of("n1", "s", [(1.0, text)], labelled=labelled)] == [7], text
    assert [line.rank for line in lines_of("n1", "s", [(1.0, "7: hello")])] == [None]


def test_lines_are_put_together_over_chunks() -> None:
    lines = list(lines_of("n1", "s", [(1.0, "Out of sp"), (2.0, "ace\nand"), (3.0, " more")]))
    assert [(line.text, line.at) for line in lines] == [("Out of space", 2.0), ("and more", 3.0)]


def mandatory(parsed: Any) -> list[set[str]]:
    """For each way in which a parsed regex can match: the texts that are in it then."""
    ways: list[set[str]] = [set()]
    run = ""
    for operation, argument in [*parsed, (None, None)]:
        if str(operation) == "LITERAL":
            run += chr(argument).lower()
            continue
        ways, run = [way | {run} for way in ways] if run else ways, ""
        if str(operation) == "SUBPATTERN":
            inner = mandatory(argument[3])
        elif str(operation) == "BRANCH":
            inner = [way for branch in argument[1] for way in mandatory(branch)]
        elif str(operation) == "MAX_REPEAT" and argument[0] > 0:
            inner = mandatory(argument[2])
        else:
            continue
        ways = [way | more for way in ways for more in inner]
    return ways


@for_each(each for each in SIGNATURES if not each.kernel)
def test_whatever_a_signature_matches_has_one_of_the_words_that_are_looked_for_first(signature: Signature) -> None:
    parser: Any = importlib.import_module("re._parser")
    for pattern in signature.patterns:
        for way in mandatory(parser.parse(pattern)):
            assert any(key in text for text in way for key in KEYS), (pattern, way)


def test_ordinary_output_is_looked_through_quickly() -> None:
    text = "".join(f"[rank{number % 8}]: {NOISE.format(number)} lr 1e-4 grad norm 1.3\n" for number in range(14_000))
    lines = list(lines_of("n1", "stderr", [(1.0, text)]))
    began = time.process_time()
    assert find(lines) == []
    assert time.process_time() - began < 1.0


def test_bounds_hold_for_hostile_output() -> None:
    huge = "x" * 500_000 + " ValueError: " + "y" * 1000
    many = [f"[rank{number % 64}]: ValueError: {number}" for number in range(3_000)]
    verdict = judge(case(huge, *many))
    assert len(verdict.evidence) <= 8
    assert all(len(each.text) <= 300 for each in verdict.evidence)


def test_every_reason_that_is_held_against_a_job_is_one_of_the_checks() -> None:
    assert set(KIND_OF_REASON) <= set(REASONS)
