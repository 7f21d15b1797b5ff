/* ---- the list of episodes: filtered, only visible rows are built, one episode is open at a time ---- */
const ROW_PX = 58, MARGIN_ROWS = 8;
const TYPES = { __proto__: null, mcq: "multiple choice", tvg: "grounding", oe: "open-ended" };
const CALLED = { __proto__: null, ok: "all succeeded", failed: "some failed", none: "none" };
const SIGNS = { __proto__: null, right: "✓", partly: "◐", wrong: "✗", missing: "–", "": "·" };
const NOUN = runs[0].about.kind === "imitation" ? "sample" : "episode";
const controls = {};
const listed = h("div", { class: "rows", role: "presentation" }), count = h("p", { class: "count", role: "status" });
const box = h("div", { class: "scroll", role: "listbox", tabindex: 0, "aria-label": "Episodes" }, listed);
const reader = h("div", { class: "reader" });
let texts = null, current = null, visibleOnes = [];

const episodeAt = (place) => {
  texts ??= document.getElementById("records").textContent.split("\n");
  return Object.assign(parsed(texts[place]), { result: rows[place].result });
};
const grouped = (of) => { // row indices by a field
  const groups = new Map();
  rows.forEach((row, place) => {
    if (!groups.has(of(row))) groups.set(of(row), []);
    groups.get(of(row)).push(place);
  });
  return groups;
};
const ofPrompt = grouped((row) => row.prompt), members = [];
for (const places of grouped((row) => JSON.stringify([row.run, row.prompt, row.step, row.cell])).values()) places.forEach((place, n) => { members[place] = n; });
const partnersOf = (place) => { // same prompt in other runs, closest first
  const row = rows[place];
  const distance = (other) => [rows[other].cell !== row.cell, Math.abs((rows[other].step ?? 0) - (row.step ?? 0)), Math.abs(members[other] - members[place])];
  const nearer = (one, other) => { const [a, b] = [distance(one), distance(other)]; return a[0] - b[0] || a[1] - b[1] || a[2] - b[2]; };
  return ofPrompt.get(row.prompt).filter((other) => rows[other].run !== row.run).sort(nearer);
};

const AS_IT_IS = { __proto__: null };
const FILTERS = { // name -> [label, value of a row, names of values]
  run: ["Run", (row) => RUN_NAMES[row.run], AS_IT_IS], split: ["Split", (row) => row.split, AS_IT_IS], cell: ["Cell", (row) => row.cell, AS_IT_IS], step: ["Step", (row) => row.step, AS_IT_IS],
  type: ["Question", (row) => row.type, TYPES], result: ["Answer", (row) => row.result, RESULTS], called: ["Calls", (row) => row.called, CALLED], outcome: ["Finish", (row) => row.outcome, ENDINGS],
};
const byValue = (one, other) => (typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
const makeFilter = (name) => {
  const [label, of, told] = FILTERS[name];
  const values = distinct(rows.map(of)).filter((value) => known(value) && value !== "").sort(byValue);
  controls[name] = h("select", { onchange: () => refresh() }, h("option", { value: "" }, "any"), values.map((value) => h("option", { value }, told[value] ?? value)));
  return values.length > 1 ? h("label", {}, label, controls[name]) : null;
};
const questionFilter = () => {
  controls.words = h("input", { type: "search", placeholder: "any", oninput: () => refresh() });
  return h("label", {}, "Question contains", controls.words);
};
const makeOrder = (scored) => {
  const orders = { "": "original", ...(scored ? { high: "highest reward", low: "lowest reward" } : {}), calls: "most calls", ...(comparing ? { apart: "largest difference" } : {}) };
  controls.order = h("select", { onchange: () => refresh() }, Object.entries(orders).map(([value, text]) => h("option", { value }, text)));
  return h("label", {}, "Order", controls.order);
};
const filters = () => {
  const scored = rows.some((row) => known(row.total));
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, Object.keys(FILTERS).map(makeFilter),
    questionFilter(), makeOrder(scored),
    h("button", { type: "button", class: "plain", onclick: () => { clear(); refresh(); } }, "Clear"));
};
const clear = () => { for (const control of Object.values(controls)) control.value = ""; };
const value = (name) => controls[name]?.value ?? "";
const apart = (place) => Math.max(0, ...partnersOf(place).slice(0, 1).map((other) => Math.abs((rows[other].total ?? 0) - (rows[place].total ?? 0))));
const ORDERS = {
  high: (row) => -(row.total ?? -Infinity), low: (row) => row.total ?? Infinity, calls: (row) => -row.calls, apart: (row, place) => -apart(place),
};
const matching = () => {
  const wanted = Object.entries(FILTERS).map(([name, [, of]]) => [value(name), of]).filter(([text]) => text);
  const words = value("words").toLowerCase();
  return rows.map((_, place) => place).filter((place) => wanted.every(([text, of]) => String(of(rows[place])) === text) && rows[place].question.toLowerCase().includes(words));
};
const refresh = () => {
  const order = ORDERS[value("order")];
  visibleOnes = matching();
  if (order) {
    const keys = new Map(visibleOnes.map((place) => [place, order(rows[place], place)]));
    visibleOnes.sort((one, other) => keys.get(one) - keys.get(other) || one - other);
  }
  count.textContent = visibleOnes.length === rows.length ? plural(rows.length, NOUN) : `${visibleOnes.length.toLocaleString("en")} of ${plural(rows.length, NOUN)}`;
  listed.style.height = `${ROW_PX * visibleOnes.length}px`;
  box.scrollTop = 0;
  if (!visibleOnes.length) { drawRows(); reader.replaceChildren(h("article", { class: "card episode" }, h("p", { class: "lede" }, "No episode matches."))); return; }
  open(visibleOnes.includes(current) ? current : visibleOnes[0], false);
};

