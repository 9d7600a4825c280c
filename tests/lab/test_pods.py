"""What a pod of the test bed can and can't do: what the tests on clusters build on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab import pods
from tests.lab.memory_limits import MemoryLimit, mechanism
from tests.lab.pods import Exit, Hub, PodSpec

pytestmark = pytest.mark.skipif(pods.missing() is not None, reason=str(pods.missing()))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub")) as made:
        yield made


Say = Callable[..., tuple[Exit, str]]


@pytest.fixture
def say(hub: Hub) -> Say:
    """Run a shell line in a pod: how it ended, and what it printed."""

    def run(line: str, **more: Any) -> tuple[Exit, str]:
        spec = {"name": "p", "hostname": "p", "command": ("bash", "-c", line)} | more
        pod = hub.start(PodSpec(**spec))
        ended = pod.wait(60)
        return ended, pod.log.read_text()

    return run


def test_a_pods_python_has_what_is_installed_here_but_not_this_project(say: Say) -> None:
    ended, printed = say("python -c 'import metaflow, psutil; print(1)'; python -c 'import flows'")
    assert printed.startswith("1\n")
    assert "No module named 'flows'" in printed
    assert ended == Exit(code=1, reason="Error")


def test_what_one_pod_has_compiled_of_its_code_package_holds_for_the_next(hub: Hub, say: Say) -> None:
    line = (
        "mkdir -p code && echo 'print(__spec__.cached)' > code/x.py && touch -d 2019-12-03 code/x.py "
        "&& cd code && python -c 'import x' && find $HOME -name '*.pyc'"
    )
    kept = hub.folder / "code-cache" / "tmp/home/code/__pycache__"
    ended, printed = say(line)
    assert ended == Exit(code=0, reason="Completed")
    assert printed.startswith("/tmp/code-cache/tmp/home/code/__pycache__/x.")
    assert printed.count("\n") == 1, "none is left beside the code"
    (compiled,) = kept.iterdir()
    first = compiled.stat()
    assert say(line) == (ended, printed)
    assert compiled.stat().st_mtime_ns == first.st_mtime_ns, "it was not compiled again"


def test_a_pod_has_its_own_name_address_home_and_environment(
    hub: Hub, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_FOR_PODS", "1")
    line = (
        "hostname; hostname -I; pwd; echo $GIVEN $NOT_FOR_PODS; echo $$; ls /tmp; touch /tmp/x-of-a-pod home"
    )
    ended, printed = say(line, hostname="node-0", environment={"GIVEN": "a b"})
    name, ip, folder, given, pid, *left = printed.splitlines()
    assert (name, ip.strip(), folder, given, pid) == ("node-0", hub.pods[-1].ip, "/tmp/home", "a b", "1")
    below = {folder.relative_to("/tmp").parts[0] for folder in pods.folders_below_tmp()}
    assert left == sorted({"code-cache", "home", "python", *below})
    assert ended == Exit(code=0, reason="Completed")
    assert not Path("/tmp/x-of-a-pod").exists()
    assert (hub.pods[-1].folder / "tmp" / "x-of-a-pod").exists()


def test_a_pod_can_change_nothing_of_the_machine(say: Say) -> None:
    target = ROOT / "written-by-a-pod"
    ended, printed = say(f"touch '{target}' /etc/hosts2")
    assert ended.code == 1
    assert printed.count("Read-only file system") == 2
    assert not target.exists()


def test_pods_find_each_other_by_name_also_those_that_came_later(hub: Hub, say: Say) -> None:
    wait = "import socket,time\nfor _ in range(600):\n"
    wait += " try: socket.create_connection(('late.job.ns', 5000), 1); break\n"
    wait += " except OSError: time.sleep(.1)\nelse: raise SystemExit('never')"
    first = hub.start(PodSpec(name="early", hostname="early", command=("python", "-c", wait)))
    serve = "import socket; s=socket.create_server(('', 5000)); s.settimeout(60); s.accept()"
    later = {"name": "late", "hostname": "late", "aliases": ("late.job.ns",)}
    ended, printed = say(f'python -c "{serve}"', **later)
    assert ended.code == 0, printed
    assert first.wait(60).code == 0, first.log.read_text()


def test_a_server_in_the_hub_is_reached_by_pods_and_from_here_and_by_nobody_else(hub: Hub, say: Say) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello " + self.client_address[0].encode())

        def log_message(self, *_: Any) -> None:
            pass

    with hub.inside():
        server = ThreadingHTTPServer((hub.address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://{hub.address}:{server.server_address[1]}/"
    ask = f"import urllib.request; print(urllib.request.urlopen('{url}').read().decode())"
    try:
        with hub.inside():
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            assert opener.open(url, timeout=20).read() == f"hello {hub.address}".encode()
        client = hub.run([sys.executable, "-c", ask], timeout=60)
        assert client.stdout == f"hello {hub.address}\n"
        _, printed = say(f'python -c "{ask}"')
        assert printed == f"hello {hub.pods[-1].ip}\n"
    finally:
        server.shutdown()
        server.server_close()


def test_shared_memory_and_empty_folders_have_the_size_asked_for(say: Say) -> None:
    line = "df --output=size -B1 /dev/shm /tmp/scratch/space | tail -n 2; echo x > /mnt/y; cat /mnt/y"
    sizes = {"/tmp/scratch/space": 2**21, "/mnt": None}
    ended, printed = say(line, shm_bytes=2**27, empty_dirs=sizes)
    assert printed.split() == [str(2**27), str(2**21), "x"], printed
    assert ended.code == 0
    assert not Path("/mnt/y").exists()
    with pytest.raises(ValueError, match="no such folder"):
        say("true", empty_dirs={"/nowhere-at-all": None})


GROW = "import time\nx = []\nfor _ in range(400): x.append(bytearray(2**20)); time.sleep(.001)\ntime.sleep(2)"


@pytest.mark.parametrize("watched", [False, True])
def test_too_much_memory_is_the_end_of_the_whole_pod(
    hub: Hub, say: Say, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if watched:
        monkeypatch.setattr("tests.lab.memory_limits._parent", lambda: ("watched", None))
    elif mechanism() == "watched":
        pytest.skip("no control groups can be made here")
    # The child is what grows: its parent must go with it.
    ended, _ = say(f'python -c "{GROW}"; sleep 60', memory_bytes=150 * 2**20)
    assert ended == Exit(code=137, reason="OOMKilled")
    assert say("python -c 'bytearray(2**20)'", memory_bytes=150 * 2**20)[0].code == 0


def test_a_limit_that_nobody_needs_any_more_is_removed() -> None:
    limit = MemoryLimit(2**27)
    limit.remove()
    assert limit.cgroup is None or not limit.cgroup.exists()


def test_a_killed_pod_leaves_no_process(hub: Hub) -> None:
    line = "setsid sleep 1000 & trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.1; done"
    pods_ = [hub.start(PodSpec(name="k", hostname="k", command=("bash", "-c", line))) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not all(pod.log.read_text() for pod in pods_):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(len(pod.pids()) >= 2 for pod in pods_)
    pods_[0].kill()
    pods_[1].kill(grace_s=30)
    assert [pod.poll() for pod in pods_] == [Exit(code=137, reason="Error"), Exit(code=3, reason="Error")]
    assert pods_[1].log.read_text() == "up\nasked\n"
    assert [pod.pids() for pod in pods_] == [[], []]


BED = """
import sys, time
from pathlib import Path
from tests.lab.pods import Hub, PodSpec
with Hub(Path(sys.argv[1])) as hub:
    hub.popen(["sleep", "1003"])
    pod = hub.start(PodSpec(name="p", hostname="p", command=("sleep", "1003"), memory_bytes=2**28))
    while len(pod.pids()) < 1 or "sleep" not in open(f"/proc/{pod.pids()[-1]}/cmdline").read():
        time.sleep(0.05)
    print("up", *pod.pids(), flush=True)
    time.sleep(600)
"""


def test_all_of_it_dies_with_the_test_process(tmp_path: Path) -> None:
    test = subprocess.Popen(
        [sys.executable, "-c", BED, str(tmp_path / "hub")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        line = test.stdout.readline()
        assert line.startswith("up")
        own = {process.pid for process in psutil.Process(test.pid).children(recursive=True)}
        sleeping = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "sleep"]
        doomed = [process for process in sleeping if process.pid in own]
        assert len(doomed) == 2
    finally:
        test.kill()
        test.communicate(timeout=10)
    _, alive = psutil.wait_procs(doomed, timeout=30)
    assert not alive
