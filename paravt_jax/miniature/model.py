"""The policy of the miniature: the tiny Qwen3-VL, with a chat template that says no more than it must."""

import tempfile
from pathlib import Path

from model_port.chat_template import CHAT_TEMPLATE
from model_port.tiny import make_tiny
from paravt_jax.miniature.world import FRAME_PX

MIN_PIXELS = 784

# The schema of a tool would be half of every prompt.
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\ntool:' }}
    {%- for tool in tools %}
        {{- ' ' ~ tool.function.name }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
"""


def make_model(directory: Path, seed: int = 0) -> None:
    """Writes it where it is not yet, whole."""
    if directory.exists():
        return
    before, tools, rest = CHAT_TEMPLATE.partition("{%- if tools %}\n")
    _, otherwise, after = rest.partition("{%- elif system_first %}\n")
    assert tools and otherwise, "the chat template has changed"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=directory.parent) as folder:
        made = Path(folder) / directory.name
        make_tiny(made, seed, min_pixels=MIN_PIXELS, max_pixels=FRAME_PX**2)
        (made / "chat_template.jinja").write_text(before + TOOLS + otherwise + after)
        made.rename(directory)
