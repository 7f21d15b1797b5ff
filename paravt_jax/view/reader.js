/* ---- one episode ---- */
const TERM_COLORS = { __proto__: null, accuracy: "blue", base: "red", anchor: "pink", think_first: "orange", balanced: "sky", tool: "green" };
const TERM_NAMES = { __proto__: null, think_first: "think first" };
const RESULTS = { __proto__: null, right: "right", partly: "partly right", wrong: "wrong", missing: "missing" };
const ENDINGS = { __proto__: null, done: "finished", length: "cut off, turn too long", context: "context full", abort: "aborted" };
const NARROW_CHARS = 24; // shorter credits are highlighted, like tags
const colorOf = (term) => TERM_COLORS[term] ?? "neutral"; // for plugins
const termName = (term) => TERM_NAMES[term] ?? spelled(term);
let byAdvantage = false; // whether advantage colors the text, instead of credits

const read = (episode, bar) => {
  const root = h("article", { class: "card episode" });
  const numbers = new Map();
  allCalls(episode).forEach((call, n) => numbers.set(call, n + 1));
  const [stem, ...options] = episode.question.split("\n");
  const asked = runs[0].about.kind === "question";
  root.classList.toggle("by-advantage", byAdvantage && episode.advantages.length > 0);
  root.append(...[
    asked ? null : bar,
    asked ? null : h("h3", {}, stem || h("span", { class: "missing" }, "Question not recorded")),
    options.length && !asked ? h("p", { class: "options" }, options.join("\n")) : null,
    verdict(episode), missing(episode), film(root, episode, numbers), waterfall(episode, numbers), coloring(root, episode),
    episode.turns.length || episode.reward ? h("div", { class: episode.reward || episode.advantage ? "reading" : "reading alone" }, h("div", {}, episode.turns.map((turn, n) => readTurn(root, episode, turn, n, numbers))), aside(root, episode)) : null,
  ].filter(known));
  return root;
};

const fact = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
const verdict = (episode) => {
  const { result } = episode, prediction = episode.reward ? episode.reward.prediction : undefined;
  const scores = Object.entries(episode.scores ?? {}).filter(([scorer]) => scorer !== "strict");
  return h("dl", { class: "verdict" },
    episode.answer ? fact("True answer", episode.answer) : null,
    episode.reward ? fact("Prediction", prediction ?? h("small", {}, "none"), " ", h("span", { class: result }, RESULTS[result])) : result === "missing" ? fact("Prediction", h("span", { class: "missing" }, "missing")) : null,
    scores.map(([scorer, score]) => fact(`By ${SCORERS[scorer] ?? scorer}`, short(score))),
    episode.frame_budget ? fact("Frame budget K", String(episode.frame_budget), h("small", {}, episode.frame_budget === 1 ? " frame" : " frames")) : null,
    episode.finish ? fact("Finish", ENDINGS[episode.finish] ?? episode.finish, h("small", {}, episode.seconds ? ` after ${seconds(episode.seconds)}` : "")) : null,
    Object.entries(episode.groups).map(([name, labels]) => fact(spelled(name), labels.join(", "))));
};
const missing = (episode) => {
  if (!episode.missing && !episode.problem) return null;
  const uncounted = episode.missing ? ". It has no effect on the policy." : "";
  return h("p", { class: "notice" }, h("b", {}, episode.missing ? "This episode is missing" : "Note"), `: ${episode.problem || "no reason recorded"}${uncounted}`);
};

