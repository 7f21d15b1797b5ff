"""Every public split is read from a copy in the hub's layout; what is laid out otherwise is one sentence."""

import contextlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import (
    FILES,
    ROWS,
    VIDEOS,
    longvideobench_row,
    lvbench_row,
    make_copy,
    mmvu_row,
    videomme_row,
    write_rows,
)

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits import SPLITS, split_named
from paravt_jax.data.splits.public import ASK_LETTER, ASK_WINDOW, ASK_WORDS
from paravt_jax.data.splits.reading import load_samples

READ = {  # of every split: what the first row asks, its answer, and where its video is
    "videomme": (f"How many lids?\nA. One.\nB. Two.\nC. Three.\nD. None.\n{ASK_LETTER}", "A"),
    "videomme_subtitles": (f"How many lids?\nA. One.\nB. Two.\nC. Three.\nD. None.\n{ASK_LETTER}", "A"),
    "longvideobench": (f"What is poured?\nA. Milk\nB. Tea\nC. Oil\nD. Ink\n{ASK_LETTER}", "A"),
    "lvbench": (f"What year\nis shown?\nA. 1636\nB. 1366\nC. 1363\nD. 1633\n{ASK_LETTER}", "D"),
    "mlvu": (f"Which colour?\nA. Yellow\nB. Red\nC. Green\nD. Blue\n{ASK_LETTER}", "B"),
    "mmvu": (f"Which algorithm?\nA. DFS\nB. BFS\nC. Sort\nD. Hash\nE. Heap\n{ASK_LETTER}", "A"),
    "charades": (f"When in the video does this happen: person turn a light on.\n{ASK_WINDOW}", "[24.3, 30.4]"),
}


def load(name, root, **settings):
    return load_samples(SPLITS[name], str(root), video_root="", max_bad_frac=0.0, **settings)


def load_row(name, root, row):
    write_rows(name, root, [row])
    return load(name, root).samples[0]


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_read_from_a_copy_as_the_hub_has_it(name, tmp_path):
    found = load(name, make_copy(name, tmp_path))
    assert len(found.samples) == 3 and len({sample.prompt.id for sample in found.samples}) == 3
    first = found.samples[0].prompt
    assert (first.question, first.answer) == READ[name]
    assert first.videos == (str(tmp_path / VIDEOS[name][0]),)
    assert list(found.files) == [FILES[name][0].rpartition("/")[2]] and not found.bad


def test_every_video_is_found_where_archives_are_unpacked(tmp_path):
    for name in SPLITS:
        samples = load(name, make_copy(name, tmp_path / name)).samples
        places = {str(tmp_path / name / video) for video in VIDEOS[name]}
        assert {video for sample in samples for video in sample.prompt.videos} <= places


def test_videos_may_lie_elsewhere_and_one_that_is_missing_stays_in(tmp_path):
    root = make_copy("longvideobench", tmp_path / "rows")
    (tmp_path / "v1.mp4").touch()
    found = load_samples(SPLITS["longvideobench"], str(root), video_root=str(tmp_path), max_bad_frac=0.0)
    places = [sample.prompt.videos[0] for sample in found.samples]
    assert places == [str(tmp_path / place) for place in ("videos/v0.mp4", "v1.mp4", "videos/v2.mp4")]
    (tmp_path / "v1.mp4").unlink()
    with pytest.raises(ValueError, match=r"has no video of data\.split=longvideobench, for example .*unpack the"):
        load_samples(SPLITS["longvideobench"], str(root), video_root=str(tmp_path), max_bad_frac=0.0)


def test_what_is_reported_apart_comes_with_every_sample(tmp_path):
    groups = {name: load(name, make_copy(name, tmp_path / name)).samples[1].groups for name in SPLITS}
    assert groups["videomme"]["duration"] == ("short",) and len(groups["videomme"]) == 4
    assert groups["longvideobench"] == {"duration_group": ("15",), "question_category": ("S2E",)}
    assert groups["lvbench"]["question_type"] == ("key information retrieval", "event understanding")
    assert groups["mlvu"] == {"task_type": ("needle",)}
    assert groups["mmvu"] == {"question_type": ("open-ended",), "subject": ("Computer_Science",)}


def test_videos_of_the_same_name_in_two_folders_are_two(tmp_path):
    root = make_copy("mmvu", tmp_path)
    rows = [mmvu_row(0), mmvu_row(2), mmvu_row(0, video=mmvu_row(0)["video"].replace("Computer_Science", "Law"))]
    write_rows("mmvu", root, rows)
    assert len({sample.video for sample in load("mmvu", root).samples}) == 3
    videomme = load("videomme", make_copy("videomme", tmp_path / "other")).samples
    assert [sample.video for sample in videomme] == ["data/fFjv93ACGo0.mp4"] * 2 + ["data/fFjv93ACGo1.mp4"]


