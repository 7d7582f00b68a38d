"""
Write components/monitoring/prometheus-rules.yaml: the rules of deploy/prometheus as a PrometheusRule.

`python -m deploy.kubernetes.generate` after each change of them; a test compares what stands there with what this
writes. The text of the groups is taken over as it is, so that comments stay.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("healthd-recording.yml", "healthd-alerts.yml")
TARGET = FOLDER / "components/monitoring/prometheus-rules.yaml"

HEAD = """\
# Made from deploy/prometheus/{name} by `python -m deploy.kubernetes.generate`: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {stem}
  labels:
    app.kubernetes.io/name: healthd
spec:
"""


def rules() -> str:
    """One PrometheusRule for each file of rules."""
    parts = []
    for name in SOURCES:
        text = (FOLDER.parent / "prometheus" / name).read_text(encoding="utf-8")
        head, found, groups = text.partition("\ngroups:\n")
        if not found and text.startswith("groups:\n"):
            head, groups = "", text.removeprefix("groups:\n")
        elif not found:
            raise ValueError(f"{name}: has no line 'groups:'; this knows no other form")
        if any(line and not line.startswith("#") for line in head.splitlines()):
            raise ValueError(f"{name}: has something else before its groups; this would lose it")
        lines = [f"  {line}".rstrip() for line in ("groups:", *groups.splitlines())]
        parts.append(HEAD.format(name=name, stem=Path(name).stem) + "\n".join(lines) + "\n")
    return "---\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(rules(), encoding="utf-8")
