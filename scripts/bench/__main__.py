"""python -m scripts.bench NAME [options] [--json OUT], from the root of a clone"""

from model_port.cli import run_cli
from paravt_jax.bench.__main__ import run_bench

BENCHES = {
    "chaos": "fault injection: a trainer or a service on two real SGLang servers",
    "checkpoint": "a learner's state saved, and restored with and without comparing its checksums",
    "convert": "time and memory of model_port.convert and model_port.export, and of a plain copy",
    "decoders": "PyAV and decord: which returns the right frames of each container",
    "gpu_check": "one NVIDIA GPU in ten minutes: attention, an update, the same in torch, publishing weights",
    "hosts": "a run and a checkpoint on 1, 2 and 4 processes of this machine, and publishing to 1, 2 and 4 servers",
    "learner": "forward and forward+backward of the policy, and its update, compared with transformers in torch",
    "losses": "every loss and its gradient in float64, compared with plain numpy, verl and TRL",
    "packing": "the share of an update's token slots that hold tokens, for the frame budgets of a config",
    "sampler": "the sampler at several limits of the context, compared with transformers' generate",
    "soak": "the smoke run or a service for hours: memory, open files, threads and step time",
    "video": "frames of a video, decoded and cached, compared with qwen_vl_utils and decord",
}


def main() -> None:
    run_bench("scripts.bench", BENCHES)


if __name__ == "__main__":
    run_cli(main)
