"""The page as a browser shows it: it opens without a word on the console, filters, opens episodes, and runs no text."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from agents import ANSWER, FakeFrames, call, script
from browser import CHROMIUM, DESKTOP, PHONE, Tab, browser
from evaluator import Evaluator, answer, config_of
from view_run import CHAT, NASTY, make_run, write_metrics

from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.page import page_of
from paravt_jax.view.page import make_page
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"
INHERITED = ["constructor", "__proto__", "toString"]
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
    runs = {"one": [first], "two": [first, second], "single": [single], "evaluation": [evaluated(directory / "copy")]}
    runs["names"] = [with_names_of_javascript(directory / "d")]
    contents = {name: make_page(of_page, 200) for name, of_page in runs.items()} | {"question": asked()}
    pages = {name: directory / f"{name}.html" for name in contents}
    for name, content in contents.items():
        pages[name].write_bytes(content)
    return pages


def with_names_of_javascript(run_dir: Path) -> Path:
    """A run in which everything that has a name from outside is called as something that every object inherits."""
    make_run(run_dir, 2)
    for file, names in (("metrics.jsonl", INHERITED), ("validation.jsonl", ["validation/loss"])):
        rows = [json.loads(line) for line in (run_dir / file).read_text().splitlines()]
        rows = [row | dict.fromkeys(names, row["step"] / 8) for row in rows]
        (run_dir / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = run_dir / "episodes" / "000001.jsonl"
    episodes = [json.loads(line) for line in records.read_text().splitlines()]
    for episode, name in zip(episodes, itertools.cycle(INHERITED), strict=False):
        episode |= {"id": name, "question_type": name, "finish": name, "split": name}
        episode |= {"scores": {name: 0.5}, "groups": {name: [name]}}
        for credit in (episode.get("reward") or {}).get("credits", []):
            credit |= {"name": name, "term": name}
        for made in [made for turn in episode.get("turns", []) for made in turn["calls"]]:
            made["outcome"] = name
    records.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    return run_dir


def evaluated(copy: Path) -> Path:
    config = config_of("longvideobench", copy, "eval.frame_budgets=[3,5]")
    with pytest.MonkeyPatch.context() as patch:
        Evaluator(CHAT, lambda episode, request: answer("B<img src=x onerror=alert(1)>"), patch).run(config)
    return Path(config.run_dir)


def asked() -> bytes:
    agent = Agent(script(CHAT, [LOOK, ANSWER.replace("A<", "<b>A</b><")]), FakeFrames(), CHAT, EpisodeConfig())
    answerer = Answerer(agent, 8)
    return page_of(asyncio.run(answerer.answer(["/data/a.mp4"], "What <b>colour</b>?")), answerer, "tiny")


def opened(tab: Tab, page: Path, fragment: str = "", size_px: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Tab:
    tab.told.clear()
    tab.show_as(size_px, dark=dark)
    tab.open(page, fragment)
    return tab


def with_text(page: Path, text: str) -> str:
    """The fragment of the first episode whose record has it."""
    records = page.read_text().split('id="records">')[1].splitlines()
    return f"#episode-{next(number for number, record in enumerate(records) if text in record)}"


@pytest.mark.parametrize("name", ["one", "two", "single", "evaluation", "question", "names"])
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


def test_a_name_that_every_object_inherits_is_a_name_like_any_other(tab, pages):
    opened(tab, pages["names"])
    titles = tab.run("[...document.querySelectorAll('.chart')].map(chart => chart.ariaLabel)")
    assert set(INHERITED) < set(titles)
    for place in range(len(INHERITED)):
        opened(tab, pages["names"], f"#episode-{place}")
        shown = tab.run("document.querySelector('.episode').textContent")
        assert f"Ended{INHERITED[place]}" in shown and f"By {INHERITED[place]}" in shown
        assert tab.run("document.querySelector('.bar .id').textContent").split(" · ")[1] == INHERITED[place]
    options = "[...document.querySelectorAll('.filters option')].map(option => option.textContent)"
    assert set(INHERITED) < set(tab.run(options)) and tab.told == []


def test_filters_leave_what_they_say_and_can_be_cleared(tab, pages):
    opened(tab, pages["one"])
    tab.run(f"({FILTER})('Answer', 'right')")
    shown = tab.run("[...document.querySelectorAll('.row .meta')].map(row => row.firstChild.textContent)")
    assert len(shown) > 3 and set(shown) == {"right"}
    tab.run(f"({FILTER})('Words', 'no question has these')")
    assert tab.run("document.querySelector('.episode').textContent") == "No episode is like this."
    tab.run("[...document.querySelectorAll('.filters button')].at(-1).click()")
    assert tab.run("document.querySelector('.count').textContent").endswith(" episodes")


def test_an_evaluation_has_a_row_for_every_score_and_its_episodes_by_cell(tab, pages):
    opened(tab, pages["evaluation"])
    assert tab.run("document.querySelectorAll('.whisker').length") == 4  # two cells, two rules
    assert "3 of 1,337" in tab.run("document.querySelector('.table').textContent")
    tab.run(f"({FILTER})('Cell', 'none_5')")
    assert tab.run("document.querySelector('.count').textContent") == "3 of 6 episodes"
    assert "<img src=x" in tab.run("document.querySelector('.said-text').textContent") and tab.told == []


def test_a_question_has_its_answer_its_windows_and_pictures_of_both(tab, pages):
    opened(tab, pages["question"])
    assert tab.run("document.querySelector('h1').textContent") == "What <b>colour</b>?"
    assert tab.run("document.querySelector('.answer .text').textContent") == "<b>A</b>"
    assert tab.run("document.querySelectorAll('.answer .window').length") == 2
    assert tab.run("[...document.querySelectorAll('.album')].map(one => one.childElementCount)") == [8, 8]
    assert tab.run("[...document.images].every(one => one.naturalWidth == 32)") and tab.told == []


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
