"""The gateway's image stays small: nothing that it imports brings torch or a model library along."""

import subprocess
import sys

from tests.paths import REPOSITORY


def test_the_gateway_imports_no_torch() -> None:
    heavy = ("torch", "transformers", "safetensors", "av")
    script = f"import gateway_svc.app, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
