"""Steps, planning and artifacts of the fine-tuning flows."""