const drawRows = () => {
  const first = clamp(Math.floor(box.scrollTop / ROW_PX) - MARGIN_ROWS, 0, visibleOnes.length);
  const shown = visibleOnes.slice(first, first + Math.ceil(box.clientHeight / ROW_PX) + 2 * MARGIN_ROWS);
  listed.replaceChildren(...shown.map((place, n) => styled(item(place, first + n), { top: `${ROW_PX * (first + n)}px` })));
  box.setAttribute("aria-activedescendant", current === null ? "" : `row-${current}`);
};
const item = (place, at) => {
  const row = rows[place], scored = known(row.total) && !known(row.cell);
  return h("div", {
    id: `row-${place}`, class: "row", role: "option", "aria-selected": place === current, "aria-posinset": at + 1, "aria-setsize": visibleOnes.length, onclick: () => open(place),
  },
    h("span", { class: `reward ${scored ? (row.result === "missing" ? "missing" : "") : row.result}` }, scored ? fixed(row.total) : SIGNS[row.result]),
    h("span", { class: "q" }, row.question.split("\n", 1)),
    h("span", { class: "step" }, comparing ? runMark(row.run) : null, known(row.step) && !known(row.cell) ? ` step ${row.step}` : ""),
    h("span", { class: "meta" }, row.result ? h("span", { class: row.result }, RESULTS[row.result]) : null, h("span", {}, row.type), h("span", {}, row.cell ? spelled(row.cell) : known(row.frame_budget) ? `K ${row.frame_budget}` : ""), row.calls ? h("span", {}, plural(row.calls, "call")) : null));
};
const move = (to) => { if (visibleOnes.length) open(visibleOnes[clamp(to, 0, visibleOnes.length - 1)]); };
const onKey = (event) => {
  const at = visibleOnes.indexOf(current), page = Math.max(1, Math.floor(box.clientHeight / ROW_PX) - 1);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, j: at + 1, k: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: visibleOnes.length - 1 }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  move(to);
};
const goToStep = (step) => {
  const steps = distinct(rows.map((row) => row.step)).filter(known);
  if (!steps.length) return;
  clear();
  controls.step.value = String(steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best)));
  refresh();
  document.getElementById("episodes").scrollIntoView();
};

