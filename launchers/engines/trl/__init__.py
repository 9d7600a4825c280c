"""TRL 1.16 for task grpo: `engine` implements Engine, `trainer` runs one rank."""
