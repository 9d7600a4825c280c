"""Where a result goes besides result.json: chat, metrics, and the cluster's own record of its nodes.

An output that fails never costs the result: each says in one line what went wrong.
"""
