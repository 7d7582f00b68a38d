"""
What lines of a job's output and of the kernel log mean: the one catalogue of signatures, as data.

A text only proposes. `settles` says what confirms or refutes it, and `judge` decides. The order counts: of a line, the
first signature that matches is taken, so what is particular stands before what is general. A signature without a
source is not taken: `source` is where the text, or its meaning, is defined.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property


class Kind(str, enum.Enum):
    """What a job died of."""

    HARDWARE = "hardware"
    NETWORK = "network"
    HOST = "host"
    STORAGE = "storage"
    SOFTWARE = "software"
    DATA = "data"
    STOPPED = "stopped"
    UNKNOWN = "unknown"


class Place(str, enum.Enum):
    """Where in the chain of events a finding stands."""

    INITIATING = "initiating"
    CASCADE = "cascade"
    """It waited for another, or lost it."""
    TEARDOWN = "teardown"
    """It was ended because another had failed."""


class Outlook(str, enum.Enum):
    """What a retry can do."""

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    NONE = "do not retry"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Signature:
    """
    One text and its meaning.

    `regex` may have the groups `rank`, `local_rank`, `node` and `signal`, which then say whom the line is about.
    `kernel`: it is looked for in the kernel log, elsewhere it is somebody's quotation. `fact`: it is what the kernel or
    a driver found out by itself, and no program can cause it. `general`: a particular finding of the same rank explains
    more. `accuses` False: who writes it is not the one at fault. `device`: a probe of the devices can tell.
    `program`: a program can cause what looks like a broken device.
    """

    name: str
    kind: Kind
    place: Place
    outlook: Outlook
    regex: str
    suggests: str
    settles: str
    action: str
    source: str
    kernel: bool = False
    fact: bool = False
    general: bool = False
    accuses: bool = True
    device: bool = False
    program: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled regex."""
        return re.compile(self.regex)


_I, _C, _T = Place.INITIATING, Place.CASCADE, Place.TEARDOWN
_HERE, _ELSE, _NO, _STOP = Outlook.HERE, Outlook.ELSEWHERE, Outlook.NONE, Outlook.STOPPED
_HW, _NET, _HOST, _STO = Kind.HARDWARE, Kind.NETWORK, Kind.HOST, Kind.STORAGE
_SW, _DATA, _STOPPED, _UNK = Kind.SOFTWARE, Kind.DATA, Kind.STOPPED, Kind.UNKNOWN

TORCH = "https://github.com/pytorch/pytorch/blob/main/"
NCCL_CPP = TORCH + "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
ELASTIC = TORCH + "torch/distributed/elastic/"
GLOO = "https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/"
NCCL = "https://github.com/NVIDIA/nccl/blob/master/src/"
NCCL_DOC = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
XID = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
NRT = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/api/nrt_status.html"
NRT_DOC = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html"
OFI = "https://ofiwg.github.io/libfabric/main/man/fi_errno.3.html"
LINUX = "https://github.com/torvalds/linux/blob/master/"
SLURMD = "https://github.com/SchedMD/slurm/blob/master/src/slurmd/slurmstepd/req.c"
SRUN = "https://slurm.schedmd.com/srun.html"
PYTHON = "https://docs.python.org/3/library/exceptions.html"
ERRNO = "https://man7.org/linux/man-pages/man3/errno.3.html"

_PROBE = "The quick tier on the node: a failed probe confirms, a pass refutes."
_NODES_PASS = "The quick tier on the nodes: where they pass, it is the program."
_OTHERS = "What the other ranks say, and which rank stopped first."
_SMALLER = "Lower the batch, the sequence or the fragmentation, or use a larger device."


def _xid(codes: str) -> str:
    return rf"NVRM: Xid \([^)]*\): (?:{codes})\b"


def _nrt(code: int, name: str) -> str:
    return rf"\b{name}\b|\bnrt(?:_\w+)?\b.*\bstatus(?:[_ ]code)?[=: (]+{code}\b|NRT.*\berror[ _]code[=: ]+{code}\b"


