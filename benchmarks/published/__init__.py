"""Published measurements: their tables read as setups, and the estimator scored against them."""
