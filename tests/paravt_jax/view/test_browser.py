"""The page in a browser: no console output, filters, episodes, and model output never runs."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from agents import ANSWER, DRAWS, FakeFrames, call, call_of, script
from browser import CHROMIUM, DESKTOP, PHONE, Tab, browser
from data_rows import write_lines
from evaluator import Evaluator, answer, config_of
from view_run import CHAT, NASTY, make_run, write_metrics

from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.page import page_of
from paravt_jax.check.page import page as page_of_check
from paravt_jax.check.report import Measured, StageReport
from paravt_jax.config import Config, SftConfig, VideoConfig, to_record
from paravt_jax.run.directory import settings_of, write_settings
from paravt_jax.run.log import load_jsonl
from paravt_jax.view.page import make_page
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"
LONG_NAME = "Donaudampfschiff" * 15
INHERITED = ["constructor", "__proto__", "toString"]
FILTER = "(name, value) => { const c = [...document.querySelectorAll('.filters label')].find(l => \
l.textContent.startsWith(name)).querySelector('select, input'); c.value = value; \
c.dispatchEvent(new Event(c.tagName === 'SELECT' ? 'change' : 'input')); }"

TICKS = "(title, anchor) => [...[...document.querySelectorAll('.chart')].find(chart => chart.ariaLabel === title)\
.querySelectorAll(`text[text-anchor=${anchor}]`)].map(tick => tick.textContent)"

PRODUCTS = "(names) => [...document.querySelectorAll(names)].reduce((sum, term) => sum + \
term.querySelector('.num').textContent.replaceAll('−', '-').split(' × ').reduce((one, other) => one * other, 1), 0)"

BAD_LABELS = """[...document.querySelectorAll('figure, .timeline, .waterfall')].flatMap(chart => {
  const range = document.createRange(), edge = chart.getBoundingClientRect();
  const names = 'text, figcaption, h4, .legend span, .ticks span, .lane button, .about span, .when > span, small';
  const labels = [...chart.querySelectorAll(names)]
    .map(label => (range.selectNodeContents(label), [label.textContent, range.getBoundingClientRect()]));
  const meet = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 0.5
    && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 0.5;
  return labels.flatMap(([text, box], n) => [
    ...(box.left < edge.left - 0.5 || box.right > edge.right + 0.5 ? [[text, 'outside of its chart']] : []),
    ...labels.slice(0, n).filter(([, other]) => meet(box, other)).map(([other]) => [text, other])]);
})"""


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A run with hostile texts, two runs side by side, a run with one step, an evaluation, and a question."""
    directory = tmp_path_factory.mktemp("pages")
    first, second = (make_run(directory / name, 2, texts=NASTY, luck=luck) for luck, name in enumerate("ab"))
    runs = {
        "one": [first],
        "two": [first, second],
        "four": [first, second, first, second],
        "single": [write_metrics(directory / "c", [{"step": 7, "loss/policy": 0.25}])],
        "evaluation": [make_evaluation(directory / "copy")],
        "names": [with_names_of_javascript(directory / "d")],
    }
    contents = {name: make_page(of_page, 200) for name, of_page in runs.items()}
    contents["question"] = make_asked("What <b>colour</b>?", LOOK, ANSWER.replace("A<", "<b>A</b><"))
    pages = {name: directory / f"{name}.html" for name in contents}
    for name, content in contents.items():
        pages[name].write_bytes(content)
    return pages


def episodes_of(run_dir: Path) -> list[dict]:
    return list(load_jsonl(run_dir / "episodes" / "000001.jsonl"))


def with_episodes(run_dir: Path, *episodes: dict) -> Path:
    return write_lines(run_dir / "episodes" / "000001.jsonl", episodes).parents[1]


