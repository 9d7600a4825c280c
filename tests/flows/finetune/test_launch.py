"""Imports of a flow: a task loads no planner, and the code package has all packages of the project."""

from __future__ import annotations

import json
import subprocess
import sys

from metaflow_extensions.finetune.own_packages import MARK

_IMPORTS = f"""
import json, sys
import flows.finetune_flow
packed = [name for name, module in sys.modules.items() if hasattr(module, "{MARK}")]
print(json.dumps({{"packed": sorted(packed), "loaded": sorted(sys.modules)}}))
"""


def test_a_flow_imports_all_packages_for_the_code_package_but_not_the_planner_or_numpy() -> None:
    command = [sys.executable, "-c", _IMPORTS]
    imports = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert imports["packed"] == ["checklist", "decorators", "estimator", "flows", "launchers"]
    slow = {"estimator.planning.planner", "estimator.throughput", "decorators.backends.registry", "numpy"}
    assert slow & set(imports["loaded"]) == set()
