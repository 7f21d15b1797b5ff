"""The miniature's policy: a tiny model of either family with the same minimal chat template."""

import tempfile
from pathlib import Path

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import DEFAULT_FAMILY, make_tiny, tiny_config
from scripts.miniature.world import FRAME_PX

MIN_PIXELS = 784

# A full tool schema would be half of every prompt.
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\ntool:' }}
    {%- for tool in tools %}
        {{- ' ' ~ tool.function.name }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
"""


def make_model(directory: Path, seed: int = 0, family: str = DEFAULT_FAMILY) -> None:
    """Writes the model atomically, unless it exists."""
    if directory.exists():
        return
    start, tools, remainder = CHAT_TEMPLATE.partition("{%- if tools %}\n")
    _, otherwise, end = remainder.partition("{%- elif system_first %}\n")
    assert tools and otherwise, "the chat template has changed"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=directory.parent) as folder:
        partial = Path(folder) / directory.name
        make_tiny(partial, seed, tiny_config(family), min_pixels=MIN_PIXELS, max_pixels=FRAME_PX**2)
        (partial / "chat_template.jinja").write_text(start + TOOLS + otherwise + end)
        partial.rename(directory)
