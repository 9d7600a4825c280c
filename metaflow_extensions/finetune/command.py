"""Entry point of the console script ``finetune``, in a package name that no other distribution uses."""

from metaflow_extensions.finetune.own_packages import exit_if_shadowed


def main() -> None:
    """Check that this project's packages are not shadowed, then run ``finetune``."""
    exit_if_shadowed()
    from estimator import interrupts

    interrupts.end_silently()  # until the command has been imported
    from estimator.cli.app import main as run

    run()
