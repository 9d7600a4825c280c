"""The planner page: built, opened in a real browser, and operated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from estimator.planner_page import answers
from tests.browser import needs_browser
from tests.estimator.planner_page.forms import FORMS
from tests.tab import Tab, served, tab

pytestmark = [needs_browser, pytest.mark.slow]
FIRST_S, CHANGE_MS = 5.0, 300.0  # on a machine that does nothing else
ANSWERED = "Number(document.querySelector('#planner')?.dataset.answered ?? 0)"
ASKED = "Number(document.querySelector('#planner').dataset.asked)"
TEXT = "document.querySelector('#planner .planner-result').innerText"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as url:
        yield f"{url}/planner/"


@pytest.fixture
def page(address: str, tmp_path: Path) -> Iterator[Tab]:
    """The page in a new browser."""
    with tab(tmp_path / "profile") as opened:
        opened.size(1280, 900)
        opened.open(address)
        opened.until(ANSWERED)
        yield opened
        assert opened.errors == []
        foreign_requests = [
            url for url in opened.requests if not url.startswith((address.rsplit("/", 2)[0], "data:"))
        ]
        assert foreign_requests == [], "no other host is asked"


def change(page: Tab, selector: str, text: str) -> str:
    """Type into a field; return the new content of the page."""
    before = page.look(ANSWERED)
    page.fill(selector, text)
    state = (
        f"new URLSearchParams(location.hash.slice(1)).get({json.dumps(selector.removeprefix('#planner-'))})"
    )
    page.until(f"{ANSWERED} > {before} && {ANSWERED} === {ASKED} && {state} === {json.dumps(text)}")
    return str(page.look(TEXT))


def test_plans_in_the_browser_equal_those_of_the_estimator(page: Tab) -> None:
    forms = FORMS[::5]  # tests/estimator/planner_page checks all of them, outside the browser
    plans = page.look(
        f"""(async () => {{
          const worker = new Worker("../assets/planner/worker.js", {{type: "module"}});
          const forms = {json.dumps(forms)};
          const got = [];
          const done = new Promise((resolve) => {{
            worker.onmessage = ({{data}}) => {{
              if (data.groups) forms.forEach((form, number) => worker.postMessage({{number, form}}));
              else if (got.push(data.found ?? data) === forms.length) resolve(got);
            }};
          }});
          return done;
        }})()"""
    )
    for form, mine in zip(forms, plans, strict=True):
        theirs = json.loads(json.dumps(answers.answer(form)))
        assert mine.keys() == theirs.keys(), form
        assert (mine["command"], mine.get("problem")) == (theirs["command"], theirs.get("problem"))
        for one, other in zip(mine.get("plans", ()), theirs.get("plans", ()), strict=True):
            figures = {name: value for name, value in other.items() if isinstance(value, float)}
            assert {name: one[name] for name in figures} == pytest.approx(figures, rel=1e-12), form
            assert {**one, **figures} == other, form


def test_inputs_are_planned_and_stored_in_the_link(page: Tab, address: str) -> None:
    assert page.look("document.querySelector('#planner-model').checkVisibility()")
    assert "1. " not in page.look("location.hash")
    shown = change(page, "#planner-gpu", "H100 SXM")
    assert "x H100 SXM" in shown
    page.click("#planner-method")
    page.look("document.querySelector('#planner-method').value = 'lora'")
    page.look("document.querySelector('#planner-method').dispatchEvent(new Event('input', {bubbles: true}))")
    page.until("location.hash.includes('method=lora')")
    page.click("#planner-spot")
    page.until("location.hash.includes('spot=on')")
    page.until(f"{TEXT}.includes('finetune plan --method lora') === false && {TEXT}.includes('--spot')")
    shown = str(page.look(TEXT))
    expected = answers.answer({"model": "llama-8b", "gpu": "H100 SXM", "method": "lora", "spot": "on"})
    best = expected["plans"][0]
    assert f"{best['tokens_per_second']:,.0f}" in shown
    assert f"{best['needs_bytes'] / 2**30:.1f}" in shown
    assert best["run"] in shown
    link = page.look("location.href")
    page.open("about:blank")
    page.open(link)
    page.until(f"{ANSWERED} && {TEXT}.includes('--spot')")
    assert page.look("document.querySelector('#planner-gpu').value") == "H100 SXM"
    assert page.look("document.querySelector('#planner-spot').checked") is True
    assert page.look(TEXT) == shown


@pytest.mark.nightly
def test_a_pasted_config_is_stored_in_the_link_and_an_invalid_one_gives_a_line(page: Tab) -> None:
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    config |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    page.click("#planner-config")
    page.ask("Input.insertText", text=json.dumps(config))
    page.until(f"{TEXT}.includes('--model ./my-model')")
    page.until("location.hash.includes('config=packed')")
    shown, link = page.look(TEXT), page.look("location.href")
    page.open("about:blank")
    page.open(link)
    page.until(f"{ANSWERED} && {TEXT}.includes('--model ./my-model')")
    assert page.look(TEXT) == shown
    page.fill("#planner-config", "{")
    page.until(f"{TEXT}.includes('The pasted config.json is not JSON')")


@pytest.mark.nightly
def test_a_suggested_alternative_fits_after_one_click(page: Tab) -> None:
    for selector, text in (
        ("#planner-model", "llama-70b"),
        ("#planner-gpu", "L4"),
        ("#planner-nodes", "1"),
        ("#planner-gpus", "1"),
    ):
        shown = change(page, selector, text)
    assert "93 % over" in shown
    assert page.look("document.querySelectorAll('.planner-plan').length") == 0
    page.click(".planner-buttons button")
    page.until("document.querySelectorAll('.planner-plan').length > 0")


@pytest.mark.nightly
def test_the_page_works_without_a_network(page: Tab) -> None:
    page.cut_the_network()
    request_count = len(page.requests)
    assert "finetune plan --model qwen3-32b" in change(page, "#planner-model", "qwen3-32b")
    assert page.requests[request_count:] == []


@pytest.mark.nightly
def test_the_page_works_with_the_keyboard_only(page: Tab) -> None:
    page.look("document.querySelector('#planner-model').focus()")
    page.type("gemma-2-9b")
    page.until(f"{TEXT}.includes('--model gemma-2-9b')")
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.look("document.activeElement.id || document.activeElement.classList[0]"))
    assert {"planner-method", "planner-seq_len", "planner-copy"} <= reached
    page.look("document.querySelector('.planner-plan summary').focus()")
    page.press("Enter")
    page.until("document.querySelector('.planner-plan details').open")
    assert "Plan: gemma-2-9b" in page.look("document.querySelector('.planner-plan pre').textContent")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_the_page_is_readable_in_all_widths_and_color_schemes(
    address: str, tmp_path: Path, scheme: str
) -> None:
    with tab(tmp_path / "profile") as page:
        page.prefer(scheme)
        page.size(1280, 900)
        page.open(address)
        page.until(ANSWERED)
        for width in (1280, 400):
            page.size(width, 900)
            page.until(f"window.innerWidth === {width}")
            check_layout(page, tmp_path, width, scheme)


def check_layout(page: Tab, folder: Path, width: int, scheme: str) -> None:
    """Check that the page fits its window, has the colors of the scheme and readable bars."""
    page.until(f"document.documentElement.scrollWidth <= {width}")  # nothing to scroll sideways
    page.look("document.querySelector('.planner-plan').scrollIntoView({behavior: 'instant'})")
    page.picture(folder / "page.png")
    with Image.open(folder / "page.png") as picture:
        lightness = picture.convert("L").resize((1, 1)).getpixel((0, 0))
    assert (lightness > 150) is (scheme == "light"), lightness
    narrow = page.look("document.querySelector('.planner-tracks').getBoundingClientRect().width")
    assert narrow > 300, "bars wide enough to be read"
    fill = "getComputedStyle(document.querySelector('#planner-model')).color"
    back = "getComputedStyle(document.querySelector('#planner-model')).backgroundColor"
    assert page.look(fill) != page.look(back)
