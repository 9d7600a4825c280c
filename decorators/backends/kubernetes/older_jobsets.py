"""Remove the JobSets of a step's earlier attempts before its next attempt on Argo Workflows.

On Argo, an attempt ends with the pod that watches its JobSet. If only that pod is evicted, the JobSet keeps
training and holds its GPUs. The text of this file runs as an init container of the next watching pod, in the
step's image, so it uses only the standard library: ``python -c TEXT ATTEMPT SELECTOR``.
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

from estimator.terminal import print

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GONE_WITHIN_S = 900  # grace period of a training pod, plus the time to delete it


def remove(
    server: str,
    selector: str,
    token: str,
    namespace: str,
    context: ssl.SSLContext | None = None,
    poll_s: float = 5.0,
) -> None:
    """Delete the JobSets that match a label selector, and wait until they and their pods are gone."""
    query = urllib.parse.urlencode({"labelSelector": selector})
    address = f"{server}/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets?{query}"
    foreground = json.dumps({"propagationPolicy": "Foreground"}).encode()

    def request(method: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        api_request = urllib.request.Request(address, data=body, method=method, headers=headers)  # noqa: S310
        with urllib.request.urlopen(api_request, timeout=30, context=context) as response:  # noqa: S310
            return json.load(response)

    deadline = time.monotonic() + GONE_WITHIN_S
    names = [item["metadata"]["name"] for item in request("GET")["items"]]
    if names:
        print(f"Removing JobSets of earlier attempts: {', '.join(names)}", flush=True)
        request("DELETE", foreground)
    while request("GET")["items"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"JobSets of earlier attempts were not deleted in time: {', '.join(names)}")
        time.sleep(poll_s)


def main(attempt: str, selector: str) -> None:
    """Remove older JobSets, except on the first attempt. Exits with one line if the API denies it."""
    if int(attempt) == 0:
        return
    token, namespace = ((ACCOUNT / name).read_text() for name in ("token", "namespace"))
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        remove("https://kubernetes.default.svc", selector, token, namespace, context)
    except urllib.error.HTTPError as error:
        raise SystemExit(
            f"JobSets of earlier attempts cannot be removed: {error}. The service account needs the verbs "
            "list and deletecollection on jobsets (infra/kubernetes/components/argo)."
        ) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
