"""Runs a sample by the release's protocol, and records it for the certificate."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paravt_jax.config import EvaluationConfig
from paravt_jax.data.splits import PublicSplit, Sample
from paravt_jax.evaluation.release.dialogue import ReleaseAgent, ReleaseDialogue
from paravt_jax.evaluation.release.questions import LETTERS, RELEASE_SPLITS, ReleaseQuestion, question_of
from paravt_jax.evaluation.release.texts import ReleaseTexts, read_texts
from paravt_jax.evaluation.sample_log import Record, sample_record
from paravt_jax.rewards.official import OFFICIAL, reply_of
from paravt_jax.rewards.release import RELEASE
from paravt_jax.rl.episodes import REASONS, reason_of
from rollout.video.errors import VideoError


def release_texts(settings: EvaluationConfig, split: str) -> ReleaseTexts:
    """The texts of eval.release_texts. Raises ValueError if this split and mode cannot be evaluated with them."""
    if split not in RELEASE_SPLITS:
        raise ValueError(
            f"eval.protocol=release has no questions for data.split={split or '(empty)'}; use one of "
            f"{', '.join(RELEASE_SPLITS)}"
        )
    texts = read_texts(settings.release_texts)
    texts.check_mode("eval.mode", settings.mode_of(split))
    return texts


@dataclass(frozen=True)
class ReleaseRecorder:
    split: PublicSplit
    agent: ReleaseAgent

    async def record(self, key: str, sample: Sample) -> Record:
        dialogue = ReleaseDialogue()
        try:
            question = self._question(sample)
            await self.agent.run(question, dialogue)
        except Exception as error:  # any failure only makes this sample missing
            episode = _missing(error, dialogue)
        else:
            episode = self._scored(question, sample, dialogue)
        about = {"id": sample.prompt.id, "turns": [asdict(turn) for turn in dialogue.turns], "sent": [dialogue.sent]}
        about |= {"num_prompt_tokens": dialogue.num_prompt_tokens, "seconds": round(dialogue.seconds, 4)}
        return sample_record(key, sample, "", [about | episode])

    def _question(self, sample: Sample) -> ReleaseQuestion:
        if not Path(sample.prompt.videos[0]).is_file():
            raise VideoError(f"the video does not exist: {sample.prompt.videos[0]}")
        return question_of(self.split.name, sample, self.agent.mode, self.agent.texts)

    def _scored(self, question: ReleaseQuestion, sample: Sample, dialogue: ReleaseDialogue) -> Record:
        score = question.score(dialogue.final) if not dialogue.malformed else 0.0
        official = self.split.official_score(reply_of([dialogue.final]), sample)
        prediction = question.prediction(dialogue.final)
        return {
            "missing": False,
            "problem": "",
            "malformed": dialogue.malformed,
            "prediction": prediction,
            "answered": bool(prediction) and (not question.is_choice or prediction in LETTERS),
            "scores": {RELEASE: score, OFFICIAL: official},
            "num_frames": dialogue.num_frames,
            "num_crop_frames": sum(crop["num_frames"] for crop in dialogue.crops),
            "metrics": _metrics(dialogue, score),
        }


def _missing(error: Exception, dialogue: ReleaseDialogue) -> Record:
    reason = reason_of(error)
    return {
        "missing": True,
        "problem": f"{type(error).__name__}: {error}",
        "reason": reason,
        "num_lost": dialogue.num_sampled_tokens,
        "metrics": _metrics(dialogue, 0.0, reason if reason in REASONS else "engine"),
    }


def _metrics(dialogue: ReleaseDialogue, score: float, missing: str = "") -> Mapping[str, Any]:
    """An episode's metrics. This protocol has no format reward."""
    executed = sum(crop["num_frames"] > 0 for crop in dialogue.crops)
    return {
        "num_episodes": float(not missing),
        "num_missing": float(bool(missing)),
        "reward_mean": score,
        "accuracy_mean": score,
        "tool_calls_mean": float(executed),
        "failed_calls_mean": float(len(dialogue.crops) - executed),
        "tool_use_frac": float(executed > 0),
        "turns_mean": float(len(dialogue.turns)),
        "sampled_tokens_mean": float(dialogue.num_sampled_tokens),
        "cut_off_frac": float(any(turn.finish == "length" for turn in dialogue.turns)),
        **{f"missing_{reason}": float(reason == missing) for reason in REASONS},
    }
