/* ---- charts over the steps, of one run or of several over each other ---- */
const CHAR_PX = 7; // of a digit in a chart, in the widest font
const MARKED = 40; // with more points, a running mean replaces them
const charts = [];
const allSteps = distinct(runs.flatMap((run) => run.figures?.steps ?? [])).sort((a, b) => a - b);
const drawnSteps = distinct([...allSteps, ...runs.flatMap((run) => run.figures?.validation_steps ?? [])]).sort((a, b) => a - b); // validation begins before step 1
let selectedStep = null;

const lastAtOrBefore = (steps, step) => Math.max(0, steps.findLastIndex((other) => other <= step));
const nearestStep = (step) => {
  const at = lastAtOrBefore(allSteps, step), next = allSteps[at + 1];
  return next !== undefined && next - step < step - allSteps[at] ? next : allSteps[at];
};
const smooth = (points) => {
  const half = Math.max(1, Math.round(0.02 * points.length));
  return points.map(([step, value], n) => {
    if (value === null) return [step, null]; // a gap stays a gap
    const near = points.slice(Math.max(0, n - half), n + half + 1).map(([, other]) => other).filter(known);
    return [step, near.reduce((sum, other) => sum + other, 0) / near.length];
  });
};
const niceTicks = (low, high, count, whole = false) => {
  const rough = Math.max((high - low) / count || 1, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999 && (!whole || Number.isInteger(size)));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(n * step || 0); // no negative zero
  return ticks;
};
const splitAtGaps = (points) => {
  const parts = [[]];
  for (const point of points) {
    if (point[1] === null) parts.push([]);
    else parts.at(-1).push(point);
  }
  return parts.filter((part) => part.length);
};

/* Every run's lines of the chart with this title; the first run's chart defines how they are drawn. */
const linesOf = ({ title }) => runs.flatMap(({ figures }, run) => {
  const own = figures?.charts.find((chart) => chart.title === title);
  const pointsOf = (steps, values) => steps.map((step, n) => [step, values[n]]).filter(([, value]) => known(value) || !own.sparse);
  return (own?.lines ?? []).map((line, n) => ({
    ...line, run, whole: own.whole, color: byColor ? runColor(run) : line.color, dash: (byColor ? n : run + runs.length * line.repeat) % 6, points: pointsOf(figures.steps, line.values),
    validation: own.validation ? pointsOf(figures.validation_steps, own.validation).filter(([, value]) => known(value)) : [],
  }));
});
const allSpecs = () => [...new Map(runs.flatMap((run) => run.figures?.charts ?? []).reverse().map((spec) => [spec.title, spec])).values()].reverse();
const valuesOf = (line) => line.values.filter(known);
const isFlat = (lines) => lines.every((line) => distinct(valuesOf(line)).length < 2 && distinct(line.validation.map(([, value]) => value)).length < 2);
const isSingle = (lines) => lines.every((line) => valuesOf(line).length < 2 && line.validation.length < 2);

