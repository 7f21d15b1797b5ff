"""Runs one stage in this process and prints each line as JSON as soon as it is measured.

python -m paravt_jax.check.stages STAGE TARGET
"""

import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

from model_port.cli import run_cli
from paravt_jax.check.report import Measured
from paravt_jax.check.target import Target
from paravt_jax.run.process import peak_gib

STAGES = {  # name: module, function and description
    "files": ("files", "files", "make or read the model; tokenizer, template and processor against transformers'"),
    "weights": ("weights", "weights", "convert and export; the checksum of every tensor"),
    "logits": ("logits", "logits", "against transformers' in float32 and bfloat16, with every form of attention"),
    "gradient": ("gradient", "gradient", "kernels of three layers of both towers against transformers'"),
    "step": ("step", "step", "two short steps by the recipe, of RL or SFT"),
    "round-trip": ("round_trip", "round_trip", "export; greedy ids of our sampler, transformers, SGLang; parity gate"),
    "video": ("media", "video", "read videos within the deadlines of a run"),
    "data": ("media", "data", "count bad rows and missing files"),
}


def main() -> None:
    name, target = sys.argv[1:3]
    module, function, _ = STAGES[name]
    run: Any = getattr(importlib.import_module(f"paravt_jax.check.{module}"), function)
    for line in run(Target.from_json(target)):
        print(json.dumps(asdict(line) if isinstance(line, Measured) else line), flush=True)
    if (jax := sys.modules.get("jax")) is not None:
        device = jax.local_devices()[0]
        peak = peak_gib([device])
        facts = {"device": device.device_kind} | ({} if peak is None else {"peak_gib": peak})
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    run_cli(main)
