"""
A whole Kubernetes on one machine, of the real programs.

    python -m tests.kubernetes.cluster up FOLDER [--nodes N] [--oldest] [--guarded]

runs etcd, API server, controller manager, scheduler, CoreDNS and N nodes until SIGTERM or SIGINT, and leaves nothing
behind. Each node is a network namespace and a mount namespace with its own containerd, kubelet and kube-proxy: to pods
it is a machine with a network, a host name, /var/lib/kubelet, /var/lib/healthd and /run/healthd of its own. In FOLDER:

    admin.kubeconfig       for kubectl, helm and clients
    ready                  exists once everything answers
    import NODE|all FILE   imports images (docker-archive); nothing is ever pulled
    NAME.log, NAME.pid     of each program; audit.log of the API server
    down/NAME              while such a file is there, that program is kept down (SIGKILL); then it is started again

With `--nodes 0` there is no node and root is not needed. `--oldest` takes the oldest supported Kubernetes for the
control plane, without nodes. With `--guarded` the cluster ends, and its folder goes, when the process that started it
has ended.

Pods have addresses of 10.88.N.0/24 and nodes are 10.89.0.(10+N); a cluster beside that has 10.90 and 10.91, and so on
to the fourth: a fifth waits. The programs are in the folder that KUBEBUILDER_ASSETS names (docs/kubernetes_tests.md).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import hashlib
import io
import ipaddress
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VARIABLE = "KUBEBUILDER_ASSETS"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE_PROGRAMS = ("coredns", "containerd", "containerd-shim-runc-v2", "ctr", "kubelet", "kube-proxy")
OLDEST = "kube-1.34"  # one file that is every component, by the name it is called by
# Program -> Debian package.
DEBIAN = {
    "ip": "iproute2",
    "iptables": "iptables",
    "runc": "runc",
    "busybox": "busybox-static",
    "nsenter": "util-linux",
}
PLUGINS = ("bridge", "portmap", "host-local", "loopback")
PLUGIN_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")

SERVICE_NET = "10.96.0.0/16"
DNS = "10.96.0.10"
FIRST_NET, MOST_CLUSTERS = 88, 4  # 10.FIRST_NET and the next are the pods and nodes of the first cluster
LOCK = Path("/run/lock/tests-kubernetes")
LOCK_SECONDS = 900.0
CGROUPS = Path("/sys/fs/cgroup")
# A node has 40 of inotify's instances; a user of most machines has 128.
INOTIFY, INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances"), 1024
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
# What a node has of its own besides its network and host name.
OWN_FOLDERS = {"/var/lib/kubelet": "kubelet", "/var/lib/healthd": "var-lib-healthd", "/run/healthd": "run-healthd"}


class ClusterError(Exception):
    """What keeps the cluster from running, in one line or with the end of a log."""


def missing(*, nodes: int, oldest: bool = False) -> str:
    """Why no such cluster can run here, by name; empty when it can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no folder with etcd, kube-apiserver, kubelet, ...: make kubernetes-programs"
    for program in (*CONTROL_PLANE, *((OLDEST,) if oldest else ()), *(NODE_PROGRAMS if nodes else ())):
        if not Path(folder, program).exists():
            return f"{program} is not in {folder} ({VARIABLE}): make kubernetes-programs"
    if not nodes:
        return ""
    for program, package in DEBIAN.items():
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install {package}"
    for plugin in PLUGINS:
        if not any(Path(place, plugin).exists() for place in PLUGIN_FOLDERS):
            return f"CNI plug-in {plugin} is not installed: apt-get install containernetworking-plugins"
    return "needs root" if os.geteuid() else ""


@dataclass(frozen=True)
class Running:
    """A program of the cluster, and how it was started."""

    name: str
    process: subprocess.Popen[bytes]
    words: tuple[str | Path, ...]


