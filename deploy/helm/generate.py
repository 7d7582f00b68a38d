"""
Write what is made of other files in the charts; `python -m deploy.helm.generate` after each change of these.

healthd-job/files/instance-types.yaml says what a job that wants whole nodes requests of each instance type, from
`checks/catalog.py`. healthd/files has the rules, the dashboards and the admission policies: a chart cannot reach files
beside it. The README of
each chart is a table of its values, in the form of helm-docs, from the comments of values.yaml. A test compares what
stands there with what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from checks.catalog import TYPES

FOLDER = Path(__file__).parent
CHARTS = ("healthd", "healthd-job")
COPIES = {
    "healthd/files/prometheus-rules.yaml": "kubernetes/components/monitoring/prometheus-rules.yaml",
    "healthd/files/ungated-jobs-policy.yaml": "kubernetes/components/ungated-jobs/policy.yaml",
    "healthd/files/ungated-jobs-binding.yaml": "kubernetes/components/ungated-jobs/binding.yaml",
    "healthd/files/gate-injection-policy.yaml": "kubernetes/components/gate-injection/policy.yaml",
    "healthd/files/gate-injection-template.yaml": "kubernetes/components/gate-injection/template.yaml",
    "healthd/files/healthd-collectives.json": "grafana/healthd-collectives.json",
    "healthd/files/healthd-fleet.json": "grafana/healthd-fleet.json",
    "healthd/files/healthd-node.json": "grafana/healthd-node.json",
}

# Names of the device plugins' resources by accelerator. Sources: AWS Neuron, NVIDIA k8s-device-plugin.
RESOURCES = {"neuron": "aws.amazon.com/neuron", "cuda": "nvidia.com/gpu"}

HEAD = """\
# Made from checks/catalog.py by `python -m deploy.helm.generate`. null: no source says how many there are.
"""

README = """\
# {name}

![Version: {version}](https://img.shields.io/badge/Version-{version}-informational) \
![AppVersion: {appVersion}](https://img.shields.io/badge/AppVersion-{appVersion}-informational)

{description} How it is installed, step by step: `docs/kubernetes.md` of the project. The table is made from
`values.yaml` by `python -m deploy.helm.generate`.

Kubernetes: `{kubeVersion}`

## Values

| Key | Type | Default | Description |
|-----|------|---------|-------------|
"""


def instance_types() -> str:
    """A line for each type with devices: the resource, how many, and how many EFA interfaces."""
    lines = [
        f"{name}: {{resource: {RESOURCES[known.chip.accelerator]}, devices: {_count(known.devices)}, "
        f"efa: {_count(known.efa_interfaces)}}}\n"
        for name, known in TYPES.items()
    ]
    return HEAD + "".join(lines)


def _count(number: int | None) -> str:
    return "null" if number is None else str(number)


def readme(chart: str) -> str:
    """The chart's values as a table."""
    described = yaml.safe_load((FOLDER / chart / "Chart.yaml").read_text(encoding="utf-8"))
    text = (FOLDER / chart / "values.yaml").read_text(encoding="utf-8")
    rows = sorted(_rows(yaml.compose(text), "", text.splitlines()))
    return README.format(**described) + "".join(rows)


def _rows(node: yaml.Node | None, path: str, lines: list[str]) -> Iterator[str]:
    """A row for each value that has a comment of its own, and for each below that has none above it."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else key.value
        comment = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style and not comment:
            yield from _rows(value, name, lines)
        else:
            plain = yaml.safe_load(yaml.serialize(value))
            kinds = {bool: "bool", int: "int", str: "string", list: "list", dict: "object", type(None): "string"}
            shown = json.dumps(plain).replace("|", "\\|")
            yield f"| {name} | {kinds[type(plain)]} | `{shown}` | {comment} |\n"


def _comment(lines: list[str], line: int) -> str:
    """What the `# -- ` comment above a line says."""
    found: list[str] = []
    for text in reversed(lines[:line]):
        words = text.strip()
        if not words.startswith("#"):
            return ""
        found.insert(0, words.lstrip("# "))
        if words.startswith("# -- "):
            found[0] = re.sub(r"^# -- ", "", words)
            return " ".join(found).replace("|", "\\|")
    return ""


def written() -> dict[str, str]:
    """Every file that this writes, below deploy/helm, with what belongs into it."""
    files = {"healthd-job/files/instance-types.yaml": instance_types()}
    files |= {to: (FOLDER.parent / source).read_text(encoding="utf-8") for to, source in COPIES.items()}
    files |= {f"{chart}/README.md": readme(chart) for chart in CHARTS}
    return files


if __name__ == "__main__":
    for name, content in written().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