const scrollTo = (at) => {
  const top = ROW_PX * at;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + ROW_PX > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_PX - box.clientHeight;
};
const readBeside = (other, partners) => {
  const places = [current, other].filter(known).sort((one, two) => rows[one].run - rows[two].run);
  reader.classList.toggle("two", places.length > 1);
  const label = reader.contains(document.activeElement) ? document.activeElement.ariaLabel : null; // of a control that is drawn again
  reader.replaceChildren(...places.map((one) => read(episodeAt(one), barOf(one, partners))));
  if (label) reader.querySelector(`[aria-label="${label}"]`)?.focus();
};
const open = (place, remember = true) => {
  current = place;
  scrollTo(visibleOnes.indexOf(place));
  drawRows();
  hideTip();
  const partners = comparing ? partnersOf(place) : [];
  readBeside(partners[0], partners);
  if (comparing && !partners.length) reader.append(h("p", { class: "notice" }, "No other run has an episode of this prompt on this page."));
  if (remember) history.replaceState(null, "", `#episode-${place}`);
};
const barOf = (place, partners) => {
  const row = rows[place], at = visibleOnes.indexOf(current), own = place === current;
  const go = (label, sign, by) => h("button", { type: "button", class: "plain", "aria-label": label, disabled: visibleOnes[at + by] === undefined, onclick: () => move(at + by) }, sign);
  const beside = own ? go("Previous episode", "←", -1) : null, next = own ? go("Next episode", "→", 1) : null;
  const others = !own && partners.length > 1 ? h("select", { class: "plain", "aria-label": "Another episode of this prompt", onchange: (event) => readBeside(+event.target.value, partners) }, partners.map((other) => h("option", { value: other, selected: other === place }, `${byColor ? `${RUN_NAMES[rows[other].run]} · ` : ""}${nameOf(other)}`))) : null;
  return h("div", { class: "bar" }, h("span", { class: "id" }, runMark(row.run), comparing ? " " : null, others ? null : nameOf(place)), h("nav", { "aria-label": "Neighbors" }, others, beside, next));
};
const nameOf = (place) => {
  const row = rows[place];
  return [row.cell ? spelled(row.cell) : known(row.step) ? `step ${row.step}` : null, row.prompt, `no. ${members[place] + 1}`].filter(Boolean).join(" · ");
};

const partsOf = (part, of) => { // the steps or cells whose episodes the page shows
  const [shown, all] = ["num_parts_shown", "num_parts"].map((name) => of.reduce((sum, run) => sum + run[name], 0));
  return all ? shown === all ? `${all > 1 ? "all " : ""}${plural(all, part)}` : `${shown} of ${plural(all, part)}` : null;
};
const lede = () => {
  const withSteps = runs.filter(({ cells, num_parts: num }) => num && !cells.length).slice(0, 1); // runs share their steps
  const parts = [partsOf("step", withSteps), partsOf("cell", runs.filter(({ cells }) => cells.length))].filter(known).join(" and ");
  const shown = runs.reduce((sum, { num_episodes: num }) => sum + num, 0);
  return `${plural(shown, NOUN)} of ${parts}, spread evenly; the page shows at most ${runs[0].max_episodes.toLocaleString("en")}.${pictured()}`;
};
const pictured = () => {
  if (!data.pictures) return "";
  const { data: shots, num_bytes: bytes, num_left_out: left, problems } = data.pictures;
  const out = left ? ` ${left.toLocaleString("en")} frames of the longest strips are left out, because pictures are limited to 6 MB.` : "";
  const lost = problems.length ? ` Without pictures: ${problems.join("; ")}.` : "";
  return ` ${plural(shots.length, "frame")} of videos in ${bytes < 1e5 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`}.${out}${lost}`;
};
const drawEpisodes = () => {
  const host = document.getElementById("episodes");
  if (runs[0].about.kind === "question") { current = 0; host.append(reader); reader.append(read(episodeAt(0))); return; }
  host.append(h("h2", {}, NOUN === "sample" ? "Samples" : "Episodes"));
  if (!rows.length) {
    host.append(h("p", { class: "notice" }, runs.some((run) => run.num_parts) ? "This page was written without episodes." : "This run has no episodes to show."));
    return;
  }
  host.append(h("p", { class: "lede" }, lede()), filters(), h("div", { class: "browser" }, h("nav", { class: "card list", "aria-label": "Episodes" }, count, box), reader));
  box.addEventListener("scroll", drawRows, { passive: true });
  box.addEventListener("keydown", onKey);
  const asked = /^#episode-(\d+)$/.exec(location.hash);
  const merit = (row) => (row.total ?? -9) + 0.1 * (row.called === "ok" ? row.calls : 0);
  current = asked && rows[+asked[1]] ? +asked[1] : rows.reduce((best, row, place) => (merit(row) > merit(rows[best]) ? place : best), 0);
  refresh();
  new ResizeObserver(drawRows).observe(box);
  if (asked) host.scrollIntoView();
};
