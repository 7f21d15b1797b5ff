"""Checks before the first sample that an endpoint answers, accepts the key, serves the model and takes pictures."""

from pathlib import Path
from typing import Any

import numpy as np

from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import ContentFiltered, EmptyChoice, EndpointError, ModelNotServed
from rollout.endpoint.words import image_part, video_part
from rollout.picture import Picture

PROBE_SIDE_PX = 224  # a multiple of the merged patch sides of Qwen2.5-VL and Qwen3-VL
PROBE_TOKENS = 16
PROBE_DEADLINE_S = 180.0  # the server may compile kernels for its first picture
MAX_LISTED = 10


async def check_endpoint(client: EndpointClient, temperature: float) -> None:
    """Checks all servers. Raises an EndpointError that describes the first problem in one sentence."""
    for url, models in (await client.models()).items():
        if models and not any(name == client.model or name.endswith(f"/{client.model}") for name in models):
            others = ", ".join(models[:MAX_LISTED]) + (", …" if len(models) > MAX_LISTED else "")
            raise ModelNotServed(f"{url} does not serve engine.model={client.model}; it serves {others}")
    picture = Picture.of(np.full((PROBE_SIDE_PX, PROBE_SIDE_PX, 3), 128, np.uint8))
    await _send_probe(client, image_part(picture.jpeg_base64), temperature)


async def check_video(client: EndpointClient, video: Path, temperature: float) -> None:
    """Raises an EndpointError if the endpoint cannot read and decode this video file."""
    try:
        await _send_probe(client, video_part(video), temperature)
    except EndpointError as problem:
        raise type(problem)(
            f"{problem}; eval.channel=video_url needs a server that can read {video} and decode it; set "
            f"eval.channel=image_url to send frames"
        ) from None


async def _send_probe(client: EndpointClient, part: dict[str, Any], temperature: float) -> None:
    parts = [part, {"type": "text", "text": "What is shown?"}]
    try:
        await client.complete(
            [{"role": "user", "content": parts}],
            max_tokens=PROBE_TOKENS,
            temperature=temperature,
            deadline_s=PROBE_DEADLINE_S,
        )
    except (ContentFiltered, EmptyChoice):
        """The endpoint has read the part; its reply does not matter."""