def test_an_open_question_of_mmvu_has_no_options_and_its_answer_no_stray_spaces(tmp_path):
    sample = load("mmvu", make_copy("mmvu", tmp_path)).samples[1]
    assert (sample.prompt.question_type, sample.options) == ("oe", ())
    assert (sample.prompt.question, sample.prompt.answer) == (f"Which algorithm?\n{ASK_WORDS}", "depth-first search")


def test_options_of_longvideobench_end_where_they_are_not_used(tmp_path):
    root = make_copy("longvideobench", tmp_path)
    assert load_row("longvideobench", root, longvideobench_row(0, option3="N/A")).options == ("Milk", "Tea", "Oil")


def test_options_of_lvbench_are_the_last_lines_of_its_question(tmp_path):
    root = make_copy("lvbench", tmp_path)
    question = "Which is said\nA: to B?\n(A) one\n(B) A. two\n(C) three"
    sample = load_row("lvbench", root, lvbench_row(0, question=question, answer="B"))
    assert sample.options == ("one", "A. two", "three") and sample.prompt.question.startswith(
        "Which is said\nA: to B?\nA."
    )


def test_an_answer_of_mlvu_may_be_the_text_of_one_option(tmp_path):
    assert load("mlvu", make_copy("mlvu", tmp_path, answer="Green")).samples[0].prompt.answer == "C"
    with pytest.raises(ValueError, match=r"answer outside of the options: 3.*'Red', its options are ABCD"):
        load("mlvu", make_copy("mlvu", tmp_path, answer="Red", candidates=["Red", "Red", "Green", "Blue"]))


def test_only_the_split_with_subtitles_shows_them_and_its_file_is_found(tmp_path):
    assert [name for name, split in SPLITS.items() if split.with_subtitles] == ["videomme_subtitles"]
    samples = load("videomme_subtitles", make_copy("videomme_subtitles", tmp_path)).samples
    assert samples[0].prompt.subtitles == (str(tmp_path / "subtitle" / "fFjv93ACGo0.srt"),)


def test_equal_sentences_on_one_video_are_two_samples(tmp_path):
    root = make_copy("charades", tmp_path, timestamp=[24.3, 30.4])
    assert len({sample.prompt.id for sample in load("charades", root).samples}) == 3


def test_the_published_counts_are_known():
    counts = {name: split.num_samples for name, split in SPLITS.items()}
    assert counts == {
        "videomme": 2700,
        "videomme_subtitles": 2700,
        "longvideobench": 1337,
        "lvbench": 1549,
        "mlvu": 2174,
        "mmvu": 1000,
        "charades": 3720,
    }


PATH_COLUMNS = {"videomme": "videoID", "videomme_subtitles": "videoID", "mlvu": "video_name", "mmvu": "video"}
PATH_COLUMNS |= {"longvideobench": "video_path", "lvbench": "video_path", "charades": "video"}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", SPLITS)
def test_rows_with_hostile_paths_are_bad_and_the_others_are_read(name, tmp_path):
    root = make_copy(name, tmp_path / "a" / "b")
    for outside in (tmp_path, tmp_path / "a"):
        (outside / "outside.mp4").touch()
        (outside / "outside").touch()
    paths = ["../../outside", "x" * 5000, "a/" * 3000, "a\0b"]
    hostile = [ROWS[name](1, **{PATH_COLUMNS[name]: path}) for path in paths]
    write_rows(name, root, [ROWS[name](0), *hostile])
    loaded = load_samples(SPLITS[name], str(root), video_root="", max_bad_frac=0.8)
    assert len(loaded.samples) == 1
    assert loaded.bad == {"file outside of data.video_root": 1, "impossible path": 3}


def test_a_row_of_a_json_split_that_is_nested_too_deep_or_no_text_is_a_bad_row(tmp_path):
    root = make_copy("mmvu", tmp_path)
    rows = [json.dumps(mmvu_row(0)), json.dumps(mmvu_row(2))]
    deep = [DEEP, rows[0].replace('"Which algorithm?"', DEEP), f'{{"id": {DEEP[:980]}{DEEP[-980:]}}}']
    no_text = [json.dumps(mmvu_row(0, **{column: "\ud800"})) for column in ("id", "question", "video", "answer")]
    no_text.append(json.dumps(mmvu_row(0, choices={"A": "\ud800", "B": "b"})))
    with_brackets = json.dumps(mmvu_row(2, question='Is "]},{[" or \\ said?'))
    (root / FILES["mmvu"][0]).write_text(f"[{', '.join([rows[0], *deep, *no_text, rows[1], with_brackets])}]\n")
    found = load_samples(SPLITS["mmvu"], str(root), video_root="", max_bad_frac=0.9)
    assert found.bad == {"wrong schema": len(deep) + len(no_text)}
    assert [sample.prompt.question.split("\n")[0] for sample in found.samples] == [
        "Which algorithm?",
        "Which algorithm?",
        'Is "]},{[" or \\ said?',
    ]


