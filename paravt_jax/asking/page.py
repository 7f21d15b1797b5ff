"""The page of one question: that of a run whose only episode it is."""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from paravt_jax.asking.answerer import Answerer, Reply
from paravt_jax.run.log import EPISODES_DIR
from paravt_jax.view.episodes import TOKENIZER_FILE
from paravt_jax.view.page import make_page


def page_of(answer: Reply, answerer: Answerer) -> bytes:
    agent = answerer.agent
    settings = {"config": {"rollout": asdict(agent.config)}}
    record = {"step": 0, "missing": False, **answer.episode.to_record()}
    with TemporaryDirectory() as made:
        run_dir = Path(made) / "question"
        for name, text in (
            ("config.json", json.dumps(settings)),
            (TOKENIZER_FILE, agent.chat.tokenizer.to_str()),
            (f"{EPISODES_DIR}/0.jsonl", json.dumps(record)),
        ):
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (run_dir / name).write_text(text)
        return make_page(run_dir, max_episodes=1)
