"""What the tests of batch, and those beside them, are made with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


FOLDER = ROOT / "deploy/batch"


def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def complaints(service: str, operation: str, body: Mapping[str, Any]) -> str:
    """What botocore's own model of the service says against it; members that it does not know are errors."""
    pytest.importorskip("botocore", reason="botocore is not installed: pip install '.[aws]'")
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model(service).operation_model(operation)
    return str(ParamValidator().validate(body, model.input_shape).generate_report())


def load_settings(environ: Mapping[str, str]) -> Any:
    from healthd.cli.settings.tree import Settings
    from healthd.core.config import load as load_config

    defaults = {"node.name": "n", "node.state_dir": Path("/s"), "node.run_dir": Path("/r")}
    return load_config(Settings, file=None, environ=environ, arguments={}, sections=("preflight",), defaults=defaults)
