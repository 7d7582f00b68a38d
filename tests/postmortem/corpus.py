"""For every signature a text of the form in which it is found. Written for the tests."""

from __future__ import annotations

EXAMPLES = {
    "kernel OOM kill": (
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:81234567kB, anon-rss:66123456kB"
    ),
    "GPU fell off the bus or asks for a reset": (
        "NVRM: Xid (PCI:0000:10:1c): 79, pid=1896, name=python, GPU has fallen off the bus."
    ),
    "uncorrected GPU memory error": ("NVRM: Xid (PCI:0000:10:1c): 48, pid=1896, DBE (double bit error) ECC Error"),
    "GPU error that a program can cause": (
        "NVRM: Xid (PCI:0000:10:1c): 31, pid=1896, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
    ),
    "Neuron hang in collectives, in the kernel log": (
        "NEURON_HW_ERR=HANG_ON_COLLECTIVES instance-id=i-1 hostname=ip-1 nd-id=0 nc-id=0"
    ),
    "Neuron DMA error": ("NEURON_HW_ERR=DMA_ABORT instance-id=i-1 hostname=ip-1 nd-id=3 nc-id=1 serial-num=1 action=X"),
    "Neuron memory or core error": (
        "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0592 hostname=ip-172 nd-id=0 nc-id=0 serial-num=1"
    ),
    "machine check": ("mce: Uncorrected hardware memory error in user-access at 3f9a72c00"),
    "disk error": ("blk_update_request: I/O error, dev nvme1n1, sector 123456 op 0x0:(READ)"),
    "link down": ("mlx5_core 0000:1a:00.0 ens1f0np0: Link down"),
    "segmentation fault, in the kernel log": (
        "python[4711]: segfault at 0 ip 00007f1c2a3b4c5d sp 00007ffd error 4 in libfoo.so[7f1c2a000000+1000]"
    ),
    "Slurm time limit": ("slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***"),
    "Slurm preemption": (
        "slurmstepd: error: *** STEP 123.0 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO PREEMPTION ***"
    ),
    "Slurm node failure": (
        "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO NODE FAILURE, SEE LOG ***"
    ),
    "Slurm cancellation": ("slurmstepd: error: *** STEP 123.0 ON n1 CANCELLED AT 2026-11-20T10:00:00 ***"),
    "Slurm OOM kill": (
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=123.0 cgroup. Some of your processes may have"
    ),
    "spot interruption": ("Host EC2 (instance i-0abc123) terminated."),
    "pod eviction": ("The node was low on resource: ephemeral-storage. Container main was using 30Gi, request is 0."),
    "container OOM kill": ("OutOfMemoryError: Container killed due to memory usage"),
    "interrupted by a person": ("KeyboardInterrupt"),
    "a rank's launcher says that it failed": (
        "E1120 10:00:00.1 1 site-packages/torch/distributed/elastic/multiprocessing/api.py:1003] failed "
        "(exitcode: -9) local_rank: 1 (pid: 4711) of binary: /usr/bin/python"
    ),
    "ended by its launcher": (
        "W1120 10:00:00.1 site-packages/torch/distributed/elastic/multiprocessing/api.py:1029] Sending p"
        "rocess 4712 closing signal SIGTERM"
    ),
    "a rank ended by a signal": ("srun: error: n2: task 3: Killed"),
    "uncorrectable ECC error, by CUDA": ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    "device gone, by CUDA": ("RuntimeError: CUDA error: no CUDA-capable device is detected"),
    "NVLink error, by CUDA": ("CUDA error: uncorrectable NVLink error detected during the execution"),
    "Neuron waits for another worker": ("nrt_execute failed with status_code=1200 (NRT_EXEC_HW_ERR_COLLECTIVES)"),
    "Neuron DMA abort": ("[MLA 0][NC 0] DMA TX engine 0 is in an abort state"),
    "Neuron memory error": (
        "(FATAL-RT-UNDEFINED-STATE) [ND 0][NC 0] Uncorrectable memory error is detected, metadata: 0x16."
    ),
    "Neuron execution timeout": (
        "(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 0 NC 0, model x.neff, waiting"
    ),
    "Neuron cores in use": (
        "ERROR   NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available - Requested:nc1-nc1 Available:0"
    ),
    "Neuron driver": (
        "ERROR  NRT:nrt_init  Unable to determine Neuron Driver version. Please check aws-neuron-dkms package"
    ),
    "Neuron numerical error": ("nrt_execute failed with status_code=1003 (NRT_EXEC_COMPLETED_WITH_NUM_ERR)"),
    "Neuron bad input or memory access of the program": ("nrt_execute failed: NRT_EXEC_OOB"),
    "CUDA error that a program can cause": ("RuntimeError: CUDA error: device-side assert triggered"),
    "failed assertion in a CUDA kernel": (
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss: block: [0,0,0], thread: [3,0,0] Assertion `"
        "t >= 0 && t < n_classes` failed."
    ),
    "out of device memory": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79"
    ),
    "full disk": ("OSError: [Errno 28] No space left on device: '/scratch/step-500.pt'"),
    "quota": ("OSError: [Errno 122] Disk quota exceeded"),
    "read-only or broken file system": ("OSError: [Errno 5] Input/output error: '/fsx/data/shard-17.bin'"),
    "broken checkpoint or file of torch": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
    ),
    "unreachable object store": (
        'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://x/"'
    ),
    "refused by an object store": (
        "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation"
    ),
    "shared memory too small": (
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory."
    ),
    "data loader's worker killed": ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed."),
    "too many open files or processes": ("OSError: [Errno 24] Too many open files: '/data/shard-0912.tar'"),
    "lack of memory, by Python": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate"
        " memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "bad data": ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    "RDMA completion with error": (
        "n1:1:2 [1] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092>"
        " with error 12, opcode 0, len 0, vendor err 129 (Recv)"
    ),
    "EFA completion with error": (
        "NCCL WARN NET/OFI Request 0x7f completed with error. RC: 113. Error: 4109 (Unresponsive receiver)"
    ),
    "no EFA": ("OFI plugin initNet() failed is EFA enabled?"),
    "NCCL lost a peer": (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exite"
        "d or there was a network error, NCCL version 2.21.5"
    ),
    "NCCL timeout": (
        "[rank1]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operati"
        "on timeout: WorkNCCL(SeqNum=668, OpType=ALLREDUCE, NumelIn=52, NumelOut=52, Timeout(ms)=600000)"
        " ran for 600097 milliseconds"
    ),
    "gloo lost a peer or waited in vain": (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895"
    ),
    "the store of the ranks is gone or late": (
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying "
        "to connect to (n1, 29500)."
    ),
    "port in use": (
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500,"
        " useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    ),
    "name not resolved": ("socket.gaierror: [Errno -3] Temporary failure in name resolution"),
    "no route or refused": ("OSError: [Errno 113] No route to host"),
    "NCCL system error": (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system err"
        "or (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
    ),
    "NCCL error of a CUDA call": (
        "n1:1:2 [0] enqueue.cc:1 NCCL WARN Cuda failure 'an illegal memory access was encountered'"
    ),
    "NCCL used wrongly": ("NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 10000"),
    "import error": ("ModuleNotFoundError: No module named 'flash_attn'"),
    "NaN loss": ("RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output."),
    "shape or type": ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)"),
    "ranks disagree": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE"
    ),
    "assertion": ("AssertionError: batch is empty"),
    "file missing or refused": ("PermissionError: [Errno 13] Permission denied: '/ckpt/step-500'"),
    "segmentation fault": ("Fatal Python error: Segmentation fault"),
    "exception of the program": ("ValueError: learning rate must be positive"),
    "a connection is refused, cut or not answered": "ConnectionRefusedError: [Errno 111] Connection refused",
    "the build does not fit the device or driver": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ),
    "an error between ranks that says no more": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL",
    "NCCL internal error": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, internal error",
    "Neuron failure that says no more": 'RuntimeError: INTERNAL: nrt_load status=1, error message="x"',
    "bus error": "[n1:90424:0:95364] Caught signal 7 (Bus error: nonexistent physical address)",
    "compilation failed": "RuntimeError: Bad StatusOr access: INTERNAL: RunNeuronCCImpl: error condition error != 0",
    "torchrun was told to end": "multiprocessing.api.SignalException: Process 7 got signal: 15",
    "a server on the network did not answer": "requests.exceptions.ConnectionError: HTTPSConnectionPool",
}
