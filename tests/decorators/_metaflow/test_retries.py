"""The number of retries of a deployed step, which the estimator counts with."""

from decorators._metaflow.retries import RETRIES
from estimator.planning.goals import ATTEMPTS


def test_spot_plans_count_with_the_retries_that_a_deployed_step_has() -> None:
    assert ATTEMPTS == RETRIES
