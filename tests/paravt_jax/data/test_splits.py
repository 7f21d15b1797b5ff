"""Every public split is read from a copy in the hub's layout; other layouts are rejected by name."""

import contextlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from published import FILES, ROWS, VIDEOS, make_copy, mmvu_row, videomme_row, write_rows

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits import SPLITS, split_named
from paravt_jax.data.splits.public import ASK_LETTER, ASK_WINDOW, ASK_WORDS
from paravt_jax.data.splits.reading import load_samples

VIDEOMME = f"How many lids?\nA. One.\nB. Two.\nC. Three.\nD. None.\n{ASK_LETTER}", "A", 2700
READ = {  # the first question of each split, its answer, and the published number of samples
    "videomme": VIDEOMME,
    "videomme_subtitles": VIDEOMME,
    "longvideobench": (f"What is poured?\nA. Milk\nB. Tea\nC. Oil\nD. Ink\n{ASK_LETTER}", "A", 1337),
    "lvbench": (f"What year\nis shown?\nA. 1636\nB. 1366\nC. 1363\nD. 1633\n{ASK_LETTER}", "D", 1549),
    "mlvu": (f"Which colour?\nA. Yellow\nB. Red\nC. Green\nD. Blue\n{ASK_LETTER}", "B", 2174),
    "mmvu": (f"Which algorithm?\nA. DFS\nB. BFS\nC. Sort\nD. Hash\nE. Heap\n{ASK_LETTER}", "A", 1000),
    "charades": (f"When in the video does this happen: person turn a light on.\n{ASK_WINDOW}", "[24.3, 30.4]", 3720),
}


