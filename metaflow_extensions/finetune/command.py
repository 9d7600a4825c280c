"""The console script ``finetune``: it begins here, where no other package can have put its own code."""

from metaflow_extensions.finetune.own_packages import end_where_foreign


def main() -> None:
    """Run ``finetune``, unless a package of ours isn't ours."""
    end_where_foreign()
    from estimator.cli.app import main as run

    run()
