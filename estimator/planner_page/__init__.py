"""The planner as a page: fields of a form in, plans as plain values out.

The site ships these modules with the estimator and runs them in the browser (infra/site/planner). They need
Python's standard library alone, and read no file but the estimator's tables.
"""
