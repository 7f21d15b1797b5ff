"""The page as a browser shows it: it opens without a word on the console, filters, opens episodes, and runs no text."""

import json
from pathlib import Path

import pytest
from browser import CHROMIUM, DESKTOP, PHONE, Tab, browser
from view_run import NASTY, make_run, write_metrics

from paravt_jax.view.page import make_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
FILTER = "(name, value) => { const c = [...document.querySelectorAll('.filters label')].find(l => \
l.textContent.startsWith(name)).querySelector('select, input'); c.value = value; \
c.dispatchEvent(new Event(c.tagName === 'SELECT' ? 'change' : 'input')); }"


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A run with texts that nobody would want in a page, two runs beside each other, and one that has a single step."""
    directory = tmp_path_factory.mktemp("pages")
    first, second = (make_run(directory / name, 2, texts=NASTY, luck=luck) for luck, name in enumerate("ab"))
    (directory / "c").mkdir()
    single = write_metrics(directory / "c", [{"step": 7, "loss/policy": 0.25}])
    pages = {}
    for name, runs in {"one": [first], "two": [first, second], "single": [single]}.items():
        pages[name] = directory / f"{name}.html"
        pages[name].write_bytes(make_page(runs, 200))
    return pages


def opened(tab: Tab, page: Path, fragment: str = "", size_px: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Tab:
    tab.told.clear()
    tab.show_as(size_px, dark=dark)
    tab.open(page, fragment)
    return tab


def with_text(page: Path, text: str) -> str:
    """The fragment of the first episode whose record has it."""
    records = page.read_text().split('id="records">')[1].splitlines()
    return f"#episode-{next(number for number, record in enumerate(records) if text in record)}"


@pytest.mark.parametrize("name", ["one", "two", "single"])
@pytest.mark.parametrize("size_px", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_opens_without_a_word_on_the_console_and_is_no_wider_than_the_screen(name, size_px, dark, tab, pages):
    opened(tab, pages[name], size_px=size_px, dark=dark)
    assert tab.run("document.querySelectorAll('h1').length") == (2 if name == "two" else 1)
    assert tab.run("document.documentElement.scrollWidth") <= size_px[0]
    assert tab.told == []


def test_hostile_texts_are_shown_and_none_of_them_becomes_an_element(tab, pages):
    opened(tab, pages["one"], with_text(pages["one"], "onerror=alert"))
    assert "</script><script>alert(1)</script><img src=x onerror=alert(1)>" in tab.run(
        "document.querySelector('.said-text').textContent"
    )
    assert tab.run("[document.images.length, document.scripts.length]") == [0, 3]
    assert tab.run("document.querySelector('.said-text img, .said-text script')") is None
    assert tab.told == []


def test_filters_leave_what_they_say_and_can_be_cleared(tab, pages):
    opened(tab, pages["one"])
    tab.run(f"({FILTER})('Answer', 'right')")
    shown = tab.run("[...document.querySelectorAll('.row .meta')].map(row => row.firstChild.textContent)")
    assert len(shown) > 3 and set(shown) == {"right"}
    tab.run(f"({FILTER})('Words', 'no question has these')")
    assert tab.run("document.querySelector('.episode').textContent") == "No episode is like this."
    tab.run("[...document.querySelectorAll('.filters button')].at(-1).click()")
    assert tab.run("document.querySelector('.count').textContent").endswith(" episodes")


def test_the_arrow_keys_go_from_episode_to_episode(tab, pages):
    opened(tab, pages["one"], "#episode-3")
    for key in ("ArrowDown", "j", "ArrowUp", "End", "Home"):
        tab.run(f"document.querySelector('.scroll').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        at = tab.run("[location.hash, document.querySelector('.row[aria-selected=true]').ariaPosInSet]")
        assert at[0] == f"#episode-{int(at[1]) - 1}"
    assert at == ["#episode-0", "1"]


def test_the_text_is_coloured_by_advantage_when_asked(tab, pages):
    opened(tab, pages["one"], with_text(pages["one"], '"advantage":0'))
    gained = "getComputedStyle(document.querySelector('.said-text .gained, .said-text .lost')).backgroundColor"
    before = tab.run(gained)
    tab.run("document.querySelectorAll('.colouring button')[1].click()")
    assert tab.run(gained) != before
    assert tab.run("document.querySelectorAll('.colouring button')[1].ariaPressed") == "true"


def test_parallel_calls_stand_beneath_each_other_in_time(tab, pages):
    opened(tab, pages["one"], with_text(pages["one"], "The scene is over"))
    bars = tab.run("[...document.querySelectorAll('.when.of-call i')].map(bar => parseFloat(bar.style.left))")
    assert len(bars) == 3 and len(set(bars)) == 1
    assert "3 calls at once" in tab.run("document.querySelector('.waterfall').textContent")


def test_the_same_prompts_episodes_stand_beside_each_other(tab, pages):
    opened(tab, pages["two"], "#episode-5")
    names = tab.run(
        "[...document.querySelectorAll('.episode')].map(one => [one.querySelector('.run').textContent, \
one.querySelector('h3').textContent])"
    )
    assert [run for run, _ in names] == ["A", "B"] and names[0][1] == names[1][1]
    assert tab.run("document.querySelectorAll('.chart .of-run-1 .line').length") > 10


def test_one_value_is_a_number_and_what_never_changes_is_folded(tab, pages):
    opened(tab, pages["single"])
    assert tab.run("document.querySelectorAll('.chart').length") == 0
    assert "0.25" in tab.run("document.querySelector('.single').textContent")
    opened(tab, pages["one"])
    folded = "[...document.querySelectorAll('details')].find(one => one.textContent.startsWith('Always')).textContent"
    assert "perf/dummy_frac" in tab.run(folded)


def test_of_ten_thousand_episodes_only_those_on_the_screen_are_built(tab, pages, tmp_path):
    run_dir = tmp_path / "many"
    (run_dir / "episodes").mkdir(parents=True)
    lines = [json.dumps({"id": f"{n:06d}-p{n}/0", "step": 1, "question": f"Number {n}?"}) + "\n" for n in range(10_000)]
    (run_dir / "episodes" / "000001.jsonl").write_text("".join(lines))
    page = tmp_path / "many.html"
    page.write_bytes(make_page([run_dir], 10_000))
    opened(tab, page)
    assert tab.run("document.querySelector('.count').textContent") == "10,000 episodes"
    assert tab.run("document.querySelectorAll('.row').length") < 60
    tab.run("document.querySelector('.scroll').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))")
    assert tab.run("document.querySelector('.episode h3').textContent") == "Number 9999?"
    tab.run(f"({FILTER})('Words', 'number 123')")
    assert tab.run("document.querySelectorAll('.row').length") < 60
    assert tab.run("document.querySelector('.count').textContent") == "11 of 10,000 episodes"
