"""What the tests of overlays, and those beside them, are made with."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.manifests import KUBERNETES


def own(folder: Path, image: str, resource: str, *components: str) -> Path:
    """A kustomization of somebody who has the repository beside it, with an image that is there."""
    repository, _, tag = image.rpartition(":")
    folder.mkdir()
    reach = Path("/".join([".."] * len(folder.resolve().parts[1:]))) / KUBERNETES.relative_to("/")
    listed = "\n".join(f"  - {reach}/components/{name}" for name in components)
    (folder / "kustomization.yaml").write_text(
        f"""\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: healthd-system
resources:
  - {reach}/{resource}
images:
  - name: registry.example.com/healthd
    newName: {repository}
    newTag: "{tag}"
"""
        + (f"components:\n{listed}\n" if listed else "")
    )
    return folder
