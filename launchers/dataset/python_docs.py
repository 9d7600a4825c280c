"""Built-in dataset: questions about Python's standard library, answered by its docstrings.

It is real text that needs no download. The rows depend only on the Python version: the modules are a fixed
list, names are sorted, nothing is random, and the docstrings are read in a separate process, because
installed packages may add members to the standard library's classes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

# Modules without side effects on import (unlike `this`, `antigravity`, `turtle`, `idlelib`, `test`). Modules
# that a build of Python lacks are skipped.
MODULES = tuple(
    """
    abc argparse array ast asyncio asyncio.queues asyncio.streams asyncio.subprocess base64 bdb binascii
    bisect builtins bz2 cProfile calendar cmath cmd code codecs codeop collections collections.abc colorsys
    compileall concurrent.futures configparser contextlib contextvars copy copyreg csv ctypes dataclasses
    datetime dbm decimal difflib dis doctest email email.charset email.generator email.header
    email.headerregistry email.message email.mime.multipart email.parser email.policy email.utils enum errno
    faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob
    graphlib grp gzip hashlib heapq hmac html html.parser http http.client http.cookiejar http.cookies
    http.server imaplib importlib importlib.abc importlib.machinery importlib.metadata importlib.resources
    importlib.util inspect io ipaddress itertools json json.decoder json.encoder keyword linecache locale
    logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap modulefinder
    multiprocessing multiprocessing.connection multiprocessing.managers multiprocessing.pool
    multiprocessing.shared_memory netrc numbers operator optparse os os.path pathlib pdb pickle pickletools
    pkgutil platform plistlib poplib posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc queue
    quopri random re reprlib resource runpy sched secrets select selectors shelve shlex shutil signal site
    smtplib socket socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable sys
    sysconfig syslog tabnanny tarfile tempfile termios textwrap threading time timeit token tokenize
    trace traceback tracemalloc tty types typing unicodedata unittest unittest.mock urllib.error
    urllib.parse urllib.request urllib.response urllib.robotparser uuid venv warnings wave weakref
    webbrowser wsgiref.handlers wsgiref.headers wsgiref.simple_server wsgiref.util xml.dom.minidom
    xml.dom.pulldom xml.etree.ElementTree xml.sax xml.sax.handler xml.sax.saxutils xml.sax.xmlreader
    xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib zoneinfo
    """.split()  # noqa: SIM905
)

LIMIT_S = 600.0  # time limit of the process, which usually takes seconds
MAX_ANSWER_CHARS = 600  # about 150 tokens, so most rows fit into any usual sequence length
_ENOUGH_CHARS = 160  # paragraphs are added to an answer until it has this length
_MIN_CHARS = 20

Kind = Literal["module", "class", "function", "method", "property"]

_QUESTIONS: dict[Kind, tuple[str, ...]] = {
    "module": ("What is Python's `{name}` module for?", "Describe the module `{name}` in Python."),
    "class": ("What is the class `{name}` in Python?", "What is Python's `{name}` used for?"),
    "function": ("What does `{name}{signature}` do in Python?", "Explain Python's function `{name}`."),
    "method": ("What does the method `{name}` do in Python?", "Explain `{name}{signature}` in Python."),
    "property": ("What does the attribute `{name}` hold in Python?", "Describe `{name}` in Python."),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Documented:
    """One name of the standard library with its own docstring."""

    name: str  # "json.JSONEncoder.default"
    kind: Kind
    signature: str  # "(o)"; empty if unknown
    doc: str  # without indentation


def documented() -> list[Documented]:
    """List the public names in MODULES that have a docstring; sorted by name within a module."""
    # -I -S: only the standard library, independent of installed packages and the environment
    command = [sys.executable, "-I", "-S", __file__]
    result = subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=LIMIT_S
    )
    return [Documented(**values) for values in json.loads(result.stdout)]


def rows() -> list[dict[str, Any]]:
    """Return the dataset as chat rows; questions and answers are unique."""
    seen: set[str] = set()
    result = []
    for item in documented():
        answer = _answer(item.doc)
        questions = _QUESTIONS[item.kind]
        question = questions[zlib.crc32(item.name.encode()) % len(questions)].format(
            name=item.name, signature=item.signature
        )
        if len(answer) < _MIN_CHARS or answer in seen or question in seen:
            continue
        seen |= {answer, question}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        result.append({"messages": messages})
    return result


def write(path: Path) -> Path:
    """Write :func:`rows` as JSONL."""
    return write_rows(path, rows())


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSONL atomically, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(path)
    return path


def _read_modules() -> Iterator[Documented]:
    """Iterate over the documented names of all modules, in this process."""
    warnings.simplefilter("ignore")  # deprecated names warn on access
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        yield from _read_module(module_name, module)


def _read_module(module_name: str, module: ModuleType) -> Iterator[Documented]:
    """Iterate over the documented names of a module, its classes and their members."""
    yield from _documented(module_name, "module", module)
    exported = set(getattr(module, "__all__", ()))
    for name in sorted(exported | set(dir(module))):
        value = getattr(module, name, None)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        is_defined_here = getattr(value, "__module__", None) in (module_name, "_" + module_name)
        if not (name in exported if exported else is_defined_here):
            continue
        full_name = name if module_name == "builtins" else f"{module_name}.{name}"
        if inspect.isclass(value):
            yield from _documented(full_name, "class", value)
            for member_name, member in sorted(vars(value).items()):
                if member_name.startswith("_"):
                    continue
                if isinstance(member, property):
                    yield from _documented(f"{full_name}.{member_name}", "property", member)
                elif inspect.isroutine(member):
                    function = getattr(member, "__func__", member)
                    yield from _documented(f"{full_name}.{member_name}", "method", function)
        elif inspect.isroutine(value):
            yield from _documented(full_name, "function", value)


def _documented(name: str, kind: Kind, value: Any) -> Iterator[Documented]:
    """Yield the entry of an object if it has a docstring that is equal in every process."""
    doc = getattr(value, "__doc__", None)
    # Docstrings with memory addresses differ between processes
    if isinstance(doc, str) and doc.strip() and " at 0x" not in doc:
        signature = _signature(value) if kind in ("function", "method") else ""
        yield Documented(name=name, kind=kind, signature=signature, doc=inspect.cleandoc(doc))


def _signature(value: Any) -> str:
    """Return the parameter names of a function in parentheses; empty if unknown."""
    try:
        parameters = list(inspect.signature(value).parameters)
    except (ValueError, TypeError):
        return ""
    return "(" + ", ".join(p for p in parameters if p not in ("self", "cls")) + ")"


def _answer(doc: str) -> str:
    """Return the first paragraphs of a docstring, up to a doctest, with at most MAX_ANSWER_CHARS."""
    answer = ""
    for paragraph in re.split(r"\n\s*\n", doc):
        text = paragraph.rstrip()
        if ">>>" in text:
            break
        if answer and len(answer) + len(text) > MAX_ANSWER_CHARS:
            break
        answer = f"{answer}\n\n{text}" if answer else text.strip()
        if len(answer) >= _ENOUGH_CHARS:
            break
    return answer if len(answer) <= MAX_ANSWER_CHARS else _truncate(answer)


def _truncate(text: str) -> str:
    """Truncate at the last end of a sentence that fits, or at the last space."""
    head = text[:MAX_ANSWER_CHARS]
    sentence_ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", head)]
    return head[: sentence_ends[-1]] if sentence_ends else head.rsplit(None, 1)[0]


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(item) for item in _read_modules()]))
