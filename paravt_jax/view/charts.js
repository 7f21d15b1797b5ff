/* ---- charts over the steps, of one run or of two over each other ---- */
const MARKED = 40; // with more points, they give way to a running mean
const MAX_TOLD = 3, MAX_LISTED = 40; // gaps of one reason that are told one by one beneath a chart; and where one points at that
const SECTIONS = { __proto__: null, learned: "The policy", learner: "The learner", machine: "The machine" };
const charts = [];
const allSteps = distinct(runs.flatMap((run) => (run.figures ? run.figures.steps : []))).sort((one, other) => one - other);
let atStep = null;

const placeAt = (steps, step) => { // the last one that is not after it
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low - 1;
};
const nearestStep = (step) => {
  const at = Math.max(0, placeAt(allSteps, step)), next = allSteps[at + 1];
  return next !== undefined && next - step < step - allSteps[at] ? next : allSteps[at];
};
const smooth = (values) => {
  const half = Math.max(1, Math.round(0.02 * values.length));
  return values.map((value, place) => {
    if (value === null) return null; // a gap stays one
    const near = values.slice(Math.max(0, place - half), place + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
};
const niceTicks = (low, high, count) => {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(n * step || 0); // no negative zero
  return ticks;
};
const parted = (points) => { // a step without a value leaves a gap
  const parts = [[]];
  for (const point of points) {
    if (point === null) parts.push([]);
    else parts.at(-1).push(point);
  }
  return parts.filter((part) => part.length);
};
const pathOf = (parts) => parts.map((part) => part.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("")).join("");
const spanOf = ([first, last]) => (first === last ? `step ${first}` : `steps ${first}–${last}`);

const linesOf = (spec) => runs.flatMap(({ figures }, run) => {
  const own = figures && figures.charts.find((chart) => chart.title === spec.title);
  return !own ? [] : own.lines.map(([key, label, colour]) => ({ run, key, label, colour, steps: figures.steps, values: figures.columns[key], gaps: figures.gaps[key] ?? [] }));
});
const heldOf = (lines) => lines.filter((line) => runs[line.run].figures.validation.columns[line.key])
  .map((line) => ({ ...line, steps: runs[line.run].figures.validation.steps, values: runs[line.run].figures.validation.columns[line.key] }));
const allSpecs = () => { // each title once, whichever run has it
  const specs = new Map();
  for (const run of runs) for (const spec of run.figures ? run.figures.charts : []) if (!specs.has(spec.title)) specs.set(spec.title, spec);
  return [...specs.values()];
};
const valuesOf = (line) => line.values.filter((value) => value !== null);
const isFlat = (lines) => lines.every((line) => distinct(valuesOf(line)).length < 2);
const isSingle = (lines) => lines.every((line) => valuesOf(line).length < 2);

class Chart {
  constructor(spec, lines) {
    this.spec = comparing && spec.kind === "stack" ? { ...spec, kind: "line", from_zero: true } : spec; // areas would hide each other
    this.lines = lines;
    this.held = new Set(lines.map((line) => line.key)).size === 1 ? heldOf(lines) : [];
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", {
      class: "chart", tabindex: 0, role: "slider", "aria-label": spec.title, "aria-valuemin": allSteps[0], "aria-valuemax": allSteps.at(-1),
      onpointermove: (event) => choose(this.nearest(event)),
      onpointerleave: () => choose(null),
      onclick: (event) => goToStep(this.nearest(event)),
      onkeydown: (event) => this.key(event),
      onblur: () => choose(null),
    });
    this.element = h("figure", { class: "card" }, h("figcaption", {}, spec.title), this.legend, this.svg, this.why());
    charts.push(this);
  }

  why() {
    const reasons = new Map();
    for (const line of this.lines) for (const gap of line.gaps) reasons.set(gap[2], [...(reasons.get(gap[2]) ?? []), `${this.lines.length > 1 ? `${this.name(line)} ` : ""}${spanOf(gap)}`]);
    if (!reasons.size) return null;
    const told = [...reasons].map(([reason, spans]) => `${reason} (${spans.length > MAX_TOLD ? plural(spans.length, "gap") : spans.join(", ")})`);
    return h("p", { class: "why", title: [...reasons.values()].flat().slice(0, MAX_LISTED).join("\n") }, `No value: ${told.join("; ")}`);
  }

  name(line) { return [comparing ? RUN_NAMES[line.run] : "", line.label].filter(Boolean).join(" "); }

  nearest(event) { return nearestStep(this.stepAt(event.clientX - this.svg.getBoundingClientRect().left)); }

  key(event) {
    const last = allSteps.length - 1;
    const at = atStep === null ? last : placeAt(allSteps, atStep);
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); choose(allSteps[clamp(to, 0, last)]); }
    if (event.key === "Enter" && atStep !== null) goToStep(atStep);
    if (event.key === "Escape") choose(null);
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    const columns = this.columns(), scale = this.scale(columns), frame = this.frame(scale, width, height);
    this.x = frame.x;
    this.stepAt = frame.stepAt;
    this.rule = s("line", { class: "rule", y1: frame.top, y2: height - frame.bottom, visibility: "hidden" });
    const drawn = this.spec.kind === "stack" ? this.areas(columns, frame) : [...this.curves(columns, frame), ...this.diamonds(frame)];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...this.bands(frame), ...this.axes(scale, frame), ...drawn, this.rule);
    this.show(atStep);
  }

  columns() {
    const floor = (line) => runs[line.run].figures.floor;
    const safe = (line) => (value) => (value === null ? null : this.spec.kind === "log" ? Math.max(value, floor(line)) : value);
    const columns = this.lines.map((line) => line.values.map(safe(line)));
    if (this.spec.kind !== "stack") return columns;
    const sums = this.lines[0].steps.map(() => 0);
    return columns.map((column) => column.map((value, place) => (sums[place] += value ?? 0)));
  }

  scale(columns) {
    const { spec } = this;
    const shown = columns.flat().concat(this.held.flatMap((line) => line.values)).filter((value) => value !== null);
    let low = Math.min(...shown), high = Math.max(...shown);
    if (spec.from_zero || spec.kind === "stack") { low = Math.min(0, low); high = Math.max(0, high); }
    if (spec.kind === "log") {
      const levels = spec.levels.map(([level]) => level);
      low = 10 ** Math.floor(Math.log10(low)); high = 10 ** Math.ceil(Math.log10(Math.max(high, low * 10, ...levels.map((level) => 1.5 * level))));
      const decades = Math.round(Math.log10(high / low)), every = Math.ceil(decades / 4);
      return { low, high, ticks: Array.from({ length: Math.floor(decades / every) + 1 }, (_, n) => low * 10 ** (n * every)) };
    }
    if (high === 0 && low === 0) high = 1;
    if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!(spec.from_zero && low === 0)) low -= pad; }
    const margin = 0.06 * (high - low);
    high += margin;
    if (low !== 0) low -= margin;
    return { low, high, ticks: niceTicks(low, high, 4) };
  }

  tickText(value, ticks) {
    if (this.spec.kind === "log") return `1e${Math.round(Math.log10(value))}`.replace("-", "−");
    const size = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
    if (size < 1e-4) return value === 0 ? "0" : value.toExponential(1).replaceAll("-", "−");
    let digits = 0;
    while (digits < 8 && Math.abs(size * 10 ** digits - Math.round(size * 10 ** digits)) > 1e-6) digits += 1;
    return value.toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
  }

  frame({ low, high, ticks }, width, height) {
    const left = Math.max(...ticks.map((tick) => this.tickText(tick, ticks).length)) * 6.6 + 10, right = 12, top = 6, bottom = 22;
    const first = allSteps[0], last = allSteps.at(-1), span = last - first || 1;
    const along = this.spec.kind === "log" ? Math.log : (value) => value;
    return {
      width, height, left, right, top, bottom, first, last,
      x: (step) => left + ((step - first) / span) * (width - left - right),
      y: (value) => height - bottom - ((along(value) - along(low)) / (along(high) - along(low))) * (height - top - bottom),
      stepAt: (px) => first + ((px - left) / (width - left - right)) * span,
    };
  }

  bands({ x, top, bottom, height }) { // where no line of the chart has a value
    const [one, ...others] = this.lines.map((line) => line.gaps);
    const common = one.filter(([first, last]) => others.every((gaps) => gaps.some(([from, to]) => from <= first && to >= last)));
    return common.map(([first, last]) => s("rect", { class: "gap", x: x(first) - 3, width: x(last) - x(first) + 6, y: top, height: height - top - bottom }));
  }

  axes({ ticks }, { x, y, left, right, width, height, first, last }) {
    const parts = [];
    for (const tick of ticks) {
      const at = y(tick).toFixed(1);
      parts.push(s("line", { class: tick === 0 ? "zero" : "grid", x1: left, x2: width - right, y1: at, y2: at }));
      parts.push(s("text", { x: left - 8, y: +at + 4, "text-anchor": "end" }, this.tickText(tick, ticks)));
    }
    for (const step of niceTicks(first, last, Math.max(3, Math.floor(width / 80))).filter(Number.isInteger)) {
      parts.push(s("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
    return [...parts, ...this.levels(y, left, right, width)];
  }

  levels(y, left, right, width) {
    let labelY = Infinity, labelX = 0, labelWidth = 0;
    const lines = [], names = [];
    for (const [level, name] of [...this.spec.levels].sort(([one], [other]) => one - other)) {
      const text = `${name} ${number(level)}`, at = y(level);
      labelX = labelY - at < 13 ? labelX - labelWidth - 14 : width - right; // beside the one below it where both have no room
      labelY = at;
      labelWidth = 5.8 * text.length;
      lines.push(s("line", { class: "level", x1: left, x2: width - right, y1: at, y2: at }));
      names.push(s("text", { class: "name", x: labelX, y: at - 4, "text-anchor": "end" }, text));
    }
    return [...lines, ...names];
  }

  areas(columns, { x, y }) {
    const { steps } = this.lines[0];
    let below = steps.map((step) => [x(step), y(0)]);
    return columns.map((column, n) => {
      const edge = column.map((value, place) => [x(steps[place]), y(value)]);
      const area = s("path", { class: `area c-${this.lines[n].colour}`, d: `${pathOf([edge])}${pathOf([[...below].reverse()]).replace("M", "L")}Z` });
      below = edge;
      return area;
    });
  }

  curves(columns, { x, y }) {
    return columns.map((column, n) => {
      const line = this.lines[n], many = line.steps.length > MARKED;
      const points = (values) => values.map((value, place) => (value === null ? null : [x(line.steps[place]), y(value)]));
      const parts = parted(points(column)), lone = parts.filter((part) => part.length === 1).flat();
      return s("g", { class: `c-${line.colour} of-run-${line.run}` },
        many ? s("path", { class: "raw", d: pathOf(parts) }) : null,
        s("path", { class: "line", d: pathOf(many ? parted(points(smooth(column))) : parts) }),
        (many ? lone : parts.flat()).map(([cx, cy]) => s("circle", { class: "dot", cx, cy, r: 3 })));
    }).reverse();
  }

  diamonds({ x, y, first, last }) {
    return this.held.map((line) => {
      const points = line.steps.map((step, place) => [step, line.values[place]]).filter(([step, value]) => value !== null && step >= first && step <= last).map(([step, value]) => [x(step), y(value)]);
      return s("g", { class: `c-${line.colour} of-run-${line.run}` }, s("path", { class: "heldline", d: pathOf([points]) }),
        points.map(([px, py]) => s("path", { class: "held", d: `M${px} ${py - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z` })));
    });
  }

  show(step) {
    const at = step ?? allSteps.at(-1);
    const value = (line) => line.values[Math.max(0, placeAt(line.steps, at))] ?? null;
    const several = this.lines.length > 1;
    const said = this.lines.map((line) => h("span", { class: `c-${line.colour} of-run-${line.run}` }, several ? [h("i"), this.name(line)] : null, h("b", {}, number(value(line)))));
    for (const line of this.held) {
      const near = line.steps.findLastIndex((other, place) => other <= at && line.values[place] !== null);
      if (near >= 0) said.push(h("span", { class: `c-${line.colour}` }, h("i", { class: "held" }), comparing ? `${RUN_NAMES[line.run]} validation` : "validation", h("b", {}, number(line.values[near]))));
    }
    this.legend.replaceChildren(h("span", {}, `step ${at.toLocaleString("en")}`), ...said);
    this.svg.setAttribute("aria-valuenow", at);
    this.svg.setAttribute("aria-valuetext", `step ${at}: ${this.lines.map((line) => `${this.name(line)} ${number(value(line))}`).join(", ")}`);
    if (!this.rule) return;
    this.rule.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { this.rule.setAttribute("x1", this.x(step)); this.rule.setAttribute("x2", this.x(step)); }
  }
}
const choose = (step) => {
  if (step === atStep) return;
  atStep = step;
  for (const chart of charts) chart.show(step);
};

const stepOf = (line) => line.steps[line.values.findIndex((value) => value !== null)];
const single = (spec, lines) => h("figure", { class: "card single" }, h("figcaption", {}, spec.title), // one value is a number
  lines.filter((line) => valuesOf(line).length).map((line) => h("p", { class: `c-${line.colour}` },
    h("b", {}, number(valuesOf(line)[0])), " ", h("span", {}, [comparing ? RUN_NAMES[line.run] : "", line.label, `step ${stepOf(line)}`].filter(Boolean).join(", ")))));
const flatRow = ([spec, lines]) => lines.filter((line) => valuesOf(line).length).map((line) => h("div", {},
  h("dt", {}, [spec.title, line.label, comparing ? RUN_NAMES[line.run] : ""].filter(Boolean).join(" · ")), h("dd", {}, number(valuesOf(line)[0]))));

const drawFigures = () => {
  const specs = allSpecs();
  if (!allSteps.length || !specs.length) return;
  const host = document.getElementById("figures");
  const observer = new ResizeObserver((entries) => { for (const entry of entries) entry.target.chart.draw(); });
  const observed = (spec, lines) => {
    const chart = new Chart(spec, lines);
    chart.show(null);
    chart.svg.chart = chart;
    observer.observe(chart.svg);
    return chart.element;
  };
  const flat = [];
  const grid = (section) => {
    const shown = [];
    for (const spec of specs.filter((other) => other.section === section)) {
      const lines = linesOf(spec), unheld = isFlat(heldOf(lines));
      if (isSingle(lines) && unheld) shown.push(single(spec, lines));
      else if (isFlat(lines) && unheld) flat.push([spec, lines]);
      else shown.push(observed(spec, lines));
    }
    return shown.length ? h("div", { class: "charts" }, shown) : null;
  };
  host.append(h("h2", {}, allSteps.length > 1 ? "Over the steps" : `Step ${allSteps[0]}`), figuresLede());
  for (const [section, name] of Object.entries(SECTIONS)) {
    const shown = grid(section);
    if (shown) host.append(h("h3", { class: "section-name" }, name), shown);
  }
  const others = grid("other");
  if (others) host.append(h("details", { class: "more" }, h("summary", {}, `Every other metric (${others.childElementCount}${leftOut()})`), others));
  if (flat.length) host.append(h("details", { class: "more" }, h("summary", {}, `Always the same (${flat.length})`), h("dl", { class: "settings" }, flat.map(flatRow))));
};
const leftOut = () => {
  const num = Math.max(...runs.map((run) => (run.figures ? run.figures.num_left_out : 0)));
  return num ? `, ${num} more are left out` : "";
};
const figuresLede = () => {
  if (allSteps.length < 2) return h("p", { class: "lede" }, "One step is no curve yet: these are its numbers.");
  const each = Math.max(...runs.map((run) => (run.figures ? run.figures.steps_a_point : 1)));
  return h("p", { class: "lede" }, "Point at a chart, or move through it with the arrow keys, and all show that step.",
    allSteps.length > MARKED ? " Bold lines are running means." : "", each > 1 ? ` A point is the mean of up to ${each} steps.` : "",
    comparing ? " A is drawn through, B is dashed." : "");
};