def with_names_of_javascript(run_dir: Path) -> Path:
    """A run in which all names from outside are properties that JavaScript objects inherit."""
    make_run(run_dir, 2)
    for file, names in (("metrics.jsonl", INHERITED), ("validation.jsonl", ["validation/loss"])):
        rows = load_jsonl(run_dir / file)
        write_lines(run_dir / file, [row | dict.fromkeys(names, row["step"] / 8) for row in rows])
    episodes = episodes_of(run_dir)
    for episode, name in zip(episodes, itertools.cycle(INHERITED), strict=False):
        episode |= {"id": name, "question_type": name, "finish": name, "split": name}
        episode |= {"scores": {name: 0.5}, "groups": {name: [name]}}
        for credit in (episode.get("reward") or {}).get("credits", []):
            credit |= {"name": name, "term": name}
        for made_call in [each for turn in episode.get("turns", []) for each in turn["calls"]]:
            made_call["outcome"] = name
    return with_episodes(run_dir, *episodes)


def make_evaluation(copy: Path) -> Path:
    config = config_of("longvideobench", copy, "eval.frame_budgets=[3,5]")
    with pytest.MonkeyPatch.context() as patch:
        Evaluator(CHAT, lambda episode, request: answer("B<img src=x onerror=alert(1)>"), patch).run(config)
    return Path(config.run_dir)


def make_asked(question: str, *turns: str, **config: object) -> bytes:
    answerer = Answerer(Agent(script(CHAT, turns), FakeFrames(), CHAT, EpisodeConfig(**config)), 8)
    return page_of(asyncio.run(answerer.answer(["/data/a.mp4"], question)), answerer, "tiny")


def open_page(
    tab: Tab, page: Path, fragment: str = "", size_px: tuple[int, int] = DESKTOP, *, dark: bool = False
) -> None:
    tab.messages.clear()
    tab.show_as(size_px, dark=dark)
    tab.open(page, fragment)


def open_runs(tab: Tab, directory: Path, *runs: Path, max_episodes: int = 20, **options: Any) -> None:
    """Opens the page of some runs, which it writes to the directory."""
    (directory / "page.html").write_bytes(make_page(runs, max_episodes))
    open_page(tab, directory / "page.html", **options)


def with_text(page: Path, text: str) -> str:
    """Returns the URL fragment of the first episode with this text."""
    records = page.read_text().split('id="records">')[1].splitlines()
    return f"#episode-{next(number for number, record in enumerate(records) if text in record)}"


