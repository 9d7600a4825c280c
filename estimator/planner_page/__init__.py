"""Planner page: form fields as input, plans as plain values as output.

The site ships these modules with the estimator and runs them in the browser (infra/site/planner). They use
only Python's standard library, and read no files except the estimator's tables.
"""
