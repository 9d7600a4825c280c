"""Commands of the ``finetune`` program that need a flow or a finished run."""
