/* ---- the head: name and settings, first and last values, an evaluation's cells, a question's answer ---- */
const KINDS = { __proto__: null, training: "reinforcement learning", imitation: "cold start", evaluation: "evaluation", question: "question" };
const SCORERS = { __proto__: null, strict: "ours", official: "the benchmark's" };

const numDone = ({ n }) => n.answered + n.unanswered;
const progressOf = ({ about, cells }) => {
  const { steps_done: done, steps_planned: planned, kind } = about;
  if (kind === "question") return null;
  if (kind === "evaluation") {
    const there = cells.reduce((sum, cell) => sum + numDone(cell), 0);
    return h("span", {}, h("b", {}, plural(cells.length, "cell")), `, ${plural(there, "sample")} done`);
  }
  const inner = planned ? styled(h("i"), { width: `${clamp((100 * done) / planned, 0, 100)}%` }) : null;
  return [
    planned ? h("div", { class: "track", role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0, "aria-valuemax": planned, "aria-valuenow": done }, inner) : null,
    h("span", {}, h("b", {}, done.toLocaleString("en")), planned ? ` of ${planned.toLocaleString("en")} steps` : ` step${done === 1 ? "" : "s"}`),
  ];
};
const pairs = (entries) => h("dl", { class: "settings" }, entries.map(([key, text]) => h("div", { class: text.length > 44 ? "long" : null }, h("dt", {}, key), h("dd", {}, text))));
const folded = (title, ...children) => h("details", { class: "more" }, h("summary", {}, title), children);

const headOf = (run, place) => {
  const { about } = run;
  const facts = [...about.facts];
  if (about.commit) facts.push(["Commit", about.commit.replace(/^([0-9a-f]{12})[0-9a-f]+/, "$1")]);
  const packages = Object.entries(about.packages).map(([name, version]) => [name, String(version)]);
  const versions = [...(about.commit ? [["git commit", about.commit]] : []), ...packages];
  return h("div", { class: "of-run" },
    h("p", { class: "eyebrow" }, `paravt_jax · ${KINDS[about.kind]}`),
    h("h1", { class: about.name.length > 60 ? "long" : null, dir: "auto" }, comparing ? [runMark(place), " "] : null, about.name),
    h("div", { class: "progress" }, progressOf(run), h("span", {}, `as of ${data.made_at}`)),
    facts.length ? h("dl", { class: "facts" }, facts.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text)))) : null,
    (about.changes ?? []).map(([step, changed]) => folded(`${plural(changed.length, "setting")} changed after step ${step.toLocaleString("en")}`, pairs(changed))),
    about.settings.length ? folded(`All ${about.settings.length} settings`, pairs(about.settings)) : null,
    versions.length ? folded("Versions", pairs(versions)) : null);
};
const drawHead = () => {
  const head = document.getElementById("head");
  head.append(...runs.map(headOf));
  if (!comparing) return;
  const all = runs.map((run) => new Map(run.about.settings));
  const differ = [...all[0].keys()].filter((key) => all.every((own) => own.has(key)) && distinct(all.map((own) => own.get(key))).length > 1);
  head.append(folded(`${plural(differ.length, "setting")} differ`, pairs(differ.map((key) => [key, all.map((own, run) => `${RUN_NAMES[run]} ${own.get(key)}`).join(", ")]))));
};

