"""The training loop over transformers models, which engines share that differ in sharding alone.

``train.py`` is the loop of one rank, over a ``Sharding`` of ``sharding.py`` (DeepSpeed's ZeRO,
FSDP2). Model, adapters, optimizer, schedule and export are the same for all of them.
"""