@pytest.mark.parametrize("name", SPLITS)
def test_the_page_has_the_layout_of_every_split(name):
    split, page = SPLITS[name], (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    columns = ", ".join(f"`{column}`" for column in split.columns)
    assert f"| `{name.removesuffix('_subtitles')}` | `{split.rows}` | {columns} |" in page


def load(name, root, video_root="", max_bad_frac=0.0):
    return load_samples(SPLITS[name], str(root), video_root=str(video_root), max_bad_frac=max_bad_frac)


def load_row(name, root, number=0, **changed):
    make_copy(name, root)
    write_rows(name, root, [ROWS[name](number, **changed)])
    return load(name, root).samples[0]


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_read_from_a_copy_in_the_hubs_layout(name, tmp_path):
    loaded = load(name, make_copy(name, tmp_path))
    assert len(loaded.samples) == 3 and len({sample.prompt.id for sample in loaded.samples}) == 3
    first = loaded.samples[0].prompt
    assert (first.question, first.answer, SPLITS[name].num_samples) == READ[name]
    assert first.videos == (str(tmp_path / VIDEOS[name][0]),)
    videos = {video for sample in loaded.samples for video in sample.prompt.videos}
    assert videos <= {str(tmp_path / video) for video in VIDEOS[name]}
    assert list(loaded.files) == [FILES[name].rpartition("/")[2]] and not loaded.bad


def test_videos_may_be_in_another_root_and_a_sample_without_its_video_is_loaded(tmp_path):
    root = make_copy("longvideobench", tmp_path / "rows")
    (tmp_path / "v1.mp4").touch()
    paths = [sample.prompt.videos[0] for sample in load("longvideobench", root, tmp_path).samples]
    assert paths == [str(tmp_path / path) for path in ("videos/v0.mp4", "v1.mp4", "videos/v2.mp4")]
    (tmp_path / "v1.mp4").unlink()
    with pytest.raises(ValueError, match=r"has no video of data\.split=longvideobench, for example .*unpack the"):
        load("longvideobench", root, tmp_path)


def test_samples_have_the_groups_of_the_report(tmp_path):
    groups = {name: load(name, make_copy(name, tmp_path / name)).samples[1].groups for name in SPLITS}
    assert groups["videomme"]["duration"] == ("short",) and len(groups["videomme"]) == 4
    assert groups["longvideobench"] == {"duration_group": ("15",), "question_category": ("S2E",)}
    assert groups["lvbench"]["question_type"] == ("key information retrieval", "event understanding")
    assert groups["mlvu"] == {"task_type": ("needle",)}
    assert groups["mmvu"] == {"question_type": ("open-ended",), "subject": ("Computer_Science",)}


def test_videos_of_the_same_name_in_two_folders_are_distinct(tmp_path):
    root = make_copy("mmvu", tmp_path)
    rows = [mmvu_row(0), mmvu_row(2), mmvu_row(0, video=mmvu_row(0)["video"].replace("Computer_Science", "Law"))]
    write_rows("mmvu", root, rows)
    assert len({sample.video for sample in load("mmvu", root).samples}) == 3
    videomme = load("videomme", make_copy("videomme", tmp_path / "other")).samples
    assert [sample.video for sample in videomme] == ["data/fFjv93ACGo0.mp4"] * 2 + ["data/fFjv93ACGo1.mp4"]


def test_an_open_question_of_mmvu_has_no_options_and_a_stripped_answer(tmp_path):
    sample = load("mmvu", make_copy("mmvu", tmp_path)).samples[1]
    assert (sample.prompt.question_type, sample.options) == ("oe", ())
    assert (sample.prompt.question, sample.prompt.answer) == (f"Which algorithm?\n{ASK_WORDS}", "depth-first search")


def test_an_unused_letter_of_mmvu_is_dropped_without_renaming_the_others(tmp_path):
    sample = load_row("mmvu", tmp_path, choices={"A": "DFS", "B": "", "D": "Hash"}, answer="D")
    assert sample.prompt.question == f"Which algorithm?\nA. DFS\nD. Hash\n{ASK_LETTER}"
    assert sample.prompt.answer == "D" and SPLITS["mmvu"].official("hash", "D", sample.options) == 1


def test_unused_options_of_longvideobench_are_dropped(tmp_path):
    assert load_row("longvideobench", tmp_path, option3="N/A").options == ("Milk", "Tea", "Oil")
    sample = load_row("longvideobench", tmp_path, 2, option1="N/A")
    assert sample.prompt.answer == "C" and "A. Milk\nC. Oil\nD. Ink" in sample.prompt.question


def test_options_of_lvbench_are_the_last_lines_of_its_question(tmp_path):
    question = "Which is said\nA: to B?\n(A) one\n(B) A. two\n(C) three"
    sample = load_row("lvbench", tmp_path, question=question, answer="B")
    assert sample.options == ("one", "A. two", "three")
    assert sample.prompt.question.startswith("Which is said\nA: to B?\nA.")


def test_an_answer_of_mlvu_may_be_the_text_of_one_option(tmp_path):
    assert load("mlvu", make_copy("mlvu", tmp_path, answer="Green")).samples[0].prompt.answer == "C"
    with pytest.raises(ValueError, match=r"answer outside of the options: 3.*'Red', its options are ABCD"):
        load("mlvu", make_copy("mlvu", tmp_path, answer="Red", candidates=["Red", "Red", "Green", "Blue"]))


def test_only_the_split_with_subtitles_has_their_file(tmp_path):
    assert [name for name, split in SPLITS.items() if split.with_subtitles] == ["videomme_subtitles"]
    samples = load("videomme_subtitles", make_copy("videomme_subtitles", tmp_path)).samples
    assert samples[0].prompt.subtitles == (str(tmp_path / "subtitle" / "fFjv93ACGo0.srt"),)


def test_equal_sentences_on_one_video_are_distinct_samples(tmp_path):
    root = make_copy("charades", tmp_path, timestamp=[24.3, 30.4])
    assert len({sample.prompt.id for sample in load("charades", root).samples}) == 3


PATH_COLUMNS = dict.fromkeys(SPLITS, "video_path") | {"videomme": "videoID", "videomme_subtitles": "videoID"}
PATH_COLUMNS |= {"mlvu": "video_name", "mmvu": "video", "charades": "video"}


@pytest.mark.parametrize("name", SPLITS)
def test_rows_with_hostile_paths_are_bad_and_the_others_are_read(name, tmp_path):
    root = make_copy(name, tmp_path / "a" / "b")
    for outside in (tmp_path, tmp_path / "a"):
        (outside / "outside.mp4").touch()
        (outside / "outside").touch()
    paths = ["../../outside", "x" * 5000, "a/" * 3000, "a\0b"]
    hostile = [ROWS[name](1, **{PATH_COLUMNS[name]: path}) for path in paths]
    write_rows(name, root, [ROWS[name](0), *hostile])
    loaded = load(name, root, max_bad_frac=0.8)
    assert len(loaded.samples) == 1
    assert loaded.bad == {"file outside of data.video_root": 1, "impossible path": 3}


def test_a_row_of_a_json_split_that_is_nested_deep_or_no_valid_text_is_a_bad_row(tmp_path):
    root = make_copy("mmvu", tmp_path)
    rows = [json.dumps(mmvu_row(0)), f'{{"id": {"[" * 400}{"]" * 400}}}', json.dumps(mmvu_row(2))]
    rows += [json.dumps(mmvu_row(0, **{column: "\ud800"})) for column in ("id", "question", "video", "answer")]
    rows += [json.dumps(mmvu_row(0, choices={"A": "\ud800", "B": "b"}))]
    (root / FILES["mmvu"]).write_text(f"[{', '.join(rows)}]\n")
    loaded = load("mmvu", root, max_bad_frac=0.9)
    assert loaded.bad == {"wrong schema": 6} and len(loaded.samples) == 2


@pytest.mark.parametrize("content", ["[1, 2", "{}", "[1] 2", '["a', "", "[1}", "\ud800", "[" * 100_000])
def test_a_json_file_that_is_not_a_list_is_rejected(content, tmp_path):
    root = make_copy("mmvu", tmp_path)
    (root / FILES["mmvu"]).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"validation\.json (is not JSON|must be a list of rows)"):
        load("mmvu", root)