class Chart {
  constructor(spec, lines) {
    this.spec = comparing && spec.kind === "stack" ? { ...spec, kind: "line" } : spec; // areas would hide each other
    this.lines = lines;
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", {
      class: "chart", tabindex: 0, role: "slider", "aria-label": spec.title, "aria-valuemin": allSteps[0], "aria-valuemax": allSteps.at(-1),
      onpointermove: (event) => select(this.nearest(event)),
      onpointerleave: () => select(null),
      onclick: (event) => goToStep(this.nearest(event)),
      onkeydown: (event) => this.key(event),
      onblur: () => select(null),
    });
    this.element = h("figure", { class: "card" }, h("figcaption", {}, spec.title), this.legend, this.svg);
    charts.push(this);
  }

  name(line) { return [comparing ? RUN_NAMES[line.run] : "", line.label].filter(Boolean).join(" "); }

  nearest(event) { return nearestStep(this.stepAt(event.clientX - this.svg.getBoundingClientRect().left)); }

  key(event) {
    const last = allSteps.length - 1;
    const at = selectedStep === null ? last : lastAtOrBefore(allSteps, selectedStep);
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); select(allSteps[clamp(to, 0, last)]); }
    if (event.key === "Enter" && selectedStep !== null) goToStep(selectedStep);
    if (event.key === "Escape") select(null);
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    const stacked = this.spec.kind === "stack" ? this.stack() : null;
    const scale = this.scale([...(stacked ?? this.lines.map((line) => line.points)), ...this.lines.map((line) => line.validation)].flat().map(([, value]) => value).filter(known));
    const frame = this.frame(scale, width, height);
    Object.assign(this, { x: frame.x, stepAt: frame.stepAt });
    this.rule = s("line", { class: "rule", y1: frame.top, y2: height - frame.bottom, visibility: "hidden" });
    const drawn = stacked ? this.areas(stacked, frame) : this.lines.map((line) => this.curve(line, frame)).reverse();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.axes(scale, frame), ...drawn, this.rule);
    this.show(selectedStep);
  }

  stack() {
    const sums = new Map();
    return this.lines.map((line) => line.points.map(([step, value]) => [step, sums.set(step, (sums.get(step) ?? 0) + (value ?? 0)).get(step)]));
  }

  scale(values) {
    const { spec } = this;
    let low = Math.min(...values), high = Math.max(...values);
    if (spec.from_zero) { low = Math.min(0, low); high = Math.max(0, high); }
    if (spec.kind === "log") {
      low = 10 ** Math.floor(Math.log10(Math.min(low, ...spec.levels.map(([level]) => level / 1.5)))); high = 10 ** Math.ceil(Math.log10(Math.max(high, low * 10, ...spec.levels.map(([level]) => 1.5 * level))));
      const decades = Math.round(Math.log10(high / low)), every = Math.ceil(decades / 4);
      return { low, high, ticks: Array.from({ length: Math.floor(decades / every) + 1 }, (_, n) => low * 10 ** (n * every)) };
    }
    if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!(spec.from_zero && low === 0)) low -= pad; }
    const margin = 0.06 * (high - low);
    high += margin;
    if (low !== 0) low -= margin;
    return { low, high, ticks: niceTicks(low, high, 4, this.lines.every((line) => line.whole)) };
  }

  tickText(value, ticks) {
    if (this.spec.kind === "log") return `1e${Math.round(Math.log10(value))}`.replace("-", "−");
    const size = ticks.length > 1 ? ticks[1] - ticks[0] : 1, largest = Math.max(...ticks.map(Math.abs));
    const digits = (of) => Math.max(0, 1 + Math.floor(Math.log10(of)) - Math.floor(Math.log10(size))); // one more than needed, because steps are also 2.5
    if (value === 0) return "0";
    const text = largest < 1e-3 || largest >= 1e7 ? value.toExponential(digits(largest)).replace(/\.?0*e\+?/, "e") : value.toLocaleString("en", { maximumFractionDigits: digits(1) });
    return text.replaceAll("-", "−");
  }

  frame({ low, high, ticks }, width, height) {
    const left = Math.max(...ticks.map((tick) => this.tickText(tick, ticks).length)) * CHAR_PX + 10, right = 12, top = 6, bottom = 22;
    const first = drawnSteps[0], last = drawnSteps.at(-1), span = last - first || 1;
    const scaled = this.spec.kind === "log" ? Math.log : (value) => value;
    const x = (step) => left + ((step - first) / span) * (width - left - right);
    const y = (value) => height - bottom - ((scaled(value) - scaled(low)) / (scaled(high) - scaled(low))) * (height - top - bottom);
    return {
      width, height, left, right, top, bottom, first, last, x, y,
      stepAt: (px) => first + ((px - left) / (width - left - right)) * span,
      path: (parts) => parts.map((part) => part.map(([step, value], n) => `${n ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("")).join(""),
    };
  }

  axes({ ticks }, { x, y, left, right, width, height, first, last }) {
    const horizontal = (name, value) => s("line", { class: name, x1: left, x2: width - right, y1: y(value).toFixed(1), y2: y(value).toFixed(1) });
    return [
      ...ticks.flatMap((tick) => [horizontal(tick === 0 ? "zero" : "grid", tick), s("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, this.tickText(tick, ticks))]),
      ...niceTicks(first, last, Math.min(width / 60, (width - left - right) / (CHAR_PX * last.toLocaleString("en").length + 12)), true).map((step) => s("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, step.toLocaleString("en"))),
      ...this.spec.levels.flatMap(([level, name], n) => [ // the lower level has its label below its line
        horizontal("level", level), s("text", { class: "name", x: width - right, y: y(level) + (n ? -4 : 13), "text-anchor": "end" }, `${name} ${number(level)}`),
      ]),
    ];
  }

  areas(stacked, { path }) {
    let below = [[allSteps.at(-1), 0], [allSteps[0], 0]];
    return stacked.map((points, n) => {
      const area = s("path", { class: `area c-${this.lines[n].color}`, d: `${path([[...points, ...below]])}Z` });
      below = [...points].reverse();
      return area;
    });
  }

  curve(line, { path, x, y }) {
    const many = allSteps.length > MARKED, parts = splitAtGaps(line.points);
    const marked = many ? parts.filter((part) => part.length === 1).flat() : parts.flat();
    return s("g", { class: `c-${line.color} dashed-${line.dash}` },
      many ? s("path", { class: "raw", d: path(parts) }) : null,
      s("path", { class: "line", d: path(many ? splitAtGaps(smooth(line.points)) : parts) }),
      marked.map(([step, value]) => s("circle", { class: "dot", cx: x(step), cy: y(value), r: 3 })),
      s("path", { class: "validation-line", d: path([line.validation]) }),
      line.validation.map(([step, value]) => s("path", { class: "validation", d: `M${x(step)} ${y(value) - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z` })));
  }

  show(step) {
    const at = step ?? allSteps.at(-1);
    const ended = (line) => step !== null && step > runs[line.run].figures.steps.at(-1);
    const value = (line) => (ended(line) ? null : line.points.findLast(([other]) => other <= at)?.[1]);
    const entry = (line, mark, name, shown) => h("span", { class: `c-${line.color} dashed-${line.dash}` }, name ? [h("i", { class: mark }), name] : null, h("b", {}, number(shown)));
    const latest = (line) => (ended(line) ? null : line.validation.findLast(([other]) => other <= at));
    this.legend.replaceChildren(h("span", {}, step === null && comparing ? "last step" : `step ${at.toLocaleString("en")}`),
      ...this.lines.map((line) => entry(line, null, this.lines.length > 1 ? this.name(line) : "", value(line))),
      ...this.lines.filter(latest).map((line) => entry(line, "validation", [comparing ? RUN_NAMES[line.run] : "", "validation"].join(" "), latest(line)[1])));
    this.svg.setAttribute("aria-valuenow", at);
    this.svg.setAttribute("aria-valuetext", `step ${at}: ${this.lines.map((line) => `${this.name(line)} ${number(value(line))}`).join(", ")}`);
    if (!this.rule) return;
    this.rule.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) this.rule.setAttribute(end, this.x(step));
  }
}
const select = (step) => {
  if (step === selectedStep) return;
  selectedStep = step;
  for (const chart of charts) chart.show(step);
};

const single = (spec, lines) => h("figure", { class: "card single" }, h("figcaption", {}, spec.title), // a single value, as a number
  lines.filter((line) => valuesOf(line).length).map((line) => h("p", { class: `c-${line.color}` },
    h("b", {}, number(valuesOf(line)[0])), " ", h("span", {}, [comparing ? RUN_NAMES[line.run] : "", line.label, `step ${line.points.find(([, value]) => known(value))[0]}`].filter(Boolean).join(", ")))));
const flatRow = ([spec, lines]) => lines.filter((line) => valuesOf(line).length).map((line) => h("div", {},
  h("dt", {}, [spec.title, line.label, comparing ? RUN_NAMES[line.run] : ""].filter(Boolean).join(" · ")), h("dd", {}, number(valuesOf(line)[0]))));

const drawFigures = () => {
  if (!allSteps.length) return;
  const host = document.getElementById("figures"), flat = [], sections = new Map();
  const observer = new ResizeObserver((entries) => { for (const entry of entries) entry.target.chart.draw(); });
  for (const spec of allSpecs()) {
    const lines = linesOf(spec);
    if (isFlat(lines) && !isSingle(lines)) { flat.push([spec, lines]); continue; }
    const cards = sections.get(spec.section) ?? sections.set(spec.section, h("div", { class: "charts" })).get(spec.section);
    if (isSingle(lines)) { cards.append(single(spec, lines)); continue; }
    const chart = new Chart(spec, lines);
    chart.svg.chart = chart;
    observer.observe(chart.svg);
    cards.append(chart.element);
  }
  const others = sections.get(null), num_left_out = Math.max(...runs.map((run) => run.figures?.num_left_out ?? 0));
  sections.delete(null);
  host.append(h("h2", {}, allSteps.length > 1 ? "Metrics by step" : `Step ${allSteps[0]}`), figuresLede(),
    ...[...sections].flatMap(([name, cards]) => [h("h3", { class: "section-name" }, name), cards]));
  if (others) host.append(folded(`Other metrics (${others.childElementCount}${num_left_out ? `, ${num_left_out} more are left out` : ""})`, others));
  if (flat.length) host.append(folded(`Constant metrics (${flat.length})`, h("dl", { class: "settings" }, flat.map(flatRow))));
};
const figuresLede = () => {
  if (allSteps.length < 2) return h("p", { class: "lede" }, "With a single step there are no curves yet, only its values.");
  const steps = Math.max(...runs.map((run) => run.figures?.steps_per_point ?? 1));
  return h("p", { class: "lede" }, "Point at a chart, or use the arrow keys in it, to select a step in all charts.",
    allSteps.length > MARKED ? " Bold lines are running means." : "", steps > 1 ? ` A point is the mean of up to ${steps} steps.` : "",
    byColor ? " Every run has a color." : comparing ? " Lines of run A are solid, those of run B dashed." : "",
    comparing && charts.some(({ lines }) => lines.some(({ dash }) => !byColor && dash > 1)) ? " More lines of a color have other dashes." : "");
};
