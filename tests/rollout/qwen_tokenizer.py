"""The published Qwen tokenizer, rebuilt from the ranks in the package dashscope.

Tests need the real vocabulary's token boundaries: `</answer>` shares tokens with its neighbors, `<tool_call>` does not.
"""

import base64
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from on_use import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import FIRST_SHOWN_TOKEN, SPECIAL_TOKENS, tiny_tokenizer
from rollout.chat import Chat, byte_characters

CACHE = Path(__file__).parents[2] / ".cache" / "qwen_tokenizer.json"
# The pre-tokenizer of Qwen2's tokenizer.json.
REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer() -> Tokenizer:
    if CACHE.is_file():
        return Tokenizer.from_file(str(CACHE))
    ranks = _ranks()
    characters = byte_characters()
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocab = {text[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(ranks, text)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first_shown = SPECIAL_TOKENS.index(FIRST_SHOWN_TOKEN)
    for index, token in enumerate(SPECIAL_TOKENS):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=index < first_shown)])
    CACHE.parent.mkdir(exist_ok=True)
    partial = CACHE.with_suffix(f".{id(tokenizer)}")
    tokenizer.save(str(partial))
    partial.replace(CACHE)
    return tokenizer


TOKENIZERS = {"tiny": tiny_tokenizer, "qwen": qwen_tokenizer}


@cache
def chat_of(name: str) -> Chat:
    return Chat(TOKENIZERS[name](), CHAT_TEMPLATE)


def ids_of_template(chat: Chat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> np.ndarray:
    """Returns the ids of a whole dialogue that transformers renders."""
    render = transformers.utils.chat_template_utils.render_jinja_template
    (text,), _ = render([messages], tools, chat_template=CHAT_TEMPLATE)
    return chat.encode(text)


def _ranks() -> dict[bytes, int]:
    spec = importlib.util.find_spec("dashscope")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the package dashscope, whose data this reads, is missing: run bash scripts/setup.sh dev")
    lines = (Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken").read_text().split("\n")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _merges(ranks: dict[bytes, int], text: dict[bytes, str]) -> list[tuple[str, str]]:
    """Lists every pair of tokens that forms another token, ordered by its rank, then by the ranks of its parts."""
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], text[left], text[right]))
    return [(left, right) for *_, left, right in sorted(merges)]