@pytest.mark.parametrize("content", ["[1, 2", "{}", "[1] 2", '["a', "", "[1}", "\ud800"])
def test_a_json_file_that_is_no_list_is_refused_whole(content, tmp_path):
    root = make_copy("mmvu", tmp_path)
    (root / FILES["mmvu"][0]).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"validation\.json (is not JSON|must be a list of rows)"):
        load("mmvu", root)


def test_a_text_of_a_public_row_is_bounded_wherever_it_stands(tmp_path):
    root = make_copy("videomme", tmp_path)
    long = "w" * 200_000
    rows = [videomme_row(0), videomme_row(1, options=["A. One.", f"B. {long}"]), videomme_row(2, domain=long)]
    write_rows("videomme", root, rows)
    found = load_samples(SPLITS["videomme"], str(root), video_root="", max_bad_frac=0.9)
    assert len(found.samples) == 1 and found.bad == {"text too long": 2}


@pytest.mark.parametrize("name", SPLITS)
def test_a_column_that_is_not_there_is_named(name, tmp_path):
    root = make_copy(name, tmp_path)
    gone = next(iter(SPLITS[name].columns))
    rows = [{key: value for key, value in ROWS[name](0).items() if key != gone}]
    write_rows(name, root, rows)
    with pytest.raises(ValueError, match=f"has no column {gone}; it has "):
        load(name, root)


def test_a_column_of_another_type_is_named_with_the_row(tmp_path):
    root = make_copy("videomme", tmp_path)
    file = root / FILES["videomme"][0]
    table = pq.read_table(file)
    pq.write_table(table.set_column(9, "options", pa.array(["A. One. B. Two."] * 3)), file)
    with pytest.raises(
        ValueError, match=r"test-00000-of-00001\.parquet row 0: options is 'A\. One\. B\. Two\.', expected list\[str\]"
    ):
        load("videomme", root)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("videomme", {"answer": "E"}, "answer outside of the options: 3.*the answer to 000-1 is 'E'"),
        ("videomme", {"options": ["A. One.", "C. Two."]}, "their letters are AC"),
        ("videomme", {"question": " "}, "empty question"),
        ("longvideobench", {"correct_choice": 4}, "correct_choice of v0_0 is 4, it has 4 options"),
        ("lvbench", {"question": "What year?"}, "wrong options: 3"),
        ("mmvu", {"question_type": "boolean"}, "'boolean' on 'Computer_Science'"),
        ("mmvu", {"choices": {"A": "x", "B": "", "C": "y"}}, "their letters are AC"),
        ("mmvu", {"answer": "?", "question_type": "open-ended"}, "unreadable ground truth: 3.*'\\?' of an oe question"),
        ("charades", {"timestamp": [30.4, 24.3]}, "wrong window"),
        ("charades", {"timestamp": [24.3]}, "wrong window"),
    ],
)
def test_a_row_that_cannot_be_scored_is_one_sentence(name, changed, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load(name, make_copy(name, tmp_path, **changed))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(JSON | st.lists(JSON, min_size=2, max_size=4) | st.dictionaries(st.sampled_from("ABC"), JSON))
def test_whatever_a_column_holds_a_row_is_a_sample_or_a_bad_row(value):
    for name, split in SPLITS.items():
        for column in split.columns:
            with contextlib.suppress(BadRow):
                assert split.checked(ROWS[name](0) | {column: value}).prompt.question


def test_another_layout_or_another_name_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"data\.split=mvbench is unknown, expected videomme, "):
        split_named("mvbench")
    with pytest.raises(
        ValueError, match=r"has no videomme/test-\*\.parquet, the rows of data\.split=videomme in lmms-lab/Video-MME"
    ):
        load("videomme", tmp_path)
    with pytest.raises(
        ValueError, match=r"is not a directory; with data\.split=videomme set it to a copy of lmms-lab/Video-MME"
    ):
        load("videomme", make_copy("videomme", tmp_path) / FILES["videomme"][0])
    (tmp_path / "validation.json").write_text(json.dumps({"rows": [mmvu_row(0)]}))
    with pytest.raises(ValueError, match=r"validation\.json must be a list of rows"):
        load("mmvu", tmp_path)