const coloring = (root, episode) => {
  if (!episode.advantages.length) return null;
  const most = Math.max(...episode.advantages.map(Math.abs));
  const choice = (label, on) => h("button", {
    type: "button", "aria-pressed": byAdvantage === on, onclick: (event) => {
      byAdvantage = on;
      for (const other of document.querySelectorAll(".episode")) other.classList.toggle("by-advantage", on);
      for (const other of event.target.parentElement.children) other.setAttribute("aria-pressed", other === event.target);
    } }, label);
  return h("div", { class: "coloring" }, h("span", { role: "group", "aria-label": "Color the text by" }, choice("credits", false), choice("advantage", true)),
    h("span", { class: "scale" }, h("i", { class: "less" }), `${number(-most)} less likely`, h("i", { class: "more" }), `more likely ${signed(most)}`));
};
const advantageOf = (episode, place) => {
  const value = episode.advantages[place], most = Math.max(...episode.advantages.map(Math.abs));
  return { class: value > 0 ? "gained" : "lost", weight: `${Math.round(12 + (48 * Math.abs(value)) / most)}%`, says: `advantage ${signed(value)}` };
};
const creditLine = (credit) => `${spelled(credit.name)}: ${signed(credit.value)} of ${termName(credit.term)}`;
const creditSizes = (turn) => { // characters of each
  const sizes = new Map();
  for (const piece of turn.pieces) for (const credit of piece.credits ?? []) sizes.set(credit, (sizes.get(credit) ?? 0) + piece.text.length + (piece.left_out ?? 0));
  return sizes;
};
const readPiece = (episode, turn, piece, sizes, numbers) => {
  if (piece.left_out) return h("span", { class: "cut" }, `${piece.left_out.toLocaleString("en")} characters left out`);
  const credits = (piece.credits ?? []).slice().sort((one, other) => sizes.get(one) - sizes.get(other));
  const classes = [], says = [];
  if ("forced" in piece) { classes.push("forced"); says.push("forced, not sampled"); }
  if ("tag" in piece) classes.push("tag");
  if ("call" in piece) classes.push("call", `call-${numbers.get(turn.calls[piece.call])}`);
  if (credits.length) {
    classes.push("credit", `c-${colorOf(episode.credits[credits[0]].term)}`, ...credits.map((credit) => `credit-${credit}`));
    if ("tag" in piece || sizes.get(credits[0]) <= NARROW_CHARS) classes.push("narrow");
    says.push(...credits.map((credit) => creditLine(episode.credits[credit])));
  }
  const advantage = "advantage" in piece ? advantageOf(episode, piece.advantage) : null;
  if (advantage) { classes.push(advantage.class); says.push(advantage.says); }
  const spoken = says.join("\n");
  const span = h("span", { class: classes.join(" "), ...(spoken ? { onmousemove: (event) => showTip(spoken, event), onmouseleave: hideTip } : {}) }, piece.text);
  if (advantage) span.style.setProperty("--w", advantage.weight);
  return span;
};
const turnEnd = (episode, turn) => {
  if (!known(turn.end_advantage)) return null;
  const advantage = advantageOf(episode, turn.end_advantage);
  const span = h("span", { class: `turn-end ${advantage.class}`, onmousemove: (event) => showTip(`${advantage.says}, of the end-of-turn token`, event), onmouseleave: hideTip }, "end of turn");
  span.style.setProperty("--w", advantage.weight);
  return span;
};
const readTurn = (root, episode, turn, n, numbers) => {
  const sizes = creditSizes(turn), parts = [];
  if (turn.num_sampled) parts.push(`${plural(turn.num_sampled, "token")} ${episode.reward || known(turn.latency_s) ? "sampled" : "imitated"}`);
  if (turn.mean_logp) parts.push(`mean log-prob ${number(turn.mean_logp)}`);
  if (turn.versions.length && turn.mean_logp) parts.push(`policy version ${turn.versions.join(", ")}`);
  if (turn.latency_s) parts.push(seconds(turn.latency_s));
  if (turn.finish && turn.finish !== "stop") parts.push(turn.finish === "length" ? "cut off" : turn.finish);
  return h("section", { class: "turn" }, h("header", {}, h("h4", {}, `Turn ${n + 1}`), h("span", {}, parts.join(" · "))),
    h("div", { class: "said-text", dir: "auto" }, turn.pieces.map((piece) => readPiece(episode, turn, piece, sizes, numbers)), turnEnd(episode, turn)),
    turn.calls.length ? h("div", { class: "calls" }, turn.calls.map((call) => card(root, call, numbers.get(call)))) : null,
    turn.told ? h("div", { class: "told" }, h("h4", {}, "Environment message"), h("p", {}, turn.told)) : null);
};
const card = (root, call, n) => {
  const seen = [], name = `.call-${n}`;
  if (call.num_frames) seen.push(plural(call.num_frames, "frame"));
  if (call.num_tokens) seen.push(plural(call.num_tokens, "token"));
  if (call.latency_s) seen.push(seconds(call.latency_s));
  const told = !call.problem || call.response.includes(call.problem.replace(/^\w+: /, ""));
  const shots = shotsOf(call).map(shot), drawn = call.drawn.map((content) => h("span", { class: "shot" }, image(content, "")));
  return h("div", { class: `callcard c-${colorOfCall(call)} call-${n}`, onmouseenter: () => light(root, name, true), onmouseleave: () => light(root, name, false) },
    h("div", { class: "top" }, `${n} · ${looked(call, "–")}`, ["ok", "imitated"].includes(call.outcome) ? null : h("span", { class: "wrong" }, spelled(call.outcome)), h("em", {}, seen.join(" · "))),
    shots.length + drawn.length ? h("div", { class: "album" }, shots, drawn) : null,
    call.response ? h("p", {}, call.response) : null, told ? null : h("p", { class: "problem" }, call.problem));
};