const sparkline = (values) => {
  const points = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
  const sizes = points.map(([, value]) => value), low = Math.min(...sizes), high = Math.max(...sizes);
  if (points.length < 2 || low === high) return null;
  const path = points.map(([place, value], n) => `${n ? "L" : "M"}${((100 * place) / (values.length - 1)).toFixed(2)} ${(36 - (34 * (value - low)) / (high - low)).toFixed(2)}`).join("");
  return s("svg", { viewBox: "0 0 100 38", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("path", { d: path, fill: "none", stroke: "var(--c)", "stroke-width": 2, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }));
};
const symbolFoot = (item) => (item.name === item.key ? item.symbol.replace(/^[^_]*/, "") : item.symbol.includes("_") ? h("sub", {}, item.symbol.split("_")[1]) : null);
const headlineOf = (item, place, moved) => {
  const change = known(item.first) && known(item.last) ? item.last - item.first : null;
  return h("div", { class: `card headline c-${item.color}` },
    h("p", { class: "of" }, runMark(place), h("b", {}, item.symbol.split("_")[0], symbolFoot(item)), item.name === item.key ? null : item.name),
    h("p", { class: "value" }, short(item.last)),
    moved ? h("p", { class: "from" }, "from ", h("b", {}, short(item.first)), change === null ? null : change === 0 ? ", unchanged" : `, ${change > 0 ? "+" : ""}${short(change)}`) : null,
    sparkline(item.line),
    item.validation ? h("p", { class: "held" }, `validation ${item.validation.map(short).join(" → ")}`) : null);
};
const drawHeadlines = () => {
  const host = document.getElementById("headlines");
  runs.forEach((run, place) => {
    const { kind, steps_done: done } = run.about;
    if (kind === "question") return host.append(answerOf(run.answer));
    if (kind === "evaluation") return undefined;
    if (!done) return host.append(h("p", { class: "notice" }, runMark(place), " This run has not logged a step yet. Write the page again later."));
    if (!run.headlines.length) return undefined;
    const steps = run.headlines[0].num_steps, moved = run.figures.steps.length > 1;
    host.append(h("div", { class: "cards" }, run.headlines.map((item) => headlineOf(item, place, moved))));
    if (moved) host.append(h("p", { class: "lede after" }, steps === 1 ? "The last step, and the first." : `The mean of the last ${steps} steps, and of the first ${steps}.`));
    return undefined;
  });
};

const answerOf = (answer) => h("div", { class: "card answer" },
  h("h2", {}, "Answer"),
  h("p", { class: `text ${!answer.text ? "missing" : answer.text.length > 200 ? "long" : ""}`, dir: "auto" }, answer.text || "No answer"),
  h("dl", { class: "verdict" },
    h("div", {}, h("dt", {}, "Evidence"), h("dd", {}, answer.evidence.length ? answer.evidence.map(([video, start, end]) => h("span", { class: "window" }, `${video} ${clock(start)}–${clock(end)}`)) : "only the prompt")),
    Object.entries(answer.seconds).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, seconds(value))))));

/* An evaluation's cells: all scores are on one scale, each with its interval. */
const whisker = (scores) => {
  const [low, high] = scores.interval_95.map((share) => 100 * share), at = 100 * scores.score;
  const says = `${percent(scores.score)} %, 95 % interval ${percent(scores.interval_95[0])} to ${percent(scores.interval_95[1])}`;
  return h("div", { class: "whisker", role: "img", "aria-label": says, onmousemove: (event) => showTip(says, event), onmouseleave: hideTip },
    styled(h("i", { class: "range" }), { left: `${low}%`, width: `${high - low}%` }), styled(h("i", { class: "at" }), { left: `${at}%` }));
};
const missingOf = (cell) => Object.entries(cell.n.missing).map(([reason, count]) => `${count.toLocaleString("en")} ${reason}`).join(", ");
const groupsOf = (cell, scorer) => Object.entries(cell.scores[scorer].groups).map(([name, labels]) => h("div", {}, h("h4", {}, spelled(name)),
  h("table", { class: "groups" }, h("tbody", {}, Object.entries(labels).map(([label, found]) => h("tr", {}, h("th", { scope: "row" }, label), h("td", { class: "num" }, percent(found.score)), h("td", { class: "num soft" }, `of ${found.n}`)))))));
