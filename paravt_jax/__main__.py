"""Runs a command by name: `paravt NAME …`, or `python -m paravt_jax NAME …`. Without a name it lists the commands."""

import importlib
import sys
from difflib import get_close_matches
from importlib.metadata import version
from typing import NoReturn

from model_port.cli import exit_on_interrupt, raise_on_interrupt, run_cli

COMMANDS = {  # name: the module to run and a description
    "check": ("paravt_jax.check", "checks whether everything works on this machine, at a model's size"),
    "train": ("paravt_jax.train", "trains a policy with PARA-GRPO; --plan estimates memory and seconds per step"),
    "sft": ("paravt_jax.sft", "trains a policy on traces, the cold start"),
    "eval": ("paravt_jax.eval", "evaluates a policy on held-out prompts"),
    "ask": ("paravt_jax.ask", "answers a question about a video and lists the crops it used"),
    "serve": ("paravt_jax.serve", "serves a policy and its sub-agents behind OpenAI's API"),
    "view": ("paravt_jax.view", "makes one offline HTML page of a run"),
    "configs": ("paravt_jax.config.recipes", "lists the configs of the package and copies them"),
    "checkpoint": ("paravt_jax.run.checkpoint", "verifies the checkpoints of a run: verify"),
    "plots": ("paravt_jax.run.plots", "plots the metrics of a run"),
    "data": ("paravt_jax.data", "prepares and inspects data: materialize, inspect, split"),
    "prompts": ("paravt_jax.prompts", "imports prompts from the released repository: import-release"),
    "bench": ("paravt_jax.bench", "benchmarks: mesh, rollout; more from a clone with python -m scripts.bench"),
    "tiny": ("model_port.tiny", "writes a tiny random model in Hugging Face format"),
    "convert": ("model_port.convert", "converts a Hugging Face model to a checkpoint"),
    "export": ("model_port.export", "writes a checkpoint as a Hugging Face directory, or to the hub"),
    "push": ("model_port.push", "uploads an exported model to the hub"),
    "verify": ("model_port.verify", "compares an export's logits in transformers with ours"),
    "sglang": ("rollout.serve", "serves a model with SGLang, for rollouts"),
    "gate": ("paravt_jax.sampling.score", "compares the log-probs of SGLang servers with the learner's"),
}


def overview() -> str:
    lines = [f"  {name:<10}  {module:<25}  {clause}" for name, (module, clause) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: paravt COMMAND [options]",
            "",
            *lines,
            "",
            "paravt COMMAND --help lists its options; python -m with the second column runs the same command.",
        ]
    )


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return
    if name == "--version":
        print(f"paravt_jax {version('paravt_jax')}")
        return
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all"
        raise ValueError(f"{name} is not a command ({hint})")
    sys.argv = [f"paravt {name}", *arguments]  # the program name in the parser's messages
    exit_on_interrupt()
    module = importlib.import_module(COMMANDS[name][0])
    if hasattr(module, "__path__"):  # packages define their command in __main__
        module = importlib.import_module(f"{module.__name__}.__main__")
    raise_on_interrupt()
    module.main()


def run() -> NoReturn:
    run_cli(main)


if __name__ == "__main__":
    run()
