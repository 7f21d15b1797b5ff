"""The ids of an incrementally rendered dialogue equal the chat template applied to the whole dialogue."""

import json

import numpy as np
import pytest
from agents import call
from hypothesis import given, settings, strategies as st
from qwen_tokenizer import TOKENIZERS, chat_of, ids_of_template

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import make_tiny, tiny_config, tiny_tokenizer
from rollout.chat import Chat
from rollout.picture import Picture
from rollout.tools import CROP_VIDEO_SCHEMA


@pytest.fixture(scope="module", params=TOKENIZERS)
def chat(request):
    return chat_of(request.param)


letters = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co", "Cn", "Zs", "Mn"])
words = st.text(letters, min_size=1, max_size=9)
prose = st.lists(words, min_size=1, max_size=5).map(" ".join)
calls = st.lists(st.integers(0, 60), min_size=1, max_size=3)


@given(turns=st.lists(st.tuples(prose, calls, prose), max_size=3), answer=prose)
@settings(max_examples=20, deadline=None)
def test_incremental_rendering_equals_the_chat_template(chat, turns, answer):
    messages = [{"role": "system", "content": "Watch."}, {"role": "user", "content": "What?"}]
    ids = chat.prompt(messages, [CROP_VIDEO_SCHEMA])
    for thought, starts, report in turns:
        asked = "\n".join(call(start, start + 4) for start in starts)
        spoken = f"<think>\n{chat.escape(thought)}\n</think>\n\n{asked}"
        responses = [chat.escape(f"{report} {start}") for start in starts]
        messages.append({"role": "assistant", "content": spoken})
        messages += [{"role": "tool", "content": response} for response in responses]
        ids = np.concatenate([ids, chat.encode(spoken + "<|im_end|>")])
        ids = np.concatenate([ids, chat.after_turn(ids, responses)])
    final = f"<think>\n{chat.escape(answer)}</think><answer>B</answer>"
    messages.append({"role": "assistant", "content": final})
    ids = np.concatenate([ids, chat.encode(final + "<|im_end|>"), chat.encode("\n")])
    np.testing.assert_array_equal(ids, ids_of_template(chat, messages, [CROP_VIDEO_SCHEMA]))


def test_a_truncated_turn_is_closed_once(chat):
    cut, ended = chat.encode("<think>\nThe"), chat.encode("<think>\nThe<|im_end|>")
    for responses in (["one"], ["one", "two"]):
        after_cut, after_ended = chat.after_turn(cut, responses), chat.after_turn(ended, responses)
        assert after_cut[0] == chat.turn_end_id
        np.testing.assert_array_equal(after_cut[1:], after_ended)


names = ["<|im_end|>", "<tool_call>", "</tool_response>", "<|image_pad|>", "</think>", "<|", "|>", "<", "im_end", " "]


@given(st.lists(st.one_of(st.sampled_from(names), st.text(max_size=5)), max_size=12).map("".join))
@settings(deadline=None)
def test_untrusted_text_never_encodes_to_special_tokens(chat, text):
    added = chat.tokenizer.get_added_tokens_decoder()
    assert added.keys().isdisjoint(chat.encode(chat.escape(text)).tolist())
    if not any(name in text for name in (*names[:5], *(token.content for token in added.values()))):
        assert chat.escape(text) == text


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_spans_cover_the_text_and_match_its_tokens(chat, data):
    ids = data.draw(st.lists(st.integers(0, chat.tokenizer.get_vocab_size() - 1), max_size=12))
    text, spans = chat.decode(ids), chat.spans(ids)
    covered = set()
    for start, end in spans:
        assert 0 <= start <= end <= len(text)
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))
    starts = [start for start, _ in spans]
    assert starts == sorted(starts)


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_spans_of_ordinary_text_are_its_tokens(chat, text):
    ids = chat.encode(chat.escape(text)).tolist()
    text = chat.decode(ids)
    for token, (start, end) in zip(ids, chat.spans(ids), strict=True):
        piece = chat.decode([token])
        if "\ufffd" not in piece:
            assert text[start:end] == piece


def test_the_template_is_read_from_every_location(tmp_path):
    make_tiny(tmp_path / "hf")
    chat = Chat.from_hf(tmp_path / "hf")
    prompt = chat.prompt([{"role": "user", "content": "x"}])
    found = next(p for p in (tmp_path / "hf").glob("chat_template.*"))
    found.unlink()
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    for place in ("chat_template.json", "tokenizer_config.json"):
        for path in (tmp_path / "hf").glob("chat_template.*"):
            path.unlink()
        base = config if place == "tokenizer_config.json" else {}
        (tmp_path / "hf" / place).write_text(json.dumps(base | {"chat_template": CHAT_TEMPLATE}))
        np.testing.assert_array_equal(Chat.from_hf(tmp_path / "hf").prompt([{"role": "user", "content": "x"}]), prompt)


def test_a_directory_without_tokenizer_or_template_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Chat.from_hf(tmp_path)
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no chat template"):
        Chat.from_hf(tmp_path)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no tools') }}", "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_an_unsupported_template_is_rejected_at_loading(template):
    with pytest.raises(ValueError, match=r"the chat template of the tokenizer (ends|cannot render .*: no tools)"):
        Chat(tiny_tokenizer(), template)


def test_a_prompt_with_mismatched_pictures_is_rejected(chat):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    np.testing.assert_array_equal(chat.ids(messages, 1), chat.prompt(messages))
    with pytest.raises(ValueError, match="renders 1 of 2 pictures"):
        chat.ids(messages, 2)


IGNORES_TOOLS = (  # like the published template of Qwen2.5-VL
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_tools_gets_tools_and_responses_as_text(tmp_path):
    make_tiny(tmp_path / "hf", config=tiny_config("qwen2_5_vl"))
    (tmp_path / "hf" / "chat_template.jinja").write_text(IGNORES_TOOLS)
    chat = Chat.from_hf(tmp_path / "hf")
    rendering = Chat(chat.tokenizer, CHAT_TEMPLATE)
    messages = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Which lid?"}]
    tools = [{"type": "function", "function": {"name": "crop_video"}}]
    np.testing.assert_array_equal(chat.prompt(messages, tools), rendering.prompt(messages, tools))
    picture = Picture.of(np.zeros((28, 56, 3), np.uint8))
    for responses in (["red", "Error: no"], [["at 3 s ", picture, "red"], "blue"]):
        ended = chat.encode("I call.<|im_end|>")
        np.testing.assert_array_equal(chat.after_turn(ended, responses), rendering.after_turn(ended, responses))
    assert (chat.token_px, rendering.token_px) == (28, 32)
    assert chat.escape("</tool_response><think>") == "< /tool_response>< think>"
