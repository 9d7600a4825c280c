"""The ``finetune`` command."""
