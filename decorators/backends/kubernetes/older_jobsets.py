"""Remove the JobSets of a step's earlier attempts before its next attempt on Argo Workflows creates another.

An attempt on Argo ends with the pod that watches its JobSet. Where that pod alone was evicted, the JobSet
trains on and holds its GPUs. This file's text runs as an init container of the next watching pod, in the
step's image, so it needs nothing but Python: ``python -c TEXT ATTEMPT SELECTOR``.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GONE_WITHIN_S = 900  # a training pod's grace, and what the API takes to remove it


def remove(
    server: str,
    selector: str,
    token: str,
    namespace: str,
    context: ssl.SSLContext | None = None,
    poll_s: float = 5.0,
) -> None:
    """Delete the JobSets that a label selector matches, and wait until they and their pods are gone."""
    query = urllib.parse.urlencode({"labelSelector": selector})
    address = f"{server}/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets?{query}"
    foreground = json.dumps({"propagationPolicy": "Foreground"}).encode()

    def request(method: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        made = urllib.request.Request(address, data=body, method=method, headers=headers)  # noqa: S310
        with urllib.request.urlopen(made, timeout=30, context=context) as response:  # noqa: S310
            return json.load(response)

    deadline = time.monotonic() + GONE_WITHIN_S
    names = [item["metadata"]["name"] for item in request("GET")["items"]]
    if names:
        print(f"Removing JobSets of earlier attempts: {', '.join(names)}", flush=True)
        request("DELETE", foreground)
    while request("GET")["items"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"The JobSets of earlier attempts are still there: {', '.join(names)}")
        time.sleep(poll_s)


def main(attempt: str, selector: str) -> None:
    """Do nothing on the first attempt; end with a clear line where the API refuses."""
    if int(attempt) == 0:
        return
    token, namespace = ((ACCOUNT / name).read_text() for name in ("token", "namespace"))
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        remove("https://kubernetes.default.svc", selector, token, namespace, context)
    except urllib.error.HTTPError as error:
        raise SystemExit(
            f"The JobSets of earlier attempts can't be removed: {error}. The service account needs the verbs "
            "list and deletecollection on jobsets (infra/kubernetes/components/argo)."
        ) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
