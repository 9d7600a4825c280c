"""FSDP2 (torch's fully_shard) behind :class:`launchers.engines.Engine`: the loop over transformers models."""
