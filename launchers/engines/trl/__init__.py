"""TRL 1.16 for task grpo: `engine` is its face, `trainer` the run of a rank."""
