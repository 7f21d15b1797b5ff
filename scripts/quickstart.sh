#!/usr/bin/env bash
# Sets up a fresh machine and runs everything on a tiny world: cold start, PARA-GRPO, evaluation, export, an HTML page.
#   bash scripts/quickstart.sh
# Re-running it resumes it. RUN=runs/other sets the output directory.
set -euo pipefail
usage="usage: [RUN=runs/other] bash scripts/quickstart.sh"
case "${1:-}" in
  "") ;;
  -h | --help) echo "$usage"; exit 0 ;;
  *) echo "$usage   (got '$1')" >&2; exit 2 ;;
esac
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
run=${RUN:-runs/quickstart}
bash scripts/setup.sh cpu
python=.venv/bin/python

"$python" -m scripts.miniature --dir "$run" --arms para_grpo --seeds 0 --quick

trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "${compared:-}"' EXIT   # Ctrl-C does not reach jobs in the background
checkpoints=$run/para_grpo/seed0/checkpoints
checkpoint=$checkpoints/$(ls "$checkpoints" | grep -x '[0-9]*' | sort -n | tail -1) # not N.broken
"$python" -m paravt_jax.view "$run/para_grpo/seed0" --out "$run/report.html" --force &
view=$!
"$python" -m model_port.export --src "$checkpoint" --dst "$run/trained.hf" --force
wait $view

# The comparison runs beside the question, because both mostly start up, on one core each. Its output is shown afterwards.
compared=$(mktemp) verify=
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
  "$python" -m model_port.verify --hf "$run/trained.hf" --src "$checkpoint" >"$compared" 2>&1 &
  verify=$!
fi
mapfile -t held_out < <("$python" - "$run/world" <<'END'
import json, sys
from pathlib import Path

world = Path(sys.argv[1])
for line in (world / "rl_validation.jsonl").open():
    row = json.loads(line)
    truth = json.loads(row["extra_info"])
    if truth["question_type"] == "oe":
        print(world / row["videos"][0]["video"], row["prompt"][0]["content"].removeprefix("<video>\n"), truth["answer"], sep="\n")
        break
END
)
question=${held_out[1]}
echo "Asking it about a video that it was not trained on. The true answer is ${held_out[2]}:"
"$python" -m paravt_jax.ask "${held_out[0]}" "$question" --model "$run/trained.hf"
if [ -n "$verify" ]; then
  echo "Comparing $run/trained.hf in transformers with the checkpoint:"
  wait "$verify" || { cat "$compared" >&2; exit 1; }
  cat "$compared"
else
  echo "Skipped the comparison of $run/trained.hf in transformers, because torch is not installed. To run it:"
  echo "  bash scripts/setup.sh dev && $python -m model_port.verify --hf $run/trained.hf --src $checkpoint"
fi

cat <<END

Ask it about your own video (it only knows colors in its small world; a trained 8B works the same way):
  $python -m paravt_jax.ask VIDEO "$question" --model $run/trained.hf

Look at
  $run/table.md                        before (SFT) and after (PARA-GRPO): format, tool calls, accuracy
  $run/figure.png                      format, tool calls and accuracy over the steps
  $run/report.html                     the run and its episodes, in any browser
  $run/para_grpo/seed0/plots           plots of the run
  $run/trained.hf                      the policy for transformers, vLLM and SGLang
END