SIGNATURES: tuple[Signature, ...] = (
    # --- The kernel log ------------------------------------------------------------------------------------------
    Signature(
        "kernel OOM kill", _HOST, _I, _HERE,
        r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \((?P<process>[^)]*)\)"
        r"|oom-kill:constraint=",
        "The kernel killed a process for lack of memory.",
        "The control group's oom_kill counter, which rose while the job ran.",
        "Give the job more memory, or use less: workers of data loaders, copies of the data set, checkpoints "
        "in memory.",
        LINUX + "mm/oom_kill.c", kernel=True, fact=True,
    ),
    Signature(
        "GPU fell off the bus or asks for a reset", _HW, _I, _ELSE,
        _xid(r"79|74|62|46|64|95|140|151|155|156|109|110|119|120|143|136|158"),
        "The driver lost the device, its memory repair, its link or its firmware.",
        "It is the driver's own finding.", "Reset or reboot as the Xid says; replace when it comes again.", XID,
        kernel=True, fact=True, device=True,
    ),
    Signature(
        "uncorrected GPU memory error", _HW, _I, _ELSE,
        _xid("48|94"),
        "A double-bit error in the device's memory.", "It is the driver's own finding.",
        "Drain the node and reset the device; replace it when rows cannot be remapped.", XID,
        kernel=True, fact=True, device=True,
    ),
    Signature(
        "GPU error that a program can cause", _HW, _I, _HERE,
        _xid(r"13|31|43|45|32|8"),
        "A fault of a kernel or an illegal address of the program, seldom the device.", _PROBE,
        "Where the node passes, look for the illegal access: compute-sanitizer, CUDA_LAUNCH_BLOCKING=1.", XID,
        kernel=True, device=True, program=True,
    ),
    Signature(
        "Neuron hang in collectives, in the kernel log", _NET, _C, _ELSE,
        r"NEURON_HW_ERR=HANG_ON_COLLECTIVES\b",
        "This worker waited for another, which may be on another node.", _OTHERS, "Look at the other workers.",
        NRT_DOC, kernel=True, accuses=False,
    ),
    Signature(
        "Neuron DMA error", _HW, _I, _ELSE,
        r"NEURON_HW_ERR=DMA_(?:ERROR|ABORT)\b",
        "An aborted DMA: the device, or a program that gave it a bad address.", _PROBE,
        "Reset the device; replace the instance when it comes again.",
        "https://github.com/aws-neuron/aws-neuron-sdk/issues/1390", kernel=True, device=True, program=True,
    ),
    Signature(
        "Neuron memory or core error", _HW, _I, _ELSE,
        r"NEURON_HW_ERR=(?:SRAM|NC|HBM)_UNCORRECTABLE_ERROR\b",
        "Memory or a core of the device is broken.", "It is the runtime's and driver's own finding.",
        "Replace the instance.", NRT_DOC, kernel=True, fact=True, device=True,
    ),
    Signature(
        "machine check", _HW, _I, _ELSE,
        r"Uncorrected hardware memory error|Memory failure: 0x|EDAC \S+: [1-9]\d* UE\b",
        "The host's memory or processor is broken.", "It is the kernel's own finding.", "Replace the host.",
        LINUX + "mm/memory-failure.c", kernel=True, fact=True,
    ),
    Signature(
        "disk error", _STO, _I, _ELSE,
        r"I/O error, dev \w+|critical (?:medium|target) error, dev \w+|EXT4-fs error|XFS .*has been shut down",
        "A disk or its file system fails.", "It is the kernel's own finding.", "Replace the disk or the host.",
        LINUX + "block/blk-core.c", kernel=True, fact=True,
    ),
    Signature(
        "link down", _NET, _I, _ELSE,
        r"(?:efa|mlx5|eth|ens|bond|ib)\w*.*\b(?:[Ll]ink (?:is )?[Dd]own|NIC Link is Down)",
        "A network interface lost its link.", "Whether the link is up again, and a collective over it.",
        "Look at cable, port and switch.", LINUX + "drivers/net/ethernet/mellanox/mlx5/core/en_main.c",
        kernel=True, fact=True,
    ),
    Signature(
        "segmentation fault, in the kernel log", _SW, _I, _NO,
        r"\w+\[\d+\]: segfault at [0-9a-f]+ ip |traps: .*\bgeneral protection fault ip:",
        "A process used an address that is not its own.",
        _NODES_PASS, "Get a trace: PYTHONFAULTHANDLER=1, a core dump.",
        LINUX + "arch/x86/mm/fault.c", kernel=True, general=True,
    ),
    # --- Who stopped it ---------------------------------------------------------------------------------------------
    Signature(
        "Slurm time limit", _STOPPED, _I, _HERE,
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "The job's time was up.",
        "It is the scheduler's own word.", "Ask for more time, or resume from the checkpoint.",
        SLURMD, fact=True,
    ),
    Signature(
        "Slurm preemption", _STOPPED, _I, _ELSE,
        r"CANCELLED AT \S+ DUE TO PREEMPTION",
        "A job of higher priority took the nodes.", "It is the scheduler's own word.", "Requeue.", SLURMD, fact=True,
    ),
    Signature(
        "Slurm node failure", _HOST, _I, _ELSE,
        r"CANCELLED AT \S+ DUE TO NODE(?: FAIL| (?P<node>\S+) FAILURE)|NODE_FAIL",
        "A node no longer answered the scheduler.", "Whether the node answers.", "Requeue without that node.", SLURMD,
    ),
    Signature(
        "Slurm cancellation", _STOPPED, _I, _STOP,
        r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
        "Somebody, or another step's failure, cancelled it.", "Whether a rank had failed before.",
        "None, if it was meant.", SLURMD, general=True,
    ),
    Signature(
        "Slurm OOM kill", _HOST, _I, _HERE,
        r"Detected \d+ oom[-_]kill event\(?s?\)? in |srun: error: (?P<node>\S+): task"
        r" (?P<rank>\d+): Out Of Memory",
        "The kernel killed a process of the step for lack of memory.", "It is the kernel's count, by Slurm's word.",
        "Ask for more memory, or use less.", "https://slurm.schedmd.com/cgroups.html", fact=True,
    ),
    Signature(
        "spot interruption", _STOPPED, _I, _ELSE,
        r"[Ss]pot (?:instance )?interruption (?:notice|warning)|Host EC2 \(instance i-\w+\) terminated",
        "The cloud took the instance back.", "It is the cloud's own word.", "Retry on other instances.",
        "https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html", fact=True,
    ),
    Signature(
        "pod eviction", _HOST, _I, _ELSE,
        r"The node was low on resource: [\w-]+|\bEvicted\b.*\b(?:node|pod)\b",
        "Kubernetes evicted the pod for lack of a resource.", "It is the kubelet's own word.",
        "Set requests to what the job needs; free the node.",
        "https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/", fact=True,
    ),
    Signature(
        "container OOM kill", _HOST, _I, _HERE,
        r"\bOOMKilled\b|OutOfMemoryError: Container killed due to memory usage",
        "The container was killed at its limit of memory.", "The control group's oom_kill counter.",
        "Raise the limit, or use less.",
        "https://kubernetes.io/docs/tasks/configure-pod-container/assign-memory-resource/", fact=True,
    ),
    Signature(
        "interrupted by a person", _STOPPED, _I, _STOP,
        r"^KeyboardInterrupt\b|got signal: 2\b",
        "Somebody pressed Ctrl-C.",
        "The signal that the parent passed on.", "None.", PYTHON,
    ),
    Signature(
        "torchrun was told to end",
        _STOPPED, _I, _STOP, r"got signal: 15\b|Received (?:Signals\.SIGTERM|15) death signal",
        "A scheduler or somebody sent SIGTERM to torchrun.", "Who sent the signal, as the parent saw it.",
        "None, if it was meant.", ELASTIC + "multiprocessing/api.py", general=True,
    ),
    # --- What torch's launcher and others say of the ranks ---------------------------------------------------------
    Signature(
        "a rank's launcher says that it failed", _UNK, _I, _HERE,
        r"exits with return code = (?P<code2>-?\d+)"
        r"|failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+) \(pid: \d+\) of binary",
        "torchrun saw this rank end first.", _OTHERS, "See what that rank said.", ELASTIC + "multiprocessing/api.py",
        general=True,
    ),
    Signature(
        "ended by its launcher", _UNK, _T, _HERE,
        r"Sending process \d+ closing signal SIG\w+|srun: Job step aborted: Waiting up to|srun: Terminating StepId="
        r"|(?:mpirun|mpiexec|prterun).* (?:is|has been) (?:aborted|terminated)"
        r"|sigkill_handler\] Killing subprocess"
        r"|\b(?:ChildFailedError|ProcessExitedException|ProcessRaisedException|CalledProcessError)\b",
        "The launcher ended the other ranks after one had failed.", _OTHERS, "None.",
        ELASTIC + "multiprocessing/api.py", accuses=False,
    ),
    Signature(
        "a rank ended by a signal", _UNK, _I, _HERE,
        r"srun: error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<signal>Killed|Segmentation fault|Bus error|Aborted)"
        r"|\bline \d+: +\d+ (?P<signal3>Killed|Segmentation fault|Bus error|Aborted)\b|^(?P<signal4>Killed)$"
        r"|srun: error: (?P<node3>\S+): tasks? (?P<rank3>\d+)\S*: Exited with exit code (?P<code>\d+)"
        r"|process rank (?P<rank2>\d+) with PID \d+ on node (?P<node2>\S+) exited on signal (?P<signal2>\d+)",
        "The launcher saw this rank end by a signal.", _OTHERS, "See what that rank said.", SRUN, general=True,
    ),
    # --- Hardware by a program's word -------------------------------------------------------------------------------
    Signature(
        "uncorrectable ECC error, by CUDA", _HW, _I, _ELSE,
        r"uncorrectable ECC error encountered|cudaErrorECCUncorrectable",
        "The device's memory is broken.", _PROBE, "Drain the node; reset or replace the device.", CUDA, device=True,
    ),
    Signature(
        "device gone, by CUDA", _HW, _I, _ELSE,
        r"CUDA error: (?:no CUDA-capable device|invalid device ordinal|all CUDA-capable devices are busy"
        r"|unknown error|device not ready"
        r"|hardware stack error)|cudaErrorDevicesUnavailable|cudaErrorHardwareStackError|No CUDA GPUs are available",
        "The device does not answer, or is not given to the job.", _PROBE,
        "Where the node passes, look at CUDA_VISIBLE_DEVICES and the container's devices.", CUDA,
        device=True, program=True,
    ),
    Signature(
        "NVLink error, by CUDA", _HW, _I, _ELSE,
        r"cudaErrorNvlinkUncorrectable|uncorrectable NVLink error",
        "A link between devices is broken.", _PROBE, "Drain the node.", CUDA, device=True,
    ),
    Signature(
        "Neuron waits for another worker", _NET, _C, _ELSE,
        _nrt(1200, "NRT_EXEC_HW_ERR_COLLECTIVES")
        + r"|suspected hang in collectives operation|\bRX, connection closed by remote peer",
        "An error in collectives, possibly on another worker: who reports it is not accused.", _OTHERS,
        "Look at the other workers.", NRT, accuses=False,
    ),
    Signature(
        "Neuron DMA abort", _HW, _I, _ELSE,
        _nrt(1203, "NRT_EXEC_HW_ERR_DMA_ABORT") + r"|DMA [TR]X engine \d+ is in an abort state",
        "An aborted DMA: the device, or a program that gave it a bad address.", _PROBE, "Reset the device.", NRT_DOC,
        device=True, program=True,
    ),
    Signature(
        "Neuron memory error", _HW, _I, _ELSE,
        _nrt(1201, "NRT_EXEC_HW_ERR_HBM_UE") + "|" + _nrt(1202, "NRT_EXEC_HW_ERR_NC_UE")
        + "|" + _nrt(1205, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE")
        + r"|Uncorrectable (?:HBM )?memory error is detected",
        "Memory of the device is broken.", "The kernel log and the ECC counters of the device; the quick tier.",
        "Replace the instance, or reload the driver where the text says so.", NRT_DOC, device=True,
    ),
    Signature(
        "Neuron execution timeout", _HW, _I, _ELSE,
        r"execution timeout \(\d+ ms\) on Neuron Device|" + _nrt(5, "NRT_TIMEOUT"),
        "A computation did not end: the device, or waiting for another worker.", _PROBE,
        "Where the node passes, look at the other workers.", NRT_DOC, device=True, program=True, general=True,
    ),
    Signature(
        "Neuron failure that says no more", _UNK, _I, _ELSE,
        _nrt(1, "NRT_FAILURE") + "|" + _nrt(1004, "NRT_EXEC_COMPLETED_WITH_ERR")
        + "|" + _nrt(101, "NRT_EXEC_UNIT_UNRECOVERABLE") + "|" + _nrt(6, "NRT_HW_ERROR"),
        "The runtime failed, and does not say of what.", _PROBE, "Look at the runtime's lines before it.", NRT,
        device=True, general=True,
    ),
    Signature(
        "Neuron cores in use", _HOST, _I, _HERE,
        r"(?:Neuron ?Core\(s\)|Neuron Core\(s\)) not available - Requested",
        "Another process has the cores.", "Who has /dev/neuron* open.", "End the other process, or wait for it.",
        NRT_DOC,
    ),
    Signature(
        "Neuron driver", _HOST, _I, _ELSE,
        r"Unable to determine Neuron Driver version|is not compatible with the installed aws-neuron|"
        r"This runtime requires Neuron Driver version",
        "The driver is missing or does not fit the runtime.", "The passive tier: driver and versions.",
        "Install the driver that the runtime wants.", NRT_DOC,
    ),
    Signature(
        "Neuron numerical error", _SW, _I, _NO,
        _nrt(1003, "NRT_EXEC_COMPLETED_WITH_NUM_ERR"),
        "A NaN or an infinity came up.", _NODES_PASS, "Look at the loss and its scale.", NRT,
    ),
    Signature(
        "Neuron bad input or memory access of the program", _SW, _I, _NO,
        _nrt(1002, "NRT_EXEC_BAD_INPUT") + "|" + _nrt(1006, "NRT_EXEC_OOB") + "|" + _nrt(2, "NRT_INVALID"),
        "The program gave the device something wrong.", _NODES_PASS, "Look at shapes and indices.", NRT,
    ),
    Signature(
        "CUDA error that a program can cause", _SW, _I, _NO,
        r"CU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|"
        r"CUDA error: (?:an illegal memory access was encountered|device-side assert triggered|misaligned address"
        r"|an illegal instruction was encountered|unspecified launch failure|invalid (?:device function"
        r"|argument|configuration"
        r" argument))|cudaErrorIllegalAddress|cudaErrorAssert|cudaErrorLaunchFailure",
        "A kernel of the program went wrong: an index, a label out of range, an address.", _PROBE,
        "CUDA_LAUNCH_BLOCKING=1 and compute-sanitizer show where.", CUDA, device=True,
    ),
    Signature(
        "failed assertion in a CUDA kernel", _SW, _I, _NO,
        r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion `.*failed",
        "A kernel of the program found a value out of range.", _NODES_PASS, "Look at the labels and indices.",
        TORCH + "c10/cuda/CUDADeviceAssertionHost.cpp",
    ),
    Signature(
        "out of device memory", _SW, _I, _NO,
        r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'|cuda runtime error \(2\)"
        r"|cudaErrorMemoryAllocation|"
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate|OutOfMemoryError: CUDA|CUDA error: out of memory"
        r"|RESOURCE_EXHAUSTED|NRT_FAIL_HOST_MEM_ALLOC|NRT_RESOURCE\b",
        "The program wanted more of the device's memory than there was.", "Whether another process holds memory.",
        _SMALLER, TORCH + "c10/cuda/CUDACachingAllocator.cpp",
    ),
    # --- Storage and data -----------------------------------------------------------------------------------------
    Signature(
        "full disk", _STO, _I, _HERE,
        r"\[Errno 28\]|No space left on device|os error 28\b|\bENOSPC\b",
        "A file system is full.", "How full it is; it may have been freed at the end of the job.",
        "Free space, or write elsewhere.", ERRNO, fact=True,
    ),
    Signature(
        "quota", _STO, _I, _NO,
        r"\[Errno 122\]|Disk quota exceeded", "The user's quota is used up.", "The quota.",
        "Free space, or ask for more.", ERRNO, fact=True,
    ),
    Signature(
        "read-only or broken file system", _STO, _I, _ELSE,
        r"\[Errno 30\]|Read-only file system|\[Errno 5\]|Input/output error|\[Errno 116\]|Stale file handle"
        r"|\[Errno 107\]|Transport endpoint is not connected",
        "A file system went away, fails, or was made read-only.", "The passive tier: mounts, disks, kernel log.",
        "Mount it anew, or go to another node.", ERRNO, fact=True,
    ),
    Signature(
        "broken checkpoint or file of torch", _STO, _I, _NO,
        r"PytorchStreamReader failed|failed finding central directory|unexpected pos \d+ vs \d+"
        r"|PytorchStreamWriter failed|Error while deserializing header|SafetensorError|EOFError: Ran out of input"
        r"|_pickle\.UnpicklingError|pickle data was truncated|CheckpointException",
        "A checkpoint is cut, empty or broken.", "Whether the file can be read elsewhere, and its size.",
        "Start from the checkpoint before; look why this one was cut.", TORCH + "caffe2/serialize/inline_container.cc",
    ),
    Signature(
        "unreachable object store", _STO, _I, _HERE,
        r"botocore\.exceptions\.(?:EndpointConnectionError|ConnectTimeoutError|ReadTimeoutError|ConnectionClosedError)"
        r"|\((?:SlowDown|ServiceUnavailable|InternalError)\) when calling",
        "The object store did not answer.", "The passive tier's data_store check.", "Retry; look at its status.",
        "https://github.com/boto/botocore/blob/develop/botocore/exceptions.py",
    ),
    Signature(
        "a server on the network did not answer", _NET, _I, _HERE,
        r"requests\.exceptions\.(?:ConnectionError|ConnectTimeout|ReadTimeout)"
        r"|urllib3\.exceptions\.(?:MaxRetry|NewConnection|"
        r"Protocol|ReadTimeout)\w*Error|[Cc]ouldn't connect to 'https?://",
        "A server that the program asks over HTTP did not answer: a hub of models or data, a tracker.",
        "The same request by hand.", "Retry; have the files on the node before.",
        "https://requests.readthedocs.io/en/latest/api/#exceptions",
    ),
    Signature(
        "refused by an object store", _STO, _I, _NO,
        r"An error occurred \((?:AccessDenied|403|NoSuchBucket|NoSuchKey|404|ExpiredToken"
        r"|InvalidAccessKeyId)\) when calling"
        r"|botocore\.exceptions\.NoCredentialsError",
        "The job may not read or write there, or it is not there.", "The same request by hand.",
        "Correct rights, credentials or the name.",
        "https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html",
    ),
    Signature(
        "shared memory too small", _HOST, _I, _NO,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Bus error"
        r"|insufficient shared memory \(shm\)",
        "/dev/shm is too small for the data loader's workers.", "The size of /dev/shm.",
        "Give the container more shared memory (--shm-size, an emptyDir of medium Memory).",
        TORCH + "torch/utils/data/_utils/signal_handling.py",
    ),
    Signature(
        "data loader's worker killed", _HOST, _I, _HERE,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)",
        "A worker of the data loader was killed: most often for lack of memory.",
        "The control group's oom_kill counter, and the kernel log.", "Use fewer workers, or more memory.",
        TORCH + "torch/utils/data/dataloader.py",
    ),
    Signature(
        "too many open files or processes", _HOST, _I, _NO,
        r"\[Errno 24\]|Too many open files|\[Errno 11\] Resource temporarily unavailable|can't start new thread"
        r"|received 0 items of ancdata",
        "A limit of the host or the container is reached.", "ulimit -n, ulimit -u, pids.max.", "Raise the limit.",
        ERRNO, fact=True,
    ),
    Signature(
        "lack of memory, by Python", _HOST, _I, _HERE,
        r"\[Errno 12\]|_ArrayMemoryError|Unable to allocate [\d.]+ [KMGT]iB|Cannot allocate memory"
        r"|^MemoryError\b|std::bad_alloc|DefaultCPUAllocator: (?:can't"
        r"|not enough memory)",
        "The host had no memory to give.", "The memory of the host and the control group's limit.",
        "Use less, or ask for more.", PYTHON,
    ),
    Signature(
        "bad data", _DATA, _I, _NO,
        r"UnicodeDecodeError: |json\.decoder\.JSONDecodeError: |PIL\.UnidentifiedImageError|cannot identify image file"
        r"|ArrowInvalid: |Parquet magic bytes not found|zipfile\.BadZipFile|gzip\.BadGzipFile|tarfile\.ReadError"
        r"|zlib\.error|Compressed file ended before the end-of-stream marker|webdataset.*(?:truncated|corrupt)",
        "A file of the data set is broken or of another kind.", "The same file read elsewhere.",
        "Find the file and repair it, or skip it.", "https://docs.python.org/3/library/codecs.html",
    ),
    # --- The network, and who waited ------------------------------------------------------------------------------
    Signature(
        "RDMA completion with error", _NET, _I, _ELSE,
        r"NET/IB ?: Got completion from peer .*(?:IBV_WC_RETRY_EXC_ERR|IBV_WC_RNR_RETRY_EXC_ERR|(?:status"
        r"|error)[= ]12\b)"
        r"|NET/IB ?: .*async (?:fatal )?event",
        "A peer did not acknowledge: its process is dead, or the path is.",
        "Whether the peer died before; a collective.",
        "Look at the port's counters; exclude the path when it fails again.", NCCL + "transport/net_ib.cc",
        accuses=False,
    ),
    Signature(
        "EFA completion with error", _NET, _I, _ELSE,
        r"NET/OFI .*(?:Completion with error|Request .* completed with error|failed with rc)|fi_cq_readerr"
        r"|Unresponsive receiver"
        r"|FI_E(?:TIMEDOUT|HOSTUNREACH|HOSTDOWN|CONNABORTED)",
        "A peer did not answer over the fabric: its process is dead, or the path is.",
        "Whether the peer died before; a collective.",
        "Look at the EFA counters; exclude the path when it fails again.",
        OFI, accuses=False,
    ),
    Signature(
        "no EFA", _NET, _I, _ELSE,
        r"OFI plugin initNet\(\) failed is EFA enabled|EFA is not enabled"
        r"|NET/OFI .*(?:[Nn]o eligible providers|fi_getinfo)"
        r"|Failed to initialize (?:OFI|any NET) plugin",
        "The fabric's devices or libraries are missing on this node.", "The passive tier: efa.",
        "Install EFA, or give its devices to the container.", NRT_DOC,
    ),
    Signature(
        "NCCL lost a peer", _NET, _C, _ELSE,
        r"remote process exited or there was a network error|ncclRemoteError"
        r"|NCCL WARN .*(?:[Cc]onnection (?:closed by|reset by)|Call to recv from .* failed|socketProgress|"
        r"Net : Connection)",
        "The peer's process ended, or the path to it did.", _OTHERS, "See what the peer said.", NCCL_DOC, accuses=False,
    ),
    Signature(
        "NCCL timeout", _NET, _C, _ELSE,
        r"NCCL communicator was aborted on rank|Heartbeat monitor timed out|Barrier timed out|DEADLINE_EXCEEDED|"
        r"Watchdog caught collective operation timeout|(?:some|Some) NCCL operations have failed or timed out"
        r"|failed to pass monitoredBarrier in|watchdog (?:thread )?(?:got stuck|terminated with exception)"
        r"|Received a (?:dump|timeout) signal (?:due to a collective timeout )?from",
        "This rank waited for others, which were late, dead or elsewhere in the program.",
        "Flight Recorder dumps, and which rank stopped first.",
        "See the rank that did not come.", NCCL_CPP, accuses=False,
    ),
    Signature(
        "gloo lost a peer or waited in vain", _NET, _C, _ELSE,
        r"Connection closed by peer \[|Timed out waiting \d+ms for (?:recv|send) operation to complete"
        r"|gloo/transport/\S+\] (?:Read|Write) error \[|Application timeout caused pair closure"
        r"|\[[^\]]*pair\.cc:\d+\] (?:Read|Write|Connect)|Connect timeout \[|Gloo connectFullMesh failed"
        r"|Rank \d+ timed out in monitoredBarrier after",
        "The peer's process ended, did not come, or the path to it did not work.", _OTHERS, "See what the peer said.",
        GLOO + "pair.cc", accuses=False,
    ),
    Signature(
        "the store of the ranks is gone or late", _NET, _C, _ELSE,
        r"(?:Failed to recv, got 0 bytes|recvValue failed on|sendBytes failed on|failed to recv, got 0 bytes)"
        r"|wait timeout after \d+ms, keys|Socket Timeout|The client socket has timed out"
        r"|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError|Broken pipe.*TCPStore",
        "The rank or node that holds the rendezvous ended, is not reached, or others did not come.", _OTHERS,
        "See rank 0 and its node; look whether its port is reached.",
        TORCH + "torch/csrc/distributed/c10d/TCPStore.cpp",
        accuses=False,
    ),
    Signature(
        "a connection is refused, cut or not answered", _NET, _C, _ELSE,
        r"\[Errno (?:32|104|110|111)\]|Connection (?:refused|reset by peer|timed out)|Broken pipe",
        "The process at the other end is gone or was not there, or the path to it does not work.", _OTHERS,
        "See what the other end said.", ERRNO, accuses=False,
    ),
    Signature(
        "the build does not fit the device or driver", _SW, _I, _NO,
        r"no kernel image is available for execution|CUDA driver version is insufficient"
        r"|forward compatibility was attempted",
        "torch or CUDA was built for other devices or a newer driver.", "Whether the other nodes have the same driver.",
        "Take a build for this device, or the driver that it wants.", CUDA,
    ),
    Signature(
        "port in use", _HOST, _I, _HERE,
        r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]",
        "Another process, or an earlier job's, has the port.", "Who listens there.", "End it, or take another port.",
        ERRNO, fact=True,
    ),
    Signature(
        "name not resolved", _NET, _I, _ELSE,
        r"Temporary failure in name resolution|Name or service not known|socket\.gaierror|getaddrinfo failed",
        "A name could not be looked up.", "The same look-up on the node.", "Look at DNS and /etc/hosts.",
        "https://man7.org/linux/man-pages/man3/gai_strerror.3.html",
    ),
    Signature(
        "no route or refused", _NET, _I, _ELSE,
        r"\[Errno 113\]|No route to host|\[Errno 101\]|Network is unreachable",
        "The network has no way there.", "A collective between the nodes.", "Look at routes, security groups, links.",
        ERRNO,
    ),
    Signature(
        "NCCL internal error", _UNK, _I, _ELSE, r"ncclInternalError|NCCL error.*internal error",
        "Something below NCCL failed: the path, a device, or how the ranks are laid out.",
        "The NCCL WARN line before it; the quick tier.", "Run once with NCCL_DEBUG=WARN.", NCCL_DOC, general=True,
        device=True, accuses=False,
    ),
    Signature(
        "NCCL system error", _NET, _I, _ELSE, r"ncclSystemError|NCCL error.*unhandled system error",
        "A call of NCCL to the system failed: the network, shared memory or the device.",
        "The NCCL WARN line before it.",
        "Run once with NCCL_DEBUG=WARN.", NCCL_DOC, general=True, device=True, accuses=False,
    ),
    Signature(
        "NCCL error of a CUDA call", _HW, _I, _ELSE,
        r"ncclUnhandledCudaError|NCCL error.*unhandled cuda error"
        r"|NCCL WARN Cuda failure",
        "A CUDA call below NCCL failed.",
        _PROBE, "Look at the kernel log for an Xid.", NCCL_DOC, general=True, device=True, program=True,
    ),
    Signature(
        "NCCL used wrongly", _SW, _I, _NO,
        r"ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU detected",
        "The program gave NCCL something it does not take, such as one device to two ranks.", _NODES_PASS,
        "Look at LOCAL_RANK and torch.cuda.set_device.", NCCL_DOC,
    ),
    # --- Programs ----------------------------------------------------------------------------------------------------
    Signature(
        "import error", _SW, _I, _NO,
        r"ModuleNotFoundError: |ImportError: |cannot open shared object file"
        r"|error while loading shared libraries: |undefined symbol: "
        r"|version `\w+_[\d.]+' not found",
        "A module or library is missing here, or does not fit.", "Whether the other nodes have it.",
        "Install it; where only this node lacks it, use the same image everywhere.", PYTHON,
    ),
    Signature(
        "NaN loss", _SW, _I, _NO,
        r"(?i)\bloss\b.{0,40}\b(?:is|was|became|=|:) ?(?:nan|inf)\b.{0,60}(?:stop|abort|exit|rais|skip|terminat|error)"
        r"|(?:Error|Exception): .{0,80}\b(?:NaN|nan|non-finite|not finite)\b|FoundInf|returned nan values in its",
        "The numbers ran away.", "The training step of the deep tier: a device that computes wrongly does this too.",
        "Where the nodes pass, look at the learning rate, the loss scale and the data.",
        TORCH + "torch/csrc/autograd/python_anomaly_mode.cpp", device=True,
    ),
    Signature(
        "shape or type", _SW, _I, _NO,
        r"mat1 and mat2 shapes cannot be multiplied|size mismatch|The size of tensor a \("
        r"|Expected all tensors to be on the same"
        r"|Expected .* (?:dtype|type) .* but (?:got|found)|Input type \(|Error\(s\) in loading state_dict",
        "Tensors of the program do not fit.",
        "Whether all ranks say it; a device that computes wrongly can do this too.",
        "Look at the model and the data of that step.", TORCH + "aten/src/ATen/native/LinearAlgebra.cpp",
    ),
    Signature(
        "ranks disagree", _SW, _I, _NO,
        r"Detected mismatch between collectives on ranks|Expected to have finished reduction in the prior iteration"
        r"|Ran into a collective shape mismatch|CollectiveFingerPrint|\bMismatched collective\b",
        "Ranks called different collectives.", _NODES_PASS, "Look at branches that depend on the rank or the data.",
        TORCH + "torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp",
    ),
    Signature(
        "an error between ranks that says no more", _NET, _C, _ELSE,
        r"\btorch\.distributed\.Dist\w*Error\b|\bDistBackendError\b|ProcessGroup(?:NCCL|Gloo)\b.*\b(?:error"
        r"|exception)\b",
        "This rank lost the others, or waited for them.", _OTHERS, "See what the other ranks said.", NCCL_CPP,
        general=True, accuses=False,
    ),
    Signature(
        "bus error", _HOST, _I, _HERE, r"Caught signal 7\b|\bBus error\b|\bSIGBUS\b",
        "Memory behind a mapping was not there: /dev/shm is full, or a file was cut while it was mapped.",
        "The size of /dev/shm, and the kernel log.", "Give the container more shared memory.",
        "https://man7.org/linux/man-pages/man7/signal.7.html", general=True,
    ),
    Signature(
        "compilation failed", _SW, _I, _NO,
        r"RunNeuronCCImpl|Compiler status ERROR"
        r"|neuronx?-cc\b.*\b(?:failed|terminated)|\btorch\._(?:inductor|dynamo)\.exc\."
        r"|\btriton\.compiler\.errors\.|ptxas (?:fatal|error)",
        "A compiler did not take the program, or failed.", "Whether it fails again, and on other nodes.",
        "Read the compiler's own lines.", TORCH + "torch/_dynamo/exc.py",
    ),
    Signature(
        "segmentation fault", _SW, _I, _NO,
        r"Segmentation fault|Fatal Python error: Segmentation fault|\*\*\* Process received signal \*\*\*|SIGSEGV",
        "Native code used an address that is not its own.", _NODES_PASS,
        "PYTHONFAULTHANDLER=1 shows where; look at native extensions.",
        "https://docs.python.org/3/library/faulthandler.html", general=True,
    ),
    Signature(
        "assertion", _SW, _I, _NO,
        r"^(?:\w+\.)*AssertionError\b|Assertion [`'].*failed"
        r"|Fatal Python error: ",
        "The program found something that must not be.", _NODES_PASS, "Look at the assertion.", PYTHON, general=True,
    ),
    Signature(
        "file missing or refused", _STO, _I, _NO,
        r"FileNotFoundError: |\[Errno 2\]|PermissionError: |\[Errno 13\]|IsADirectoryError: ",
        "A file is missing here, or may not be used.", "Whether the other nodes have it: a mount may be missing.",
        "Correct the path or the rights.", PYTHON,
    ),
    Signature(
        "exception of the program", _SW, _I, _NO,
        r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)(?:: |$)",
        "The program ended itself.", _NODES_PASS, "Read its traceback.", PYTHON, general=True,
    ),
)  # fmt: skip

BY_NAME = {signature.name: signature for signature in SIGNATURES}