const cellName = (cell) => [cell.dispatch, known(cell.frame_budget) ? plural(cell.frame_budget, "frame") : "", known(cell.temperature) ? `temperature ${cell.temperature}` : ""].filter(Boolean).join(", ");
const cellRows = (cell, place) => {
  const title = [runMark(place), comparing ? " " : null, cellName(cell)];
  const about = [cell.split, cell.mode && spelled(cell.mode)].filter(Boolean).join(" · ");
  const scorers = Object.entries(cell.scores);
  const expected = cell.n.expected ?? cell.n.rows;
  const there = `${numDone(cell).toLocaleString("en")} ${known(expected) ? `of ${expected.toLocaleString("en")}` : "so far"}`;
  const head = (rowspan) => [h("th", { scope: "row", rowspan }, title, h("small", {}, about), cell.refused ? h("small", { class: "wrong", title: cell.refused }, "no score reported") : null), h("td", { class: "num", rowspan, "data-name": "samples" }, there, missingOf(cell) ? h("small", { class: "wrong" }, `missing: ${missingOf(cell)}`) : null, cell.n.unanswered ? h("small", {}, `${cell.n.unanswered} unanswered`) : null)];
  const tail = (rowspan) => [h("td", { class: "num", rowspan, "data-name": "κ" }, short(cell.metrics?.tool_calls_mean)), h("td", { class: "num", rowspan, "data-name": "f_τ" }, short(cell.metrics?.format_reward)), h("td", { class: "num", rowspan, "data-name": "parseable" }, short(cell.metrics?.parseable_frac))];
  if (!scorers.length) return [h("tr", {}, head(1), h("td", { colspan: 4, class: "soft" }, "scores appear when all samples are done"), tail(1))];
  return scorers.map(([scorer, scores], n) => h("tr", { class: n ? "again" : null }, n ? null : head(scorers.length),
    h("td", {}, SCORERS[scorer] ?? scorer), h("td", { class: "num", "data-name": "score, %" }, h("b", {}, percent(scores.score)), Object.entries(scores).filter(([name]) => name.includes("@")).map(([name, value]) => h("small", {}, `${name} ${percent(value)}`))),
    h("td", {}, whisker(scores)), h("td", { class: "num", "data-name": "missing as wrong, %" }, percent(scores.missing_as_wrong)), n ? null : tail(scorers.length)));
};
const cellDetails = (cell, place) => {
  const scorer = Object.keys(cell.scores)[0];
  if (!scorer) return null;
  const frames = `${cell.frames.min} to ${cell.frames.max} overview frames, ${cell.crop_frames.min} to ${cell.crop_frames.max} crop frames`;
  return folded([runMark(place), comparing ? " " : null, `${cellName(cell)}: certificate${Object.keys(cell.scores[scorer].groups).length ? " and groups" : ""}`],
    cell.refused ? h("p", { class: "notice" }, h("b", {}, "No score is reported"), `: ${cell.refused}`) : null,
    h("p", { class: "lede after" }, `${frames}. The interval is from 2,000 bootstrap resamples of videos.`),
    h("div", { class: "grouped" }, groupsOf(cell, scorer)), pairs(cell.provenance));
};
const drawCells = () => {
  const all = runs.flatMap((run, place) => run.cells.map((cell) => [cell, place]));
  const host = document.getElementById("cells");
  if (!all.length) {
    if (runs.some((run) => run.about.kind === "evaluation")) host.append(h("p", { class: "notice" }, "This evaluation has no samples yet. Write the page again later."));
    return;
  }
  const columns = ["", "samples", "rule", "score, %", "95 % interval, scale from 0 to 100", "missing as wrong, %", "κ", "f_τ", "parseable"];
  host.append(h("h2", {}, "Cells"), h("p", { class: "lede" }, "The score excludes missing samples; the column “missing as wrong” counts them as wrong."),
    h("div", { class: "card table" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, all.map((one) => cellRows(...one))))),
    ...all.map((one) => cellDetails(...one)).filter(known));
};