@pytest.mark.parametrize("name", ["one", "two", "four", "single", "evaluation", "question", "names"])
@pytest.mark.parametrize(("size_px", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_a_page_opens_without_console_output_and_fits_the_screen(name, size_px, dark, tab, pages):
    open_page(tab, pages[name], size_px=size_px, dark=dark)
    assert tab.run("document.querySelectorAll('h1').length") == {"two": 2, "four": 4}.get(name, 1)
    assert tab.run("document.documentElement.scrollWidth") <= size_px[0]
    assert tab.messages == []


def test_hostile_texts_are_shown_as_text(tab, pages):
    open_page(tab, pages["one"], with_text(pages["one"], "onerror=alert"))
    assert "</script><script>alert(1)</script><img src=x onerror=alert(1)>" in tab.run(
        "document.querySelector('.said-text').textContent"
    )
    assert tab.run("[document.images.length, document.scripts.length]") == [0, 3]
    assert tab.run("document.querySelector('.said-text img, .said-text script')") is None
    assert tab.messages == []


def test_names_of_inherited_properties_are_shown_normally(tab, pages):
    open_page(tab, pages["names"])
    titles = tab.run("[...document.querySelectorAll('.chart')].map(chart => chart.ariaLabel)")
    assert set(INHERITED) < set(titles)
    for number, name in enumerate(INHERITED):
        open_page(tab, pages["names"], f"#episode-{number}")
        text = tab.run("document.querySelector('.episode').textContent")
        assert f"Finish{name}" in text and f"By {name}" in text
        assert tab.run("document.querySelector('.bar .id').textContent").split(" · ")[1] == name
    options = "[...document.querySelectorAll('.filters option')].map(option => option.textContent)"
    assert set(INHERITED) < set(tab.run(options)) and tab.messages == []


def test_filters_apply_and_can_be_cleared(tab, pages):
    open_page(tab, pages["one"])
    tab.run(f"({FILTER})('Answer', 'right')")
    results = tab.run("[...document.querySelectorAll('.row .meta')].map(row => row.firstChild.textContent)")
    assert len(results) > 3 and set(results) == {"right"}
    tab.run(f"({FILTER})('Question contains', 'no question has these')")
    assert tab.run("document.querySelector('.episode').textContent") == "No episode matches."
    tab.run("[...document.querySelectorAll('.filters button')].at(-1).click()")
    assert tab.run("document.querySelector('.count').textContent").endswith(" episodes")


def test_questions_are_searched_to_their_end(tab, tmp_path):
    question = f"{'What happens here? ' * 10}\nA. nothing\nB. everything"
    rows = [{"id": str(n), "step": 1, "question": text, "turns": []} for n, text in enumerate([question, "What?"])]
    open_runs(tab, tmp_path, with_episodes(tmp_path, *rows))
    tab.run(f"({FILTER})('Question contains', 'b. everything')")
    assert tab.run("document.querySelector('.count').textContent") == "1 of 2 episodes"
    assert "everything" not in tab.run("document.querySelector('.row .q').textContent")


def with_long_names(run_dir: Path) -> Path:
    """A run in which all names from outside are long and have no space."""
    make_run(run_dir, 1)
    episode = next(each for each in episodes_of(run_dir) if any(turn["calls"] for turn in each["turns"]))
    episode |= dict.fromkeys(("id", "question", "question_type", "answer", "finish", "split"), LONG_NAME)
    episode |= {"scores": {LONG_NAME: 0.5}, "groups": {LONG_NAME: [LONG_NAME]}}
    episode["reward"] |= {"own": [{"name": LONG_NAME, "value": 1.0, "weight": 1.0}]}
    episode["reward"]["credits"] = [{"name": LONG_NAME, "term": LONG_NAME, "value": 1.0, "places": [[0, 0, 5]]}]
    episode["advantage"] |= {"properties": {LONG_NAME: 0.5}}
    for video in episode["videos"]:
        video |= {"name": LONG_NAME, "path": f"/videos/{LONG_NAME}.mp4"}
    for made_call in [each for turn in episode["turns"] for each in turn["calls"]]:
        made_call |= dict.fromkeys(("name", "outcome", "response", "problem"), LONG_NAME)
    return with_episodes(run_dir, episode)


@pytest.mark.parametrize("size_px", [DESKTOP, PHONE])
def test_long_names_fit_the_screen(size_px, tab, tmp_path):
    open_runs(tab, tmp_path, with_long_names(tmp_path / "run"), size_px=size_px)
    assert tab.run("document.querySelector('.timeline .about').textContent").count(LONG_NAME) == 2
    assert tab.run("document.documentElement.scrollWidth") <= size_px[0]
    assert tab.messages == []


@pytest.mark.parametrize("size_px", [DESKTOP, PHONE])
def test_the_page_of_a_check_with_a_long_path_fits_the_screen(size_px, tab, tmp_path):
    report = StageReport("weights", [Measured(LONG_NAME, 0.5, 0.25)], {}, LONG_NAME, 1.5, 2.5)
    record = {"machine": {"model": LONG_NAME}, "command": ["--model", LONG_NAME], "date": "2026-01-01"}
    (tmp_path / "check.html").write_text(page_of_check(record, [report]))
    open_page(tab, tmp_path / "check.html", size_px=size_px)
    assert tab.run("document.documentElement.scrollWidth") <= size_px[0]


def test_the_table_of_cells_with_a_long_split_fits_the_screen(tab, tmp_path):
    run = make_evaluation(tmp_path / "copy")
    for path in run.glob("cell_*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"split": LONG_NAME}))
    open_runs(tab, tmp_path, run)
    width_px, room_px = tab.run("['scrollWidth', 'clientWidth'].map(of => document.querySelector('.table')[of])")
    assert width_px <= room_px


def test_validation_before_the_first_step_is_drawn(tab, tmp_path):
    rows = [{"step": step, "loss/imitation": step / 8} for step in (1, 2, 3)]
    write_lines(tmp_path / "validation.jsonl", [{"step": step, "validation/loss": step / 9} for step in (0, 2)])
    open_runs(tab, tmp_path, write_metrics(tmp_path, rows))
    assert tab.run("document.querySelectorAll('.chart path.validation').length") == 2
    assert tab.run(f"({TICKS})('Imitation loss, nats per token', 'middle')") == [*"0123"]


def test_a_comparison_has_the_number_of_steps_of_each_runs_values(tab, tmp_path):
    runs = [
        write_metrics(tmp_path / name, [{"step": step, "loss/imitation": 1 / step} for step in range(1, num_steps + 1)])
        for name, num_steps in (("a", 40), ("b", 10))
    ]
    open_runs(tab, tmp_path, *runs)
    lines = tab.run("[...document.querySelectorAll('#headlines .lede')].map(line => line.textContent)")
    assert [line.split(",")[0] for line in lines] == ["The mean of the last 4 steps", "The last step"]


def test_an_evaluation_has_a_row_per_score_and_episodes_by_cell(tab, pages):
    open_page(tab, pages["evaluation"])
    assert tab.run("document.querySelectorAll('.whisker').length") == 4  # two cells, two rules
    assert "3 of 1,337" in tab.run("document.querySelector('.table').textContent")
    tab.run(f"({FILTER})('Cell', 'none_5')")
    assert tab.run("document.querySelector('.count').textContent") == "3 of 6 episodes"
    assert "<img src=x" in tab.run("document.querySelector('.said-text').textContent") and tab.messages == []


def test_a_comparison_of_evaluations_counts_the_cells_of_all(tab, pages, tmp_path):
    evaluation = pages["evaluation"].parent / "copy" / "run"
    open_runs(tab, tmp_path, evaluation, evaluation)
    lede = "document.querySelector('#episodes .lede').textContent"
    assert tab.run(lede).startswith("12 episodes of all 4 cells,")
    open_runs(tab, tmp_path, pages["one"].with_name("a"), evaluation)
    assert tab.run(lede).startswith("16 episodes of all 2 steps and all 2 cells,")


def test_a_question_has_its_answer_windows_and_pictures(tab, pages):
    open_page(tab, pages["question"])
    assert tab.run("document.querySelector('h1').textContent") == "What <b>colour</b>?"
    assert tab.run("document.querySelector('.answer .text').textContent") == "<b>A</b>"
    assert tab.run("document.querySelectorAll('.answer .window').length") == 2
    assert tab.run("[...document.querySelectorAll('.album')].map(one => one.childElementCount)") == [8, 8]
    assert tab.run("[...document.images].every(one => one.naturalWidth == 32)") and tab.messages == []


def test_the_lines_of_a_question_are_shown_once_and_a_long_answer_is_smaller(tab, tmp_path):
    sizes_px = []
    for text in ("A", "A because " * 40):
        (tmp_path / "page.html").write_bytes(make_asked("Which?\nA. red\nB. blue", ANSWER.replace("A<", f"{text}<")))
        open_page(tab, tmp_path / "page.html")
        assert tab.run("document.querySelector('main').innerText").count("B. blue") == 0
        assert tab.run("document.querySelector('h1').innerText") == "Which?\nA. red\nB. blue"
        sizes_px.append(tab.run("parseFloat(getComputedStyle(document.querySelector('.answer .text')).fontSize)"))
    assert sizes_px == [34, 18]


@pytest.mark.parametrize(("budgets", "shown"), [([], False), ([4, 8], True)])
def test_a_cold_start_has_frame_budgets_only_with_gating(budgets, shown, tab, tmp_path):
    write_settings(to_record(SftConfig(run_dir=str(tmp_path), video=VideoConfig(frame_budgets=budgets))), tmp_path)
    sample = {"id": "1", "step": 1, "question": "Where?", "frame_budget": 8, "turns": []}
    open_runs(tab, tmp_path, with_episodes(tmp_path, sample))
    texts = tab.run("['.facts', '.row .meta', '.episode'].map(name => document.querySelector(name).textContent)")
    assert ["Frame budgets K" in texts[0], texts[1] == "K 8", "Frame budget K" in texts[2]] == [shown] * 3


def test_pictures_that_calls_showed_are_inside_their_turn(tab, tmp_path):
    """A call of crop_video shows frames to the main agent, the user's own tool a drawing."""
    (tmp_path / "own.py").write_text(DRAWS)
    turn = LOOK.replace("<|im_end|>", f"{call_of('draws')}<|im_end|>")
    config = {"crop_returns": "frames", "tools": ["crop_video", f"{tmp_path / 'own.py'}:Draws"]}
    (tmp_path / "shown.html").write_bytes(make_asked("What colour?", turn, ANSWER, **config))
    open_page(tab, tmp_path / "shown.html")
    assert tab.run("[...document.querySelectorAll('.turn .album')].map(one => one.childElementCount)") == [8, 8, 1]
    assert tab.run("[...document.images].every(one => one.naturalWidth == 32)") and tab.messages == []


def test_keys_move_between_episodes(tab, pages):
    open_page(tab, pages["one"], "#episode-3")
    for key in ("ArrowDown", "j", "ArrowUp", "End", "Home"):
        tab.run(f"document.querySelector('.scroll').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        at = tab.run("[location.hash, document.querySelector('.row[aria-selected=true]').ariaPosInSet]")
        assert at[0] == f"#episode-{int(at[1]) - 1}"
    assert at == ["#episode-0", "1"]
    tab.run("document.querySelector('[aria-label=\"Next episode\"]').focus()")
    for number in (1, 2):
        tab.run("document.activeElement.click()")  # as Enter does; the button keeps the focus
        assert tab.run("location.hash") == f"#episode-{number}"


@pytest.mark.parametrize("weight", [1, 0.5])
def test_the_terms_of_a_reward_add_up(weight, tab, tmp_path):
    run_dir = make_run(tmp_path, 1)
    episodes = episodes_of(run_dir)
    number, episode = next((n, e) for n, e in enumerate(episodes) if not e["missing"] and e["reward"]["anchor"] > 0)
    episode["reward"]["total"] -= (1 - weight) * episode["reward"]["format"]
    with_episodes(run_dir, *episodes)
    config = settings_of(run_dir)
    write_settings(config | {"reward": config["reward"] | {"format_weight": weight}}, run_dir)
    open_runs(tab, tmp_path, run_dir, max_episodes=200, fragment=f"#episode-{number}")
    terms = ".aside .terms:first-child .term"
    parts, total = (tab.run(f"({PRODUCTS})('{terms}{kind}')") for kind in (":not(.sub, .total)", ".total"))
    assert parts == pytest.approx(total, abs=0.02) == pytest.approx(episode["reward"]["total"], abs=0.01)
    of_format = min(1, tab.run(f"({PRODUCTS})('{terms}.sub')"))
    assert of_format == pytest.approx(episode["reward"]["format"], abs=0.02)


def test_text_can_be_colored_by_advantage(tab, pages):
    open_page(tab, pages["one"], with_text(pages["one"], '"advantage":0'))
    gained = "getComputedStyle(document.querySelector('.said-text .gained, .said-text .lost')).backgroundColor"
    color = tab.run(gained)
    tab.run("document.querySelectorAll('.coloring button')[1].click()")
    assert tab.run(gained) != color
    assert tab.run("document.querySelectorAll('.coloring button')[1].ariaPressed") == "true"


def test_parallel_calls_start_at_the_same_time(tab, pages):
    open_page(tab, pages["one"], with_text(pages["one"], "The scene is over"))
    bars = tab.run("[...document.querySelectorAll('.when.of-call i')].map(bar => parseFloat(bar.style.left))")
    assert len(bars) == 3 and len(set(bars)) == 1
    assert "3 calls in parallel" in tab.run("document.querySelector('.waterfall').textContent")


def test_numbers_of_many_short_calls_fit_their_marks(tab, tmp_path):
    windows_s = [[12.0 * n, 12.0 * n + 1] for n in range(40)]
    spans = [{"name": "crop_video", "span": [0, 1], "outcome": "ok", "window_s": window_s} for window_s in windows_s]
    video = {"name": "video.mp4", "path": "/a.mp4", "duration_s": 469.0, "frames_s": []}
    turns = [{"text": "Look.", "calls": spans}]
    episode = {"id": "1", "step": 1, "question": "Where?", "videos": [video], "turns": turns}
    open_runs(tab, tmp_path, with_episodes(tmp_path, episode))
    marks = "[...document.querySelectorAll('.lane button')]"
    assert tab.run(f"{marks}.map(mark => mark.scrollWidth - mark.clientWidth)") == [0] * 40
    film = "document.querySelector('.film').getBoundingClientRect().right"
    assert tab.run(f"{marks}.every(mark => mark.getBoundingClientRect().right <= {film})")


def test_episodes_of_the_same_prompt_are_side_by_side(tab, pages):
    open_page(tab, pages["two"], "#episode-5")
    show = "[one.querySelector('.run').textContent, one.querySelector('h3').textContent]"
    names = tab.run(f"[...document.querySelectorAll('.episode')].map(one => {show})")
    assert [run for run, _ in names] == ["A", "B"] and names[0][1] == names[1][1]
    assert tab.run("document.querySelectorAll('.chart .dashed-1 .line').length") > 10


def test_steps_with_episodes_are_counted_in_a_run_that_has_some(tab, pages, tmp_path):
    open_runs(tab, tmp_path, write_metrics(tmp_path, [{"step": 1, "loss/policy": 0.5}]), pages["one"].with_name("a"))
    assert tab.run("document.querySelector('#episodes .lede').textContent").startswith("10 episodes of all 2 steps,")
    legend = "[...document.querySelectorAll('figure')].find(one => one.textContent.startsWith('Policy')).children[1]"
    assert tab.run(f"{legend}.textContent").startswith("last stepA0.5B")
    tab.run(f"{legend}.nextSibling.dispatchEvent(new KeyboardEvent('keydown', {{key: 'End'}}))")
    assert tab.run(f"{legend}.textContent").startswith("step 2A–B")  # run A ended before


def test_each_of_four_runs_has_a_color_and_a_letter(tab, pages):
    open_page(tab, pages["four"])
    accuracy = "[...document.querySelectorAll('figure')].find(one => one.textContent.startsWith('Accuracy'))"
    lines = f"[...{accuracy}.querySelectorAll('svg > g')]"
    colors = tab.run(f"{lines}.map(line => line.getAttribute('class').split(' ')[0])")
    assert sorted(colors) == ["c-blue", "c-green", "c-orange", "c-red"]
    assert tab.run("[...document.querySelectorAll('h1 .run')].map(mark => mark.textContent)") == ["A", "B", "C", "D"]


def test_six_lines_of_each_of_three_runs_have_different_dashes(tab, tmp_path):
    terms = ("accuracy_mean", "format_reward", "tool_reward_mean", "anchor_mean", "reward_a_mean", "reward_b_mean")
    run = write_metrics(tmp_path, [{"step": step, **{f"rollout/{term}": step for term in terms}} for step in (1, 2)])
    open_runs(tab, tmp_path, *[run] * 3)
    chart = "[...document.querySelectorAll('figure')].find(one => one.textContent.startsWith('Terms'))"
    for drawn, style in ((".line", "strokeDasharray"), (".legend i", "background")):
        of_run = f"{chart}.querySelectorAll('{drawn}').values().take(6)"  # lines are drawn from the last to the first
        assert len(set(tab.run(f"{of_run}.map(one => getComputedStyle(one).{style}).toArray()"))) == 6


@pytest.mark.parametrize("num_runs", [1, 2])
def test_lines_with_the_same_color_have_different_dashes(num_runs, tab, tmp_path):
    types = [f"type{number}" for number in range(12)]
    rows = [{"step": step, **{f"rollout/accuracy_mean_{name}": step for name in types}} for step in (1, 2)]
    open_runs(tab, tmp_path, *[write_metrics(tmp_path, rows)] * num_runs)
    for drawn, style in ((".line", "strokeDasharray"), (".legend i", "background")):
        look = f"(of => of.getPropertyValue('--c') + of.{style})(getComputedStyle(one))"
        looks = tab.run(f"[...document.querySelectorAll('{drawn}')].map(one => {look})")
        assert len(set(looks)) == len(looks) == num_runs * len(types)


def test_single_values_are_numbers_and_constants_are_folded(tab, pages):
    open_page(tab, pages["single"])
    assert tab.run("document.querySelectorAll('.chart').length") == 0
    assert "0.25" in tab.run("document.querySelector('.single').textContent")
    open_page(tab, pages["one"])
    constants = "[...document.querySelectorAll('details')].find(one => one.textContent.startsWith('Constant'))"
    assert "perf/dummy_frac" in tab.run(f"{constants}.textContent")


@pytest.mark.parametrize("values", [(1e-9, 1e6), (0.5, 0.6)])
def test_the_kl_levels_are_inside_their_chart_with_labels_apart(values, tab, tmp_path):
    rows = [{"step": step, "mismatch/behavior_kl": value} for step, value in enumerate(values, 1)]
    write_settings(to_record(Config()), write_metrics(tmp_path, rows))
    open_runs(tab, tmp_path, tmp_path)
    assert tab.run(BAD_LABELS) == []
    assert tab.run("[...document.querySelectorAll('.level')].every(line => line.getAttribute('y1') <= 190 - 22)")
    assert tab.run("document.querySelectorAll('.level').length") == 2


def test_large_values_have_an_exponent(tab, tmp_path):
    rows = [{"step": step, "rollout/reward_mean": -step * 1e24} for step in (1, 2)]
    open_runs(tab, tmp_path, write_metrics(tmp_path, rows))
    assert tab.run("document.querySelector('.headline .value').textContent") == "−2.0e24"
    assert tab.run("document.querySelector('.legend b').textContent") == "−2.0e24"


TICK_LABELS = {  # metric values at even and odd steps -> labels of the vertical axis
    "count": ((0, 1), ["0", "1"]),
    "large count": ((1200, 1201), ["1,200", "1,201"]),
    "fraction": ((0, 0.5), ["0", "0.2", "0.4"]),
    "quarters": ((0, 0.9), ["0", "0.25", "0.5", "0.75"]),
    "small": ((0, 9e-7), ["0", "2.5e−7", "5e−7", "7.5e−7"]),
    "close": ((2e-6, 2.001e-6), ["2e−6", "2.0005e−6", "2.001e−6"]),
    "large": ((0, 2e25), ["0", "1e25", "2e25"]),
}


@pytest.fixture(scope="module")
def of_ticks(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("ticks")
    lines = [(f"loss/{name}", values) for name, (values, _) in TICK_LABELS.items()]
    rows = [{"step": step} | {line: values[step % 2] for line, values in lines} for step in range(1, 9)]
    (run_dir / "page.html").write_bytes(make_page([write_metrics(run_dir, rows)], 1))
    return run_dir / "page.html"


@pytest.mark.parametrize("name", TICK_LABELS)
def test_ticks_of_counts_are_whole_and_no_two_labels_are_equal(name, tab, of_ticks):
    open_page(tab, of_ticks)
    assert tab.run(f"({TICKS})('loss/{name}', 'end')") == TICK_LABELS[name][1]


@pytest.mark.parametrize(("width_px", "steps"), [(320, "2468"), (390, "2468"), (1280, "12345678")])
def test_ticks_of_steps_are_whole_at_every_width(width_px, steps, tab, of_ticks):
    open_page(tab, of_ticks, size_px=(width_px, 844))
    assert tab.run(f"({TICKS})('loss/count', 'middle')") == [*steps]


@pytest.fixture(scope="module")
def long_labels(tmp_path_factory) -> Path:
    """A run with a long question type, large steps and values, and an episode of one turn that takes all its time."""
    run_dir = tmp_path_factory.mktemp("labels")
    key = f"rollout/accuracy_mean_{'when_does_it_happen_' * 5}"
    rows = [{"step": 500_000 * n, key: n / 8, f"{key}too": n / 9, "loss/policy": 1e20 * n} for n in range(1, 9)]
    write_metrics(run_dir, rows)
    turn = {"text": "I see.", "told": "", "started_s": 0.0, "latency_s": 1.4, "calls": []}
    episode = {"id": "1", "step": 500_000, "question": "Where?", "overview_s": 0.02, "turns": [turn]}
    (run_dir / "page.html").write_bytes(make_page([with_episodes(run_dir, episode)], 1))
    return run_dir / "page.html"


@pytest.mark.parametrize("size_px", [DESKTOP, PHONE, (320, 700)])
def test_long_labels_are_inside_their_chart_and_apart(size_px, tab, long_labels):
    open_page(tab, long_labels, size_px=size_px)
    assert tab.run("document.querySelectorAll('.chart text, .when small').length") > 8
    assert tab.run(BAD_LABELS) == []


@pytest.mark.parametrize("name", ["one", "two", "four", "question", "names"])
def test_labels_are_inside_their_chart_and_apart(name, tab, pages):
    for size_px in (DESKTOP, PHONE):
        open_page(tab, pages[name], size_px=size_px)
        assert tab.run(BAD_LABELS) == []


def test_a_printed_page_is_light_with_the_marks_of_its_legends_and_whole_charts(tab, pages):
    open_page(tab, pages["one"], dark=True)
    dark = tab.run("getComputedStyle(document.body).backgroundColor")
    tab("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    style = "(name, key) => getComputedStyle(document.querySelector(name))[key]"
    assert [dark, tab.run(f"({style})('body', 'backgroundColor')")] == ["rgb(18, 19, 22)", "rgb(255, 255, 255)"]
    assert {tab.run(f"({style})('{name}', 'printColorAdjust')") for name in (".legend i", ".when i")} == {"exact"}
    assert tab.run(f"({style})('figure', 'breakInside')") == "avoid"
    assert tab.run(f"({style})('.callcard p', 'maxHeight')") == "none"
    assert tab.messages == []


A4_PX = 718  # width of a sheet without its margins


def test_the_table_of_cells_fits_a_sheet_of_paper(tab, pages):
    open_page(tab, pages["evaluation"], size_px=(A4_PX, 1000))
    tab("Emulation.setEmulatedMedia", media="print")
    right = "[...document.querySelectorAll('.table td, .table th')].map(cell => cell.getBoundingClientRect().right)"
    assert tab.run(f"Math.max(...{right})") <= A4_PX
    assert tab.run("document.documentElement.scrollWidth") <= A4_PX


@pytest.mark.nightly
def test_only_visible_rows_of_ten_thousand_episodes_are_rendered(tab, pages, tmp_path):
    episodes = ({"id": f"{n:06d}-p{n}/0", "step": 1, "question": f"Number {n}?"} for n in range(10_000))
    open_runs(tab, tmp_path, with_episodes(tmp_path, *episodes), max_episodes=10_000)
    assert tab.run("document.querySelector('.count').textContent") == "10,000 episodes"
    assert tab.run("document.querySelectorAll('.row').length") < 60
    tab.run("document.querySelector('.scroll').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))")
    assert tab.run("document.querySelector('.episode h3').textContent") == "Number 9999?"
    tab.run(f"({FILTER})('Question contains', 'number 123')")
    assert tab.run("document.querySelectorAll('.row').length") < 60
    assert tab.run("document.querySelector('.count').textContent") == "11 of 10,000 episodes"
