"""What compiled blocks keep for their backward pass."""

from estimator.memory.activations.block import block_bytes
from estimator.models import find
from estimator.setup import Setup


def test_compiled_blocks_save_keys_once_if_the_engine_does_not_repeat_them() -> None:
    model = find("llama-8b")
    repeated = block_bytes(Setup(model=model, engine="torchtitan", compile=True))
    kept_once = block_bytes(Setup(model=model, engine="fsdp2", compile=True))
    assert repeated - kept_once == 2 * (2 * model.q_dim - model.kv_dim - model.v_dim)
