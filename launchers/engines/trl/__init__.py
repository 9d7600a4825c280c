"""TRL 1.16 for task grpo: `engine` is its face, `trainer` a rank's run, `rewards` what scores answers."""