class Authority:
    """The certificate authority of a cluster, with the keys of everybody in it in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes-ca")])
        folder.mkdir(exist_ok=True)
        self._write("ca", self._key, self._certificate(self._name, self._key.public_key(), ()))
        self._write("sa", rsa.generate_private_key(public_exponent=65537, key_size=2048), None)

    def issue(self, file: str, name: str, organization: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        """Write FILE.key and FILE.crt, good for servers and for clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        words = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organization:
            words.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        self._write(file, key, self._certificate(x509.Name(words), key.public_key(), hosts))

    def _certificate(
        self, name: x509.Name, public: ec.EllipticCurvePublicKey, hosts: tuple[str, ...]
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        ca = name == self._name
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=7))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
            made = made.add_extension(usage, critical=False)
        if hosts:
            made = made.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
        return made.sign(self._key, hashes.SHA256())

    def _write(
        self, file: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, certificate: x509.Certificate | None
    ) -> None:
        path = self._folder / f"{file}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        if certificate is not None:
            (self._folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Kubernetes:
    """The programs of one cluster: `up` starts them, `down` ends them and removes what they made on this machine."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        oldest: bool = False,
        gates: Sequence[str] = (),
        apis: Sequence[str] = (),
        number: int = 0,
    ) -> None:
        """
        `number`: which cluster with nodes of this machine it is, from 0. `gates` and `apis` are features of the control
        plane and versions of APIs (`GROUP/VERSION`) that are off by default.
        """
        self._gates = [f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"] if gates else []
        self._apis = [f"--runtime-config={','.join(f'{api}=true' for api in apis)}"] if apis else []
        self._pods, self._hosts = (f"10.{FIRST_NET + 2 * number + more}" for more in (0, 1))
        self._gateway = f"{self._hosts}.0.1"  # the control plane's address on the bridge of the nodes
        self.folder, self.nodes = folder, nodes
        self.running: list[Running] = []
        self._down: set[str] = set()
        self._programs = Path(os.environ[VARIABLE])
        self._oldest = oldest
        self._prefix = f"hk{os.getpid() % 10000}"
        self._namespaces: list[str] = []
        self._etcd, self._etcd_peer, self._api, self._controllers, self._scheduler = _free_ports(5)
        folder.mkdir(parents=True, exist_ok=True)

    def up(self) -> None:
        """Start everything and wait until it answers; ClusterError."""
        began = time.monotonic()
        self._keys()
        self._control_plane()
        print(f"control plane: {time.monotonic() - began:.1f} s", flush=True)
        if self.nodes:
            if int(INOTIFY.read_text()) < INOTIFY_INSTANCES:
                INOTIFY.write_text(f"{INOTIFY_INSTANCES}\n")
            pause = pause_image(self.folder)
            self._dns()
            self._storage()
            for number in range(1, self.nodes + 1):
                self._node(number, pause)
            self._importer()
            ready = "jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
            self._wait("the nodes", 180, lambda: self.kubectl("get", "nodes", "-o", ready).count("True") == self.nodes)
            print(f"{self.nodes} nodes ready: {time.monotonic() - began:.1f} s", flush=True)
        (self.folder / "ready").write_text("")

    def down(self) -> None:
        """End everything, kubelets before containers before containerd; then mounts, namespaces and cgroups."""
        machines = ("containerd", "machine")
        for one in reversed([one for one in self.running if not one.name.startswith(machines)]):
            _stop(one.process)
        for number in range(1, self.nodes + 1):
            ctr = self._ctr(number)
            listed = subprocess.run([*ctr, "tasks", "ls", "-q"], capture_output=True, text=True, check=False)
            for task in listed.stdout.split():
                subprocess.run([*ctr, "tasks", "rm", "-f", task], capture_output=True, check=False)
        for one in reversed(self.running):
            _stop(one.process)
        self._remove()

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """What kubectl prints as the administrator; CalledProcessError."""
        line = [str(self._programs / "kubectl"), f"--kubeconfig={self.folder}/admin.kubeconfig", *words]
        return subprocess.run(line, input=text, capture_output=True, text=True, check=True).stdout

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start(self, name: str, *words: str | Path) -> None:
        path = f"{self._programs}:{os.environ['PATH']}"
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PATH": path},
                start_new_session=True,
            )
        (self.folder / f"{name}.pid").write_text(f"{process.pid}\n")
        self.running.append(Running(name, process, words))

    def ended(self) -> list[str]:
        """Programs that ended by themselves. Those of `down` are killed, and started again once they are not there."""
        down, ended = self.folder / "down", []
        for one in tuple(self.running):
            kept_down, over = (down / one.name).exists(), one.process.poll() is not None
            if kept_down and not over:
                one.process.kill()
                one.process.wait()
                self._down.add(one.name)
            elif over and not kept_down and one.name in self._down:
                self._down.discard(one.name)
                self.running.remove(one)
                self._start(one.name, *one.words)
            elif over and not kept_down:
                ended.append(one.name)
        return ended

    def _wait(self, what: str, seconds: float, ask: Callable[[], object]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for one in self.running:
                if one.process.poll() is not None:
                    words = (self.folder / f"{one.name}.log").read_bytes()[-3000:].decode(errors="replace")
                    raise ClusterError(f"{one.name} ended with {one.process.returncode}:\n{words}")
            with suppress(OSError, subprocess.CalledProcessError, ssl.SSLError):
                if ask():
                    return
            time.sleep(0.2)
        raise ClusterError(f"{what} did not answer within {seconds:.0f} s; the logs are in {self.folder}")

    # --- the control plane -------------------------------------------------------------------------------------------

    def _keys(self) -> None:
        made = Authority(self.folder / "pki")
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        made.issue("apiserver", "kube-apiserver", hosts=(*names, "127.0.0.1", "10.96.0.1", self._gateway))
        made.issue("admin", "admin", "system:masters")
        made.issue("controller-manager", "system:kube-controller-manager")
        made.issue("scheduler", "system:kube-scheduler")
        made.issue("proxy", "system:kube-proxy")
        made.issue("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
        made.issue("front-proxy", "front-proxy-client")
        for number in range(1, self.nodes + 1):
            name, address = f"node-{number}", f"{self._hosts}.0.{number + 10}"
            made.issue(name, f"system:node:{name}", "system:nodes", (name, address))

    def _kubeconfig(self, name: str, server: str) -> Path:
        pki, path = self.folder / "pki", self.folder / f"{name}.kubeconfig"
        user = {"client-certificate": str(pki / f"{name}.crt"), "client-key": str(pki / f"{name}.key")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "main",
            "clusters": [{"name": "main", "cluster": {"server": server, "certificate-authority": str(pki / "ca.crt")}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "main", "context": {"cluster": "main", "user": name}}],
        }
        path.write_text(json.dumps(config, indent=1))
        path.chmod(0o600)
        return path

    def _control_plane(self) -> None:
        folder, pki = self.folder, self.folder / "pki"
        address = "127.0.0.1"
        if self.nodes:
            address = self._gateway
            _ip("link", "add", f"{self._prefix}br", "type", "bridge")
            _ip("addr", "add", f"{self._gateway}/24", "dev", f"{self._prefix}br")
            _ip("link", "set", f"{self._prefix}br", "up")
        clients, peers = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._etcd_peer}"
        self._start(
            "etcd",
            *(self._programs / "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )
        self._start(
            "kube-apiserver",
            self._component("kube-apiserver"),
            *(f"--etcd-servers={clients}", f"--secure-port={self._api}", "--bind-address=0.0.0.0"),
            *(f"--advertise-address={address}", f"--service-cluster-ip-range={SERVICE_NET}"),
            *(f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key"),
            *(f"--client-ca-file={pki}/ca.crt", f"--service-account-key-file={pki}/sa.key"),
            f"--service-account-signing-key-file={pki}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-aggregator-routing=true",  # webhooks by addresses of pods: kube-proxy is on the nodes alone
            f"--requestheader-client-ca-file={pki}/ca.crt",
            f"--proxy-client-cert-file={pki}/front-proxy.crt",
            f"--proxy-client-key-file={pki}/front-proxy.key",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            *(
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
            ),
            *(f"--audit-log-path={folder}/audit.log", f"--audit-policy-file={self._audit_policy()}"),
            *(() if self.nodes else ("--endpoint-reconciler-type=none",)),
            *self._gates,
            *self._apis,
        )
        self._kubeconfig("admin", f"https://127.0.0.1:{self._api}")
        self._wait("kube-apiserver", 90, lambda: "ok" in self.kubectl("get", "--raw", "/readyz"))
        self._start(
            "kube-controller-manager",
            *self._of_control_plane("controller-manager", self._controllers),
            *(f"--service-account-private-key-file={pki}/sa.key", f"--root-ca-file={pki}/ca.crt"),
            *(f"--cluster-signing-cert-file={pki}/ca.crt", f"--cluster-signing-key-file={pki}/ca.key"),
            *("--use-service-account-credentials=true", "--allocate-node-cidrs=false"),
            *("--node-monitor-period=2s", "--node-monitor-grace-period=16s"),
        )
        self._start("kube-scheduler", *self._of_control_plane("scheduler", self._scheduler))
        self._wait("the default service account", 60, lambda: self.kubectl("get", "serviceaccount", "default"))

    def _of_control_plane(self, name: str, port: int) -> list[str | Path]:
        config = self._kubeconfig(name, f"https://127.0.0.1:{self._api}")
        return [
            self._component(f"kube-{name}"),
            *(f"--kubeconfig={config}", "--bind-address=127.0.0.1", f"--secure-port={port}", "--leader-elect=false"),
            *(f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"),
            *self._gates,
        ]

    def _component(self, name: str) -> Path:
        """A program of the control plane."""
        if not self._oldest:
            return self._programs / name
        link = self.folder / "oldest" / name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self._programs / OLDEST)
        return link

    def _audit_policy(self) -> Path:
        """What service accounts of pods do, so that tests can count it."""
        path = self.folder / "audit-policy.json"
        rules = [
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
            {"level": "None"},
        ]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
        path.write_text(json.dumps(policy))
        return path

    def _dns(self) -> None:
        """CoreDNS beside the control plane, behind the Service that kubelets tell pods of."""
        self.folder.joinpath("Corefile").write_text(
            textwrap.dedent(f"""\
            .:53 {{
                bind {self._gateway}
                kubernetes cluster.local in-addr.arpa {{
                    kubeconfig {self.folder}/admin.kubeconfig main
                }}
                errors
            }}
            """)
        )
        self._start("coredns", self._programs / "coredns", "-conf", self.folder / "Corefile")
        ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
        self._apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system"},
                "spec": {"clusterIP": DNS, "ports": ports},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "addressType": "IPv4",
                "metadata": {
                    "name": "kube-dns-1",
                    "namespace": "kube-system",
                    "labels": {"kubernetes.io/service-name": "kube-dns"},
                },
                "ports": ports,
                "endpoints": [{"addresses": [self._gateway], "conditions": {"ready": True}}],
            },
        )

    def _storage(self) -> None:
        """A default StorageClass with some volumes that are folders of this machine."""
        volumes = []
        for number in range(1, 17):
            path = self.folder / f"volume-{number}"
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
            volumes.append(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": f"volume-{number}"},
                    "spec": {
                        "capacity": {"storage": "50Gi"},
                        "accessModes": ["ReadWriteOnce" if number % 2 else "ReadWriteOncePod"],
                        "storageClassName": "standard",
                        "hostPath": {"path": str(path)},
                    },
                }
            )
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        self._apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": "standard", "annotations": default},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            },
            *volumes,
        )

    def _apply(self, *items: object) -> None:
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, number: int, pause: Path) -> None:
        name, folder = f"node-{number}", self.folder / f"node-{number}"
        folder.mkdir(exist_ok=True)
        self._network(number)
        self._machine(number, folder)
        inside = ["nsenter", f"--target={self.running[-1].process.pid}", "--mount", "--uts", "--net"]
        self._start(
            f"containerd-{number}",
            *inside,
            self._programs / "containerd",
            "-c",
            self._containerd_config(number, folder),
        )
        ctr = self._ctr(number)
        self._wait(
            f"containerd of {name}", 60, lambda: subprocess.run([*ctr, "version"], capture_output=True, check=True)
        )
        subprocess.run([*ctr, "images", "import", str(pause)], check=True, stdout=subprocess.DEVNULL)
        for root in self._cgroups(number):
            root.mkdir(exist_ok=True)
            for key in ("cpuset.cpus", "cpuset.mems"):
                if (root.parent / key).exists():
                    (root / key).write_text((root.parent / key).read_text())
        config = self._kubeconfig(name, f"https://{self._gateway}:{self._api}")
        self._start(
            f"kubelet-{number}",
            *inside,
            self._programs / "kubelet",
            *(
                f"--config={self._kubelet_config(number, folder)}",
                f"--kubeconfig={config}",
                f"--hostname-override={name}",
                f"--node-ip={self._hosts}.0.{number + 10}",
                "--v=2",
            ),
            f"--node-labels=healthd.internal/pool=cpu,topology.kubernetes.io/zone=z{number}",
        )
        proxy = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(self._kubeconfig("proxy", f"https://{self._gateway}:{self._api}"))},
            "clusterCIDR": f"{self._pods}.0.0/16",
            "hostnameOverride": name,
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
        }
        (folder / "proxy.json").write_text(json.dumps(proxy, indent=1))
        self._start(f"kube-proxy-{number}", *inside, self._programs / "kube-proxy", f"--config={folder / 'proxy.json'}")

    def _network(self, number: int) -> None:
        """A network namespace on the bridge, with routes to the pods of the other nodes."""
        netns, address = f"{self._prefix}n{number}", f"{self._hosts}.0.{number + 10}"
        _ip("netns", "add", netns)
        self._namespaces.append(netns)
        _ip("link", "add", f"{self._prefix}v{number}", "type", "veth", "peer", "name", "eth0", "netns", netns)
        _ip("link", "set", f"{self._prefix}v{number}", "master", f"{self._prefix}br", "up")
        _ip("-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", netns, "link", "set", "eth0", "up")
        _ip("-n", netns, "link", "set", "lo", "up")
        _ip("-n", netns, "route", "add", "default", "via", self._gateway)
        _ip("route", "add", f"{self._pods}.{number}.0/24", "via", address)
        for other in range(1, number):
            _ip("-n", netns, "route", "add", f"{self._pods}.{other}.0/24", "via", f"{self._hosts}.0.{other + 10}")
            _ip("-n", f"{self._prefix}n{other}", "route", "add", f"{self._pods}.{number}.0/24", "via", address)

    def _machine(self, number: int, folder: Path) -> None:
        """A process that holds the mounts and the host name of a node."""
        # Not `ip netns exec`: that hides /sys/fs/cgroup.
        Path("/lib/modules").mkdir(exist_ok=True)
        lines = ["set -e", "sysctl -qw net.ipv4.ip_forward=1", f"hostname node-{number}"]
        for target, source in OWN_FOLDERS.items():
            Path(target).mkdir(parents=True, exist_ok=True)
            (folder / source).mkdir(exist_ok=True)
            lines.append(f"mount --bind {folder / source} {target}")
        if HUGE_PAGES.exists():  # the kubelet is told of some; there are none
            for size in HUGE_PAGES.iterdir():
                (folder / "hugepages" / size.name).mkdir(parents=True, exist_ok=True)
                count = 4096 if size.name == "hugepages-2048kB" else 0
                (folder / "hugepages" / size.name / "nr_hugepages").write_text(f"{count}\n")
            lines.append(f"mount --bind {folder}/hugepages {HUGE_PAGES}")
        lines += ["mount --make-rshared /", f"touch {folder}/made", "exec sleep 2147483647"]
        (folder / "made").unlink(missing_ok=True)
        self._start(
            f"machine-{number}",
            *("nsenter", f"--net=/run/netns/{self._prefix}n{number}"),
            *("unshare", "--mount", "--uts", "--propagation=private", "sh", "-c", "\n".join(lines)),
        )
        self._wait(f"the namespaces of node-{number}", 10, (folder / "made").exists)

    def _containerd_config(self, number: int, folder: Path) -> Path:
        cni = folder / "cni"
        cni.mkdir(exist_ok=True)
        ranges = [[{"subnet": f"{self._pods}.{number}.0/24"}]]
        ipam = {
            "type": "host-local",
            "dataDir": str(folder / "ipam"),
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
        plugins = [{**bridge, "ipam": ipam}, {"type": "portmap", "capabilities": {"portMappings": True}}]
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        (cni / "10-bridge.conflist").write_text(json.dumps(network))
        path = folder / "containerd.toml"
        path.write_text(
            textwrap.dedent(f"""\
            version = 3
            root = "{folder}/containerd"
            state = "{self._state(number)}"
            [grpc]
              address = "{self._state(number)}.sock"
            [plugins."io.containerd.cri.v1.images"]
              snapshotter = "overlayfs"
            [plugins."io.containerd.cri.v1.images".pinned_images]
              sandbox = "localhost/pause:1"
            [plugins."io.containerd.cri.v1.runtime"]
              restrict_oom_score_adj = true
            [plugins."io.containerd.cri.v1.runtime".cni]
              bin_dirs = {json.dumps(PLUGIN_FOLDERS)}
              conf_dir = "{cni}"
            [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
              runtime_type = "io.containerd.runc.v2"
            [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
              BinaryName = "{shutil.which("runc")}"
              SystemdCgroup = false
            """)
        )
        return path

    def _kubelet_config(self, number: int, folder: Path) -> Path:
        pki, name = self.folder / "pki", f"node-{number}"
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "cgroupRoot": f"/{self._prefix}n{number}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": ["pods"],
            "failSwapOn": False,
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "tlsCertFile": str(pki / f"{name}.crt"),
            "tlsPrivateKeyFile": str(pki / f"{name}.key"),
            "containerRuntimeEndpoint": f"unix://{self._state(number)}.sock",
            "resolvConf": str(folder / "resolv.conf"),
            "nodeStatusUpdateFrequency": "4s",
            "nodeStatusReportFrequency": "10s",
            "evictionHard": {"memory.available": "50Mi"},
            "imageGCHighThresholdPercent": 100,
            "maxPods": 60,
            "address": "0.0.0.0",
            "healthzBindAddress": "127.0.0.1",
            "syncFrequency": "10s",
            "podLogsDir": str(folder / "pod-logs"),
            "serializeImagePulls": True,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "localStorageCapacityIsolation": False,
            "registerNode": True,
        }
        path = folder / "kubelet.json"
        path.write_text(json.dumps(config, indent=1))
        return path

    def _state(self, number: int) -> Path:
        """Where containerd of a node keeps its state; its socket is beside it. Sockets have short paths."""
        return Path(f"/run/{self._prefix}-{number}")

    def _ctr(self, number: int) -> list[str]:
        return [str(self._programs / "ctr"), "-a", f"{self._state(number)}.sock", "-n", "k8s.io"]

    def _cgroups(self, number: int) -> list[Path]:
        """The node's own cgroup, in every hierarchy of version 1 or the one of version 2."""
        unified = (CGROUPS / "cgroup.controllers").exists()
        tops = [CGROUPS] if unified else [top for top in CGROUPS.iterdir() if (top / "cgroup.procs").exists()]
        return [top / f"{self._prefix}n{number}" for top in tops]

    def _importer(self) -> None:
        lines = ["#!/bin/sh", "set -e"]
        for number in range(1, self.nodes + 1):
            ctr = " ".join(self._ctr(number))
            lines.append(f'if [ "$1" = all ] || [ "$1" = node-{number} ]; then {ctr} images import "$2"; fi')
        path = self.folder / "import"
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    def _remove(self) -> None:
        """Mounts, network namespaces, the bridge, sockets and cgroups of the nodes."""
        if not self.nodes:
            return
        states = [str(self._state(number)) for number in range(1, self.nodes + 1)]
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted(mounts, reverse=True):
            if mount.startswith((f"{self.folder}/", *states)):
                subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        for netns in self._namespaces:
            subprocess.run(["ip", "netns", "del", netns], check=False)
        subprocess.run(["ip", "link", "del", f"{self._prefix}br"], check=False, capture_output=True)
        for number in range(1, self.nodes + 1):
            shutil.rmtree(self._state(number), ignore_errors=True)
            Path(f"{self._state(number)}.sock").unlink(missing_ok=True)
            Path(f"{self._state(number)}.sock.ttrpc").unlink(missing_ok=True)
            for root in self._cgroups(number):
                folders = sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True)
                for group in (*folders, *((root,) if root.exists() else ())):
                    with suppress(OSError):  # a process that is on its way out
                        group.rmdir()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a test may have stopped it
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def pause_image(folder: Path) -> Path:
    """An image of a busybox that sleeps: the sandbox of pods, and a small image for tests (`localhost/pause:1`)."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(busybox, "bin/busybox")
        for name in ("sh", "sleep", "cat", "ls", "id", "env", "wget", "nslookup", "true", "false", "echo"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    body = layer.getvalue()
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(body).hexdigest()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["localhost/pause:1"], "Layers": ["layer.tar"]}]
    path = folder / "pause.tar"
    with tarfile.open(path, "w") as tar:
        files = {
            "config.json": json.dumps(config).encode(),
            "layer.tar": body,
            "manifest.json": json.dumps(manifest).encode(),
        }
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@contextmanager
def _own_networks(nodes: int) -> Iterator[int]:
    """Which cluster with nodes of this machine this is, from 0; ClusterError when there are too many for long."""
    if not nodes:
        yield 0
        return
    end = time.monotonic() + LOCK_SECONDS
    while True:
        for number in range(MOST_CLUSTERS):
            with Path(f"{LOCK}{number or ''}").open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield number
                return
        if time.monotonic() > end:
            raise ClusterError(f"{MOST_CLUSTERS} clusters with nodes have run on this machine for {LOCK_SECONDS:.0f} s")
        time.sleep(0.5)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--gate", action="append", default=[], help="a feature gate of the control plane to turn on")
    parser.add_argument("--api", action="append", default=[], help="GROUP/VERSION that is not served by default")
    parser.add_argument("--guarded", action="store_true")
    given = parser.parse_args()
    if given.oldest and given.nodes:
        parser.error("--oldest wants --nodes 0")
    if not 0 <= given.nodes <= 99:
        parser.error("--nodes is from 0 to 99")
    if reason := missing(nodes=given.nodes, oldest=given.oldest):
        parser.error(reason)
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with _own_networks(given.nodes) as number:
            folder, nodes = given.folder.resolve(), given.nodes
            features = {"gates": given.gate, "apis": given.api}
            cluster = Kubernetes(folder, nodes, oldest=given.oldest, number=number, **features)
            return _run(cluster, parent if given.guarded else None)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _run(cluster: Kubernetes, parent: int | None) -> int:
    """Until a signal, the end of `parent`, or that of a program."""
    orphaned = False
    try:
        cluster.up()
        while not (ended := cluster.ended()):
            if orphaned := parent is not None and os.getppid() != parent:
                return 0
            time.sleep(0.2)
        raise ClusterError(f"ended: {', '.join(ended)}; the logs are in {cluster.folder}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cluster.down()
        if orphaned:  # nobody is left to look into it
            shutil.rmtree(cluster.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