def test_texts_of_a_public_row_have_a_maximum_length(tmp_path):
    root, long = make_copy("videomme", tmp_path), "w" * 200_000
    rows = [videomme_row(0), videomme_row(1, options=["A. One.", f"B. {long}"]), videomme_row(2, domain=long)]
    write_rows("videomme", root, rows)
    loaded = load("videomme", root, max_bad_frac=0.9)
    assert len(loaded.samples) == 1 and loaded.bad == {"text too long": 2}


@pytest.mark.parametrize("name", SPLITS)
def test_a_missing_column_is_named(name, tmp_path):
    first = next(iter(SPLITS[name].columns))
    write_rows(name, tmp_path, [{key: value for key, value in ROWS[name](0).items() if key != first}])
    with pytest.raises(ValueError, match=f"has no column {first}; it has "):
        load(name, tmp_path)


def test_a_column_of_another_type_is_named_with_the_row(tmp_path):
    root = make_copy("videomme", tmp_path)
    file = root / FILES["videomme"]
    table = pq.read_table(file)
    pq.write_table(table.set_column(9, "options", pa.array(["A. One. B. Two."] * 3)), file)
    message = r"test-00000-of-00001\.parquet row 0: options is 'A\. One\. B\. Two\.', expected list\[str\]"
    with pytest.raises(ValueError, match=message):
        load("videomme", root)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("videomme", {"answer": "E"}, "answer outside of the options: 3.*the answer to 000-1 is 'E'"),
        ("videomme", {"options": ["A. One.", "C. Two."]}, "their letters are AC"),
        ("videomme", {"question": " "}, "empty question"),
        ("longvideobench", {"correct_choice": 4}, "correct_choice of v0_0 is 4, it has 4 options"),
        ("lvbench", {"question": "What year?"}, "wrong options: 3"),
        ("mmvu", {"question_type": "boolean"}, "'boolean' on 'Computer_Science'"),
        ("mmvu", {"choices": {"A": "x", "B": " ", "C": "y"}, "answer": "B"}, "is 'B', its options are AC"),
        ("mmvu", {"choices": {"A": "x", "B": ""}}, "has the options A, expected 2 to 10"),
        ("mmvu", {"answer": "?", "question_type": "open-ended"}, "unreadable ground truth: 3.*'\\?' of an oe question"),
        ("charades", {"timestamp": [30.4, 24.3]}, "wrong window"),
        ("charades", {"timestamp": [24.3]}, "wrong window"),
    ],
)
def test_a_row_that_cannot_be_scored_is_rejected(name, changed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(name, make_copy(name, tmp_path, **changed))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


COLUMNS = [(split, column) for split in SPLITS.values() for column in split.columns]


@given(
    st.sampled_from(COLUMNS),
    JSON | st.lists(JSON, min_size=2, max_size=4) | st.dictionaries(st.sampled_from("ABC"), JSON),
)
def test_a_row_with_any_value_in_a_column_is_a_sample_or_a_bad_row(place, value):
    split, column = place
    with contextlib.suppress(BadRow):
        assert split.checked(ROWS[split.name](0) | {column: value}).prompt.question


def test_an_unknown_split_or_layout_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"data\.split=mvbench is unknown, expected videomme, "):
        split_named("mvbench")
    with pytest.raises(ValueError, match=r"reward\.plugin takes words, which samples of data\.split=videomme do not"):
        load_samples(SPLITS["videomme"], str(tmp_path), video_root="", max_bad_frac=0, columns=["words"])
    message = r"has no videomme/test-\*\.parquet, the rows of data\.split=videomme in lmms-lab/Video-MME"
    with pytest.raises(ValueError, match=message):
        load("videomme", tmp_path)
    message = r"is not a directory; with data\.split=videomme set it to a copy of lmms-lab/Video-MME"
    with pytest.raises(ValueError, match=message):
        load("videomme", make_copy("videomme", tmp_path) / FILES["videomme"])
