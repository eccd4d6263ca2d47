"""Each half runs without the other: neither its code is imported nor its weights are needed on the disk."""

import re
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import picture_message
from tests.stack import running_stack
from tests.tiny_models import DECODER_SHARD, ENCODER_SHARD

pytestmark = pytest.mark.slow

MODEL_CODE_OF_TRANSFORMERS = "transformers.models.qwen3_vl.modeling_qwen3_vl"


async def test_each_half_serves_without_the_other_halfs_code_and_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    models = {"encoder": DECODER_SHARD, "decoder": ENCODER_SHARD, "gateway": "*.safetensors"}
    environments = {}
    for role, removed in models.items():
        copy = tmp_path / role / "tiny"
        shutil.copytree(tiny_checkpoint, copy)
        for shard in list(copy.glob(removed)):
            shard.unlink()
        # Python then writes a line for each module that it imports.
        environments[role] = {"TANDEM_MODEL": str(copy), "PYTHONPROFILEIMPORTTIME": "1"}

    async with running_stack(tmp_path / "stack", tiny_checkpoint, by_role=environments, by_command=True) as stack:
        async with stack.client() as client:
            response = await client.chat.completions.create(
                model="tiny", messages=picture_message(1), max_completion_tokens=8
            )
        assert response.usage is not None
        assert response.usage.completion_tokens == 8
        imported = {role: modules_of(stack.log(f"{role}-0")) for role in models}

    for role, modules in imported.items():
        others = {"encoder_svc", "decoder_svc", "gateway_svc"} - {f"{role}_svc"}
        assert f"{role}_svc" in modules, "the trace is there"
        assert not others & modules
        assert MODEL_CODE_OF_TRANSFORMERS not in modules
    assert not {"torch", "transformers", "av"} & imported["gateway"]


def modules_of(log: str) -> set[str]:
    """The modules in an import trace."""
    return set(re.findall(r"^import time:.*\| +([\w.]+)$", log, re.MULTILINE))
