"""A fake server whose responses transformers computes, independently of the learner, correctly or with a fault."""

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from fake_server import FakeServer, good_answer
from on_use import torch, transformers
from PIL import Image

from model_port.processing import VisionContract, expand_placeholders, process_images
from rollout.chat import Chat

CONTEXT_TOKENS = 4096


class TorchServer(FakeServer):
    """A server that samples with transformers; `change` injects a fault into the ids and pictures."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        change: Callable[[list[int], list[np.ndarray]], tuple[list[int], list[np.ndarray]]] = lambda *asked: asked,
    ):
        super().__init__()
        self.dtype, self.change = dtype, change
        policy: Any = transformers.Qwen3VLForConditionalGeneration
        self.policy = policy.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.contract = VisionContract.from_hf(model)
        self._visual_ids = sorted(Chat.from_hf(model).visual_ids)
        self._computing = asyncio.Lock()

    async def _answer(self, request: web.Request, passed_on: Any = None) -> web.StreamResponse:
        if request.path == "/server_info":
            return web.json_response({"dtype": self.dtype, "context_length": CONTEXT_TOKENS})
        return await super()._answer(request, passed_on)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        async with self._computing:
            return web.json_response(await asyncio.to_thread(self._without_gradients, body))

    def _without_gradients(self, body: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            return self._computed(body)

    def _computed(self, body: dict[str, Any]) -> dict[str, Any]:
        pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in body.get("image_data", [])]
        asked = self._expanded(body["input_ids"], pictures)
        ids, shown = self.change(body["input_ids"], pictures)
        inputs = self._inputs(self._expanded(ids, shown), shown)
        sampling, num_before = body["sampling_params"], inputs["input_ids"].shape[1]
        torch.manual_seed(self.requests["/generate"])
        found = self.policy.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            logits_processor=[lambda _, logits: self._without_picture(logits) / sampling["temperature"]],
            max_new_tokens=sampling["max_new_tokens"],
            eos_token_id=sampling["stop_token_ids"] or None,
            pad_token_id=0,
        )
        whole = self.policy(**self._inputs(found[0].tolist(), shown)).logits[0].float() / sampling["temperature"]
        logp = torch.log_softmax(whole[:-1], -1).gather(1, found[0, 1:, None])[:, 0].tolist()
        sampled = found[0, num_before:].tolist()
        answer = good_answer(sampled, self.version) | {"prompt_token_ids": asked.tolist()}
        scores = zip([0.0, *logp], found[0].tolist(), strict=True)
        listed = [[score, token, None] for score, token in scores]
        prompt = listed[num_before - len(asked) : num_before] if num_before >= len(asked) else listed[:num_before]
        answer["meta_info"] |= {"input_token_logprobs": prompt, "output_token_logprobs": listed[num_before:]}
        return answer

    def _without_picture(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Prevents sampling of image placeholders, which cannot be scored without an image."""
        logits[:, self._visual_ids] = -torch.inf
        return logits

    def _expanded(self, ids: list[int], pictures: list[np.ndarray]) -> np.ndarray:
        counts = [picture.shape[0] * picture.shape[1] // self.contract.unit_px**2 for picture in pictures]
        return expand_placeholders(np.array(ids), counts, self.policy.config.image_token_id)

    def _inputs(self, ids: Any, pictures: list[np.ndarray]) -> "dict[str, torch.Tensor]":
        tokens = torch.tensor(np.asarray(ids))[None]
        kinds = (tokens == self.policy.config.image_token_id).int()
        patches, grids = process_images(pictures, self.contract)
        media = {
            "pixel_values": torch.from_numpy(patches).to(self.policy.dtype),
            "image_grid_thw": torch.from_numpy(grids),
        }
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": kinds, **media}
