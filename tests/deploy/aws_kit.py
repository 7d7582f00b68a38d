"""What AWS and healthd say of the files of deploy/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


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