const aside = (root, episode) => {
  if (!episode.reward && !episode.advantage) return null;
  return h("aside", { class: "aside", "aria-label": "Reward" }, episode.reward ? rewardTerms(root, episode) : null, episode.advantage ? advantages(episode.advantage) : null);
};
const highlight = (root, credit) => {
  root.classList.toggle("lit", credit !== null);
  for (const span of root.querySelectorAll(".said-text .on")) span.classList.remove("on");
  if (credit !== null) for (const span of root.querySelectorAll(`.said-text .credit-${credit}`)) span.classList.add("on");
};
const rewardTerms = (root, episode) => {
  const { reward } = episode, host = h("div", { class: "terms" });
  let pinned = null;
  const chip = (credit, n) => h("button", {
    type: "button", "aria-pressed": "false",
    onmouseenter: () => highlight(root, n), onmouseleave: () => highlight(root, pinned), onfocus: () => highlight(root, n), onblur: () => highlight(root, pinned),
    onclick: (event) => {
      pinned = pinned === n ? null : n;
      for (const other of host.querySelectorAll(".credits button")) other.setAttribute("aria-pressed", other === event.target && pinned === n);
      highlight(root, pinned);
    },
  }, `${spelled(credit.name)} ${signed(credit.value)}`);
  const chips = (term) => {
    const own = episode.credits.map((credit, n) => [credit, n]).filter(([credit]) => credit.term === term);
    return own.length ? h("div", { class: `credits c-${colorOf(term)}` }, own.map((one) => chip(...one))) : null;
  };
  const weighted = (name, value) => [fixed(value), ...((episode.weights[name] ?? 1) === 1 ? [] : [number(episode.weights[name])])].join(" × ");
  const row = (name, value, kind, term, bound = "") => [h("div", { class: `term ${kind} ${term ? `c-${colorOf(term)}` : ""}` }, h("span", {}, term ? h("i") : null, name, bound), h("span", { class: "num" }, weighted(name, value))), term ? chips(term) : null];
  return fill(host, {}, [h("h4", {}, "Reward"),
    row("accuracy", reward.accuracy, "", "accuracy"), row("format", reward.format, "", null, ", at most 1"), row("base", reward.base, "sub", "base"), row("anchor", reward.anchor, "sub", "anchor"),
    row("think first", reward.think_first, "sub", "think_first"), row("balanced", reward.balanced, "sub", "balanced"), row("tool", reward.tool, "", "tool"),
    episode.own.map((term) => row(spelled(term.name), term.weight * term.value, "", term.name)), row("total", reward.total, "total", null),
    episode.credits.length ? h("p", { class: "hint" }, "Point at a credit to highlight its characters; click to keep the highlight.") : null]);
};
const advantages = (advantage) => {
  const row = (name, value) => h("div", { class: "term" }, h("span", {}, name), h("span", { class: "num" }, typeof value === "number" ? signed(+value.toFixed(3)) : "–"));
  return h("div", { class: "terms" }, h("h4", {}, "Advantage"), row("all tokens", advantage.sequence), row("anchor tags", advantage.anchor),
    Object.entries(advantage.properties ?? {}).map(([name, value]) => row(`${spelled(name)} tokens`, value)),
    advantage.keep ? null : h("p", { class: "hint" }, "Not trained on."));
};
