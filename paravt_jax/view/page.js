"use strict";
(() => {
  // What a model wrote arrives as JSON and leaves as text nodes: nothing here builds markup from strings.
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const TERM_COLOURS = { accuracy: "blue", base: "red", anchor: "pink", think_first: "orange", balanced: "sky", tool: "green" };
  const TERM_NAMES = { accuracy: "accuracy", base: "base", anchor: "anchor", think_first: "think first", balanced: "balanced", tool: "tool" };
  const colourOf = (term) => TERM_COLOURS[term] ?? "neutral"; // of a plugin's
  const spelled = (name) => name.replaceAll("_", " ");
  const OUTCOME_COLOURS = { ok: "green", invalid: "red", unknown_tool: "red", error: "red", timeout: "orange" };
  const NARROW_CHARS = 24; // a credit of no more characters stands out from the text it is in, as tags do

  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  };
  const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
  const styled = (element, styles) => (Object.assign(element.style, styles), element);
  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
    const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
    const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(digits));
    return text.replace("-", "−");
  };
  const fixed = (value) => (value === null || value === undefined ? "–" : value.toFixed(2).replace("-", "−"));
  const short = (value) => (value !== null && Math.abs(value) >= 0.1 && Math.abs(value) < 1000 ? fixed(value) : number(value));
  const signed = (value) => (value > 0 ? "+" : "") + number(value);
  const clock = (seconds, whole) => { // tenths are shown where there are any
    const tenths = whole ? 10 * Math.round(seconds) : Math.round(10 * seconds);
    const rest = tenths % 600, shown = rest % 10 ? (rest / 10).toFixed(1) : String(rest / 10);
    return `${Math.floor(tenths / 600)}:${rest < 100 ? "0" : ""}${shown}`;
  };

  /* ---- tooltip ---- */
  const tip = document.getElementById("tip");
  const showTip = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const below = event.clientY + 18 + box.height < innerHeight;
    tip.style.left = `${clamp(event.clientX - box.width / 2, 8, innerWidth - box.width - 8)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - box.height - 14}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });

  /* ---- head ---- */
  const about = data.about;
  const drawHead = () => {
    const head = document.getElementById("head");
    const { steps_done: done, steps_planned: planned } = about;
    const progress = h("div", { class: "progress" });
    if (planned) {
      const inner = styled(h("i"), { width: `${clamp((100 * done) / planned, 0, 100)}%` });
      progress.append(h("div", { class: "track", role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0, "aria-valuemax": planned, "aria-valuenow": done }, inner));
    }
    progress.append(h("span", {}, h("b", {}, done.toLocaleString("en")), planned ? ` of ${planned.toLocaleString("en")} steps` : ` step${done === 1 ? "" : "s"}`));
    progress.append(h("span", {}, `as of ${data.made_at}`));
    head.append(h("p", { class: "eyebrow" }, "paravt_jax · run"), h("h1", {}, about.name), progress);
    const facts = [...about.facts];
    if (about.commit) facts.push(["Commit", about.commit.replace(/^([0-9a-f]{12})[0-9a-f]+/, "$1")]);
    if (facts.length) head.append(h("dl", { class: "facts" }, facts.map(([label, text]) => h("div", {}, h("dt", {}, label), h("dd", {}, text)))));
    const packages = Object.entries(about.packages).map(([name, version]) => [name, String(version)]);
    const commit = about.commit ? [["git commit", about.commit]] : [];
    const rows = (pairs) => h("dl", { class: "settings" }, pairs.map(([key, text]) => h("div", { class: text.length > 44 ? "long" : null }, h("dt", {}, key), h("dd", {}, text))));
    if (about.settings.length) head.append(h("details", { class: "more" }, h("summary", {}, `All ${about.settings.length} settings`), rows(about.settings)));
    if (packages.length || commit.length) head.append(h("details", { class: "more" }, h("summary", {}, "Versions"), rows([...commit, ...packages])));
  };

  /* ---- headline figures ---- */
  const sparkline = (values) => {
    const known = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
    if (known.length < 2) return null;
    const numbers = known.map(([, value]) => value);
    const low = Math.min(...numbers), high = Math.max(...numbers);
    const at = ([place, value]) => [(100 * place) / (values.length - 1), high === low ? 19 : 36 - (34 * (value - low)) / (high - low)];
    const points = known.map(at);
    const path = points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");
    return s("svg", { viewBox: "0 0 100 38", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("path", { d: path, fill: "none", stroke: "var(--c)", "stroke-width": 2, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }));
  };
  const symbolFoot = (item) => (item.name === item.key ? item.symbol.replace(/^[^_]*/, "") : item.symbol.includes("_") ? h("sub", {}, item.symbol.split("_")[1]) : null);
  const drawHeadlines = () => {
    const host = document.getElementById("headlines");
    if (!about.steps_done) {
      host.append(h("p", { class: "notice" }, "This run has logged no step yet. Make the page again when it has."));
      return;
    }
    if (!data.headlines.length) return;
    const steps = data.headlines[0].num_steps;
    const moved = about.steps_done > 1;
    host.append(h("div", { class: "cards" }, data.headlines.map((item) => {
      const change = item.first === null || item.last === null ? null : item.last - item.first;
      return h("div", { class: `card headline c-${item.colour}` },
        h("p", { class: "of" }, h("b", {}, item.symbol.split("_")[0], symbolFoot(item)), item.name === item.key ? null : item.name),
        h("p", { class: "value" }, short(item.last)),
        moved ? h("p", { class: "from" }, "from ", h("b", {}, short(item.first)), change === null ? null : change === 0 ? ", unchanged" : `, ${change > 0 ? "+" : ""}${short(change)}`) : null,
        sparkline(item.line),
        item.validation ? h("p", { class: "held" }, `validation ${short(item.validation[0])} → ${short(item.validation[1])}`) : null);
    })));
    if (moved) host.append(styled(h("p", { class: "lede" }, steps === 1 ? "The last step against the first." : `The mean of the last ${steps} steps against that of the first ${steps}.`), { marginTop: "12px", marginBottom: "0" }));
  };

  /* ---- charts ---- */
  const figures = data.figures;
  const MARKED = 40; // with more points, they give way to a running mean
  const charts = [];
  let atStep = null;

  const smooth = (values) => {
    const half = Math.max(1, Math.round(0.02 * values.length));
    return values.map((_, place) => {
      const near = values.slice(Math.max(0, place - half), place + half + 1).filter((value) => value !== null);
      return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
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
  const runs = (points) => { // a step without a value leaves a gap
    const parts = [[]];
    for (const point of points) {
      if (point === null) parts.push([]);
      else parts[parts.length - 1].push(point);
    }
    return parts.filter((part) => part.length).map((part) => part.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("")).join("");
  };

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.lines = spec.lines.map(([key, label, colour]) => ({ key, label, colour, values: figures.columns[key] }));
      this.held = this.lines.filter((line) => figures.validation.columns[line.key] && this.lines.length === 1)
        .map((line) => ({ ...line, values: figures.validation.columns[line.key] }));
      this.legend = h("div", { class: "legend" });
      this.svg = s("svg", {
        class: "chart", tabindex: 0, role: "slider", "aria-label": spec.title, "aria-valuemin": figures.steps[0], "aria-valuemax": figures.steps.at(-1),
        onpointermove: (event) => choose(this.nearest(event)),
        onpointerleave: () => choose(null),
        onclick: (event) => goToStep(figures.steps[this.nearest(event)]),
        onkeydown: (event) => this.key(event),
        onblur: () => choose(null),
      });
      this.element = h("figure", { class: "card" }, h("figcaption", {}, spec.title), this.legend, this.svg);
      charts.push(this);
    }

    nearest(event) {
      const box = this.svg.getBoundingClientRect();
      const step = this.stepAt(event.clientX - box.left);
      let best = 0;
      figures.steps.forEach((other, place) => { if (Math.abs(other - step) < Math.abs(figures.steps[best] - step)) best = place; });
      return best;
    }

    key(event) {
      const last = figures.steps.length - 1;
      const at = atStep ?? last;
      const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last }[event.key];
      if (to !== undefined) { event.preventDefault(); choose(atStep === null && to > last ? last : clamp(to, 0, last)); }
      if (event.key === "Enter" && atStep !== null) goToStep(figures.steps[atStep]);
      if (event.key === "Escape") choose(null);
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight;
      if (!width) return;
      const { spec } = this, { steps } = figures;
      const log = spec.kind === "log", stack = spec.kind === "stack";
      const many = steps.length > MARKED;
      const safe = (value) => (value === null ? null : log ? Math.max(value, figures.floor) : value);
      let columns = this.lines.map((line) => line.values.map(safe));
      if (stack) {
        const sums = steps.map(() => 0);
        columns = columns.map((column) => column.map((value, place) => (sums[place] += value ?? 0)));
      }
      const shown = columns.flat().concat(this.held.flatMap((line) => line.values)).filter((value) => value !== null);
      let low = Math.min(...shown), high = Math.max(...shown);
      if (spec.from_zero || stack) { low = Math.min(0, low); high = Math.max(0, high); }
      let ticks;
      if (log) {
        const levels = spec.levels.map(([level]) => level);
        low = 10 ** Math.floor(Math.log10(low)); high = 10 ** Math.ceil(Math.log10(Math.max(high, low * 10, ...levels.map((level) => 1.5 * level))));
        const decades = Math.round(Math.log10(high / low)), every = Math.ceil(decades / 4);
        ticks = Array.from({ length: Math.floor(decades / every) + 1 }, (_, n) => low * 10 ** (n * every));
      } else {
        if (high === 0 && low === 0) high = 1;
        if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!(spec.from_zero && low === 0)) low -= pad; }
        const margin = 0.06 * (high - low);
        high += margin;
        if (low !== 0) low -= margin;
        ticks = niceTicks(low, high, 4);
      }
      const tickText = (value) => {
        if (log) return `1e${Math.round(Math.log10(value))}`.replace("-", "−");
        const size = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
        if (size < 1e-4) return value === 0 ? "0" : value.toExponential(1).replaceAll("-", "−");
        let digits = 0;
        while (digits < 8 && Math.abs(size * 10 ** digits - Math.round(size * 10 ** digits)) > 1e-6) digits += 1;
        return value.toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
      };
      const left = Math.max(...ticks.map((tick) => tickText(tick).length)) * 6.6 + 10, right = 12, top = 6, bottom = 22;
      const first = steps[0], last = steps.at(-1), span = last - first || 1;
      const x = (step) => (first === last ? (left + width - right) / 2 : left + ((step - first) / span) * (width - left - right));
      const scale = log ? Math.log : (value) => value;
      const y = (value) => height - bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
      this.stepAt = (px) => (first === last ? first : first + ((px - left) / (width - left - right)) * span);
      this.x = x;
      const parts = [];
      for (const tick of ticks) {
        const at = y(tick).toFixed(1);
        parts.push(s("line", { class: tick === 0 ? "zero" : "grid", x1: left, x2: width - right, y1: at, y2: at }));
        parts.push(s("text", { x: left - 8, y: +at + 4, "text-anchor": "end" }, tickText(tick)));
      }
      const stepTicks = niceTicks(first, last, Math.max(3, Math.floor(width / 80))).filter(Number.isInteger);
      for (const step of first === last ? [first] : stepTicks) parts.push(s("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
      let labelY = Infinity, labelX = 0, labelWidth = 0;
      const names = [];
      for (const [level, name] of [...spec.levels].sort(([one], [other]) => one - other)) {
        const text = `${name} ${number(level)}`, at = y(level);
        labelX = labelY - at < 13 ? labelX - labelWidth - 14 : width - right; // beside the one below it where both have no room
        labelY = at;
        labelWidth = 5.8 * text.length;
        parts.push(s("line", { class: "level", x1: left, x2: width - right, y1: at, y2: at }));
        names.push(s("text", { class: "name", x: labelX, y: at - 4, "text-anchor": "end" }, text));
      }
      parts.push(...names);
      if (stack) {
        const floor = steps.map((step) => [x(step), y(0)]);
        let below = floor;
        columns.forEach((column, n) => {
          let edge = column.map((value, place) => [x(steps[place]), y(value)]);
          if (steps.length === 1) { edge = [[x(first) - 30, edge[0][1]], [x(first) + 30, edge[0][1]]]; if (below === floor) below = [[x(first) - 30, y(0)], [x(first) + 30, y(0)]]; }
          parts.push(s("path", { class: `area c-${this.lines[n].colour}`, d: `${runs(edge)}${runs([...below].reverse()).replace("M", "L")}Z` }));
          below = edge;
        });
      } else {
        columns.map((column, n) => [column, this.lines[n]]).reverse().forEach(([column, line]) => {
          const points = (values) => values.map((value, place) => (value === null ? null : [x(steps[place]), y(value)]));
          const group = s("g", { class: `c-${line.colour}` });
          if (many) group.append(s("path", { class: "raw", d: runs(points(column)) }));
          group.append(s("path", { class: "line", d: runs(points(many ? smooth(column) : column)) }));
          if (!many) for (const point of points(column)) if (point) group.append(s("circle", { class: "dot", cx: point[0], cy: point[1], r: 3 }));
          parts.push(group);
        });
        for (const line of this.held) {
          const points = line.values.map((value, place) => [figures.validation.steps[place], value]).filter(([step, value]) => value !== null && step >= first && step <= last).map(([step, value]) => [x(step), y(value)]);
          parts.push(s("g", { class: `c-${line.colour}` }, s("path", { class: "heldline", d: runs(points) }),
            points.map(([px, py]) => s("path", { class: "held", d: `M${px} ${py - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z` }))));
        }
      }
      this.rule = s("line", { class: "rule", y1: top, y2: height - bottom, visibility: "hidden" });
      parts.push(this.rule);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren(...parts);
      this.show(atStep);
    }

    show(place) {
      const at = place ?? figures.steps.length - 1;
      const value = (line) => line.values[at];
      const said = this.lines.map((line) => h("span", { class: `c-${line.colour}` }, this.lines.length > 1 ? [h("i"), line.label] : null, h("b", {}, number(value(line)))));
      for (const line of this.held) {
        let near = -1;
        figures.validation.steps.forEach((step, n) => { if (step <= figures.steps[at] && line.values[n] !== null) near = n; });
        if (near >= 0) said.push(h("span", { class: `c-${line.colour}` }, h("i", { class: "held" }), "validation", h("b", {}, number(line.values[near]))));
      }
      said.unshift(h("span", {}, `step ${figures.steps[at].toLocaleString("en")}`));
      this.legend.replaceChildren(...said);
      this.svg.setAttribute("aria-valuenow", figures.steps[at]);
      this.svg.setAttribute("aria-valuetext", `step ${figures.steps[at]}: ${this.lines.map((line) => `${line.label} ${number(value(line))}`).join(", ")}`);
      if (!this.rule) return;
      this.rule.setAttribute("visibility", place === null ? "hidden" : "visible");
      if (place !== null) { this.rule.setAttribute("x1", this.x(figures.steps[at])); this.rule.setAttribute("x2", this.x(figures.steps[at])); }
    }
  }
  const choose = (place) => {
    if (place === atStep) return;
    atStep = place;
    for (const chart of charts) chart.show(place);
  };
  const drawFigures = () => {
    if (!figures.steps.length || !figures.charts.length) return;
    const host = document.getElementById("figures");
    const names = { learned: "The policy", learner: "The learner", machine: "The machine" };
    const each = figures.steps_a_point > 1 ? ` A point is the mean of up to ${figures.steps_a_point} steps.` : "";
    const bold = figures.steps.length > MARKED ? " Bold lines are running means." : "";
    host.append(h("h2", {}, "Over the steps"), h("p", { class: "lede" }, `Point at a chart, or move through it with the arrow keys, and all show that step.${bold}${each}`));
    const observer = new ResizeObserver((entries) => { for (const entry of entries) entry.target.chart.draw(); });
    const grid = (specs) => h("div", { class: "charts" }, specs.map((spec) => {
      const chart = new Chart(spec);
      chart.show(null);
      chart.svg.chart = chart;
      observer.observe(chart.svg);
      return chart.element;
    }));
    for (const [section, name] of Object.entries(names)) {
      const specs = figures.charts.filter((spec) => spec.section === section);
      if (specs.length) host.append(h("h3", { class: "section-name" }, name), grid(specs));
    }
    const others = figures.charts.filter((spec) => spec.section === "other");
    if (others.length) {
      const left = figures.num_left_out ? `, ${figures.num_left_out} more are left out` : "";
      host.append(h("details", { class: "more" }, h("summary", {}, `Every other metric (${others.length}${left})`), grid(others)));
    }
  };

  /* ---- episodes ---- */
  const sample = data.sample;
  const episodes = sample.episodes;
  const allCalls = (episode) => episode.turns.flatMap((turn) => turn.calls);
  const resultOf = (episode) => {
    const accuracy = episode.reward ? episode.reward.accuracy : null;
    if (episode.missing || accuracy === null || accuracy === undefined) return "missing";
    return accuracy >= 1 ? "right" : accuracy > 0 ? "partly" : "wrong";
  };
  const callsOf = (episode) => {
    const calls = allCalls(episode);
    return !calls.length ? "none" : calls.every((call) => call.outcome === "ok") ? "ok" : "failed";
  };
  let current = null, visibleOnes = [];
  const controls = {};
  const list = h("ol"), count = h("p", { class: "count", role: "status" }), reader = h("article", { class: "card episode", "aria-live": "off" });

  const drawEpisodes = () => {
    const host = document.getElementById("episodes");
    host.append(h("h2", { id: "episodes-title" }, "Episodes"));
    if (!episodes.length) {
      host.append(h("p", { class: "notice" }, sample.num_steps && !sample.max_episodes ? "This page was made without episodes." : "This run has no episodes to show."));
      return;
    }
    const of = sample.num_steps_shown === sample.num_steps ? `${sample.num_steps > 1 ? "all " : ""}${plural(sample.num_steps, "step")}` : `${sample.num_steps_shown} of ${sample.num_steps.toLocaleString("en")} steps`;
    host.append(h("p", { class: "lede" }, `${plural(episodes.length, "episode")} of ${of}; at most ${sample.max_episodes.toLocaleString("en")} are shown, taken evenly over the steps.`));
    const select = (name, label, options) => {
      controls[name] = h("select", { onchange: refresh }, options.map(([value, text]) => h("option", { value }, text)));
      return h("label", {}, label, controls[name]);
    };
    const range = (name, label) => {
      controls[name] = h("input", { type: "number", step: "0.1", placeholder: "any", oninput: refresh });
      return h("label", {}, label, controls[name]);
    };
    const distinct = (of_) => [...new Set(episodes.map(of_))];
    const steps = distinct((episode) => episode.step), types = distinct((episode) => episode.type).sort();
    const results = ["right", "partly", "wrong", "missing"].filter((result) => episodes.some((episode) => resultOf(episode) === result));
    const resultNames = { right: "right", partly: "partly right", wrong: "wrong", missing: "missing" };
    host.append(h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      select("step", "Step", [["", "all"], ...steps.map((step) => [step, step])]),
      select("type", "Question", [["", "all types"], ...types.map((type) => [type, { mcq: "multiple choice", tvg: "grounding", oe: "open-ended" }[type] ?? type])]),
      select("result", "Answer", [["", "any"], ...results.map((result) => [result, resultNames[result]])]),
      select("calls", "Calls", [["", "any"], ["ok", "all carried out"], ["failed", "some failed"], ["none", "none"]]),
      range("low", "Reward from"), range("high", "to"),
      select("order", "Order", [["", "as they came"], ["high", "highest reward"], ["low", "lowest reward"]]),
      h("button", { type: "button", class: "plain", onclick: () => { for (const control of Object.values(controls)) control.value = ""; refresh(); } }, "Clear")));
    host.append(h("div", { class: "browser" }, h("nav", { class: "card list", "aria-label": "Episodes" }, count, list), reader));
    list.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
      if (by) { event.preventDefault(); move(by, true); }
    });
    const asked = /^#episode-(\d+)$/.exec(location.hash);
    const merit = (episode) => (episode.reward && episode.reward.total !== null ? episode.reward.total + 0.1 * allCalls(episode).filter((call) => call.outcome === "ok").length : -Infinity);
    const best = episodes.reduce((found, episode, place) => (merit(episode) > merit(episodes[found]) ? place : found), 0);
    current = asked && episodes[+asked[1]] ? +asked[1] : best;
    refresh();
    if (asked) host.scrollIntoView();
  };

  const refresh = () => {
    const bound = (name, otherwise) => (controls[name].value === "" ? otherwise : +controls[name].value);
    const low = bound("low", -Infinity), high = bound("high", Infinity), free = low === -Infinity && high === Infinity;
    const total = (episode) => (episode.reward && episode.reward.total !== null ? episode.reward.total : null);
    visibleOnes = episodes.map((episode, place) => [episode, place]).filter(([episode]) => (
      (!controls.step.value || String(episode.step) === controls.step.value)
      && (!controls.type.value || episode.type === controls.type.value)
      && (!controls.result.value || resultOf(episode) === controls.result.value)
      && (!controls.calls.value || callsOf(episode) === controls.calls.value)
      && (free || (total(episode) !== null && total(episode) >= low - 1e-9 && total(episode) <= high + 1e-9))));
    const sign = { high: -1, low: 1 }[controls.order.value];
    if (sign) visibleOnes.sort(([one], [other]) => (total(one) === null) - (total(other) === null) || sign * (total(one) - total(other)));
    count.textContent = visibleOnes.length === episodes.length ? plural(episodes.length, "episode") : `${visibleOnes.length} of ${plural(episodes.length, "episode")}`;
    list.replaceChildren(...visibleOnes.map(([episode, place]) => h("li", {}, item(episode, place))));
    if (!visibleOnes.length) { reader.replaceChildren(h("p", { class: "lede" }, "No episode is like this.")); return; }
    if (!visibleOnes.some(([, place]) => place === current)) current = visibleOnes[0][1];
    open(current, false, false);
  };

  const item = (episode, place) => {
    const calls = allCalls(episode).length, result = resultOf(episode);
    const says = { right: "right", partly: `${fixed(episode.reward ? episode.reward.accuracy : null)} right`, wrong: "wrong", missing: "missing" }[result];
    return h("button", { type: "button", "data-place": place, "aria-current": place === current, onclick: () => open(place, false) },
      h("span", { class: `reward ${result === "missing" ? "missing" : ""}` }, fixed(episode.reward ? episode.reward.total : null)),
      h("span", { class: "q" }, episode.question.split("\n")[0] || episode.id),
      h("span", { class: "step" }, `step ${episode.step}`),
      h("span", { class: "meta" }, h("span", { class: result }, says), h("span", {}, episode.type), h("span", {}, `K ${episode.frame_budget ?? "–"}`), calls ? h("span", {}, plural(calls, "call")) : null));
  };

  const move = (by, focus) => {
    const at = visibleOnes.findIndex(([, place]) => place === current);
    const to = visibleOnes[at + by];
    if (to) open(to[1], focus);
  };

  const goToStep = (step) => {
    if (!episodes.length) return;
    const known = [...new Set(episodes.map((episode) => episode.step))];
    const near = known.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
    for (const control of Object.values(controls)) control.value = "";
    controls.step.value = String(near);
    refresh();
    document.getElementById("episodes").scrollIntoView();
  };

  const open = (place, focus, remember = true) => {
    current = place;
    for (const button of list.querySelectorAll("button")) {
      const is = +button.dataset.place === place;
      button.setAttribute("aria-current", is);
      if (is) {
        if (focus) button.focus({ preventScroll: true });
        const box = list.parentElement;
        const top = button.offsetTop - 44, bottom = button.offsetTop + button.offsetHeight;
        if (top < box.scrollTop) box.scrollTop = top;
        else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
      }
    }
    hideTip();
    reader.classList.remove("lit");
    reader.replaceChildren(...read(episodes[place], place).filter(Boolean));
    if (remember) history.replaceState(null, "", `#episode-${place}`);
  };

  const read = (episode, place) => {
    const at = visibleOnes.findIndex(([, other]) => other === place);
    const result = resultOf(episode);
    const bar = h("div", { class: "bar" }, h("span", { class: "id" }, `step ${episode.step} · ${episode.id}`),
      h("nav", { "aria-label": "Neighbours" },
        h("button", { type: "button", class: "plain", "aria-label": "Previous episode", disabled: at <= 0, onclick: () => move(-1, false) }, "←"),
        h("button", { type: "button", class: "plain", "aria-label": "Next episode", disabled: at < 0 || at >= visibleOnes.length - 1, onclick: () => move(1, false) }, "→")));
    const fact = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
    const prediction = episode.reward ? episode.reward.prediction : undefined;
    const says = { right: "right", partly: "partly right", wrong: "wrong", missing: "missing" }[result];
    const endings = { done: "finished", length: "cut off, turn too long", context: "context full", abort: "aborted" };
    const verdict = h("dl", { class: "verdict" },
      fact("True answer", episode.answer),
      episode.reward ? fact("Its answer", prediction ?? h("small", {}, "none"), " ", h("span", { class: result }, says)) : fact("Its answer", h("span", { class: "missing" }, "missing")),
      fact("Frame budget K", String(episode.frame_budget ?? "–"), h("small", {}, episode.frame_budget === 1 ? " frame" : " frames")),
      episode.finish ? fact("Ended", endings[episode.finish] ?? episode.finish, h("small", {}, episode.seconds ? ` after ${number(episode.seconds)} s` : "")) : null);
    const missing = episode.missing || episode.problem ? styled(h("p", { class: "notice" }, h("b", {}, episode.missing ? "This episode is missing" : "Note"), `: ${episode.problem || "no reason was recorded"}${episode.missing ? ". It counts neither for nor against the policy." : ""}`), { marginBottom: "20px" }) : null;
    const numbers = new Map();
    allCalls(episode).forEach((call, n) => numbers.set(call, n + 1));
    const turns = h("div", {}, episode.turns.map((turn, n) => readTurn(episode, turn, n, numbers)));
    const body = episode.turns.length || episode.reward ? h("div", { class: "reading" }, turns, aside(episode)) : null;
    const [stem, ...options] = episode.question.split("\n");
    const question = [h("h3", {}, stem || h("span", { class: "missing" }, "The question was not recorded")), options.length ? h("p", { class: "options" }, options.join("\n")) : null];
    return [bar, ...question, verdict, missing, timeline(episode, numbers), body];
  };

  const light = (selector, on) => { for (const element of reader.querySelectorAll(selector)) element.classList.toggle("hot", on); };

  const looked = (call, to) => {
    if (!call.window_s) return call.name || "unreadable";
    const [start, end] = call.window_s;
    return start === end ? `${call.name} ${clock(start)}` : `${clock(start)}${to}${clock(end)}`;
  };

  const timeline = (episode, numbers) => {
    const calls = allCalls(episode);
    const windows = calls.filter((call) => call.window_s);
    const spans = [episode.truth_s, episode.prediction_s].filter(Boolean);
    let videos = episode.videos;
    const guessed = !videos.length;
    if (guessed) {
      const end = Math.max(0, ...windows.map((call) => call.window_s[1]), ...spans.map((span) => span[1]));
      if (!end) return null;
      videos = [{ name: "", duration_s: end * 1.02, frames_s: [] }];
    }
    const host = h("div", { class: "timeline" }, h("h4", {}, videos.length > 1 ? "The videos" : "The video"));
    videos.forEach((video, n) => {
      const total = video.duration_s || 1;
      const percent = (seconds) => `${clamp((100 * seconds) / total, 0, 100)}%`;
      const film = h("div", { class: "film" });
      const area = (name, span) => film.append(styled(h("div", { class: `span ${name}` }), { left: percent(span[0]), width: `calc(${percent(span[1])} - ${percent(span[0])})` }));
      if (videos.length === 1) {
        if (episode.truth_s) area("truth", episode.truth_s);
        if (episode.prediction_s && episode.prediction_s[0] < episode.prediction_s[1]) area("said", episode.prediction_s);
      }
      for (const time of video.frames_s) film.append(styled(h("i", { class: "frame" }), { left: percent(time) }));
      for (const call of windows.filter((call_) => call_.video === n)) {
        const [start, end] = call.window_s, name = `.call-${numbers.get(call)}`;
        const about_ = `call ${numbers.get(call)}: ${looked(call, " to ")}, ${call.outcome}`;
        const button = h("button", {
          type: "button", class: `c-${OUTCOME_COLOURS[call.outcome] ?? "neutral"} call-${numbers.get(call)}`, "aria-label": about_,
          onmouseenter: (event) => { light(name, true); showTip(about_, event); }, onmouseleave: () => { light(name, false); hideTip(); },
          onfocus: () => light(name, true), onblur: () => light(name, false),
          onclick: () => reader.querySelector(`.callcard${name}`).scrollIntoView({ block: "nearest" }),
        }, String(numbers.get(call)));
        const lane = h("div", { class: "lane" }, styled(button, { left: `min(${percent(start)}, calc(100% - 20px))`, width: `calc(${percent(end)} - ${percent(start)})` }));
        film.append(lane);
      }
      const marks = h("div", { class: "ticks", "aria-hidden": "true" });
      const rounded = total >= 20;
      for (const part of [0, 0.25, 0.5, 0.75, 1]) marks.append(styled(h("span", {}, guessed && part === 1 ? "" : clock(part * total, rounded)), { left: `${100 * part}%` }));
      host.append(film, marks);
      const key = [];
      if (video.frames_s.length) key.push(h("span", {}, h("i", { class: "frames" }), `${plural(video.frames_s.length, "frame")} of the overview`));
      if (episode.truth_s && videos.length === 1) key.push(h("span", {}, h("i", { class: "truth" }), `true interval ${clock(episode.truth_s[0])}–${clock(episode.truth_s[1])}`));
      if (episode.prediction_s && videos.length === 1) key.push(h("span", {}, h("i", { class: "said" }), `its answer ${clock(episode.prediction_s[0])}–${clock(episode.prediction_s[1])}`));
      key.push(h("span", {}, guessed ? "its length is not recorded: drawn up to the last known time" : `${video.name}, ${clock(total)}`));
      host.append(h("p", { class: "about" }, key));
    });
    return host;
  };

  const creditLine = (credit) => `${spelled(credit.name)}: ${signed(credit.value)} of ${TERM_NAMES[credit.term] ?? spelled(credit.term)}`;

  const readTurn = (episode, turn, n, numbers) => {
    const sizes = new Map();
    for (const piece of turn.pieces) for (const credit of piece.credits ?? []) sizes.set(credit, (sizes.get(credit) ?? 0) + piece.text.length + (piece.left_out ?? 0));
    const text = h("div", { class: "said-text", dir: "auto" });
    for (const piece of turn.pieces) {
      if (piece.left_out) { text.append(h("span", { class: "cut" }, `${piece.left_out.toLocaleString("en")} characters are left out here`)); continue; }
      const credits = (piece.credits ?? []).slice().sort((one, other) => sizes.get(one) - sizes.get(other));
      const classes = [], says = [];
      if ("forced" in piece) { classes.push("forced"); says.push("given, not sampled"); }
      if ("tag" in piece) classes.push("tag");
      if ("call" in piece) classes.push("call", `call-${numbers.get(turn.calls[piece.call])}`);
      if (credits.length) {
        const lead = episode.credits[credits[0]];
        classes.push("credit", `c-${colourOf(lead.term)}`, ...credits.map((credit) => `credit-${credit}`));
        if ("tag" in piece || sizes.get(credits[0]) <= NARROW_CHARS) classes.push("narrow");
        says.push(...credits.map((credit) => creditLine(episode.credits[credit])));
      }
      const spoken = says.join("\n");
      text.append(h("span", { class: classes.join(" "), ...(spoken ? { onmousemove: (event) => showTip(spoken, event), onmouseleave: hideTip } : {}) }, piece.text));
    }
    const parts = [];
    if (turn.num_sampled) parts.push(`${plural(turn.num_sampled, "token")} sampled`);
    if (turn.mean_logp !== null && turn.mean_logp !== undefined) parts.push(`mean log-prob ${number(turn.mean_logp)}`);
    if (turn.versions && turn.versions.length) parts.push(`policy version ${turn.versions.join(", ")}`);
    if (turn.latency_s) parts.push(`${number(turn.latency_s)} s`);
    if (turn.finish && turn.finish !== "stop") parts.push(turn.finish === "length" ? "cut off" : turn.finish);
    return h("section", { class: "turn" },
      h("header", {}, h("h4", {}, `Turn ${n + 1}`), h("span", {}, parts.join(" · "))), text,
      turn.calls.length ? h("div", { class: "calls" }, turn.calls.map((call) => card(call, numbers.get(call)))) : null);
  };

  const card = (call, n) => {
    const seen = [];
    if (call.num_frames) seen.push(plural(call.num_frames, "frame"));
    if (call.num_tokens) seen.push(plural(call.num_tokens, "token"));
    if (call.latency_s) seen.push(`${number(call.latency_s)} s`);
    const name = `.call-${n}`;
    const told = !call.problem || call.response.includes(call.problem.replace(/^\w+: /, ""));
    return h("div", {
      class: `callcard c-${OUTCOME_COLOURS[call.outcome] ?? "neutral"} call-${n}`,
      onmouseenter: () => light(name, true), onmouseleave: () => light(name, false),
    },
      h("div", { class: "top" }, `${n} · ${looked(call, "–")}`, call.outcome === "ok" ? null : h("span", { class: "wrong" }, call.outcome.replace("_", " ")), h("em", {}, seen.join(" · "))),
      h("p", {}, call.response), told ? null : h("p", { class: "problem" }, call.problem));
  };

  const aside = (episode) => {
    const { reward } = episode, host = h("aside", { class: "aside", "aria-label": "Reward" });
    if (reward) {
      let pinned = null;
      const highlight = (credit) => {
        reader.classList.toggle("lit", credit !== null);
        for (const span of reader.querySelectorAll(".said-text .on")) span.classList.remove("on");
        if (credit !== null) for (const span of reader.querySelectorAll(`.said-text .credit-${credit}`)) span.classList.add("on");
      };
      const chips = (term) => {
        const own = episode.credits.map((credit, n) => [credit, n]).filter(([credit]) => credit.term === term);
        if (!own.length) return null;
        return h("div", { class: `credits c-${colourOf(term)}` }, own.map(([credit, n]) => {
          const button = h("button", {
            type: "button", "aria-pressed": "false",
            onmouseenter: () => highlight(n), onmouseleave: () => highlight(pinned), onfocus: () => highlight(n), onblur: () => highlight(pinned),
            onclick: () => {
              pinned = pinned === n ? null : n;
              for (const other of host.querySelectorAll(".credits button")) other.setAttribute("aria-pressed", "false");
              button.setAttribute("aria-pressed", pinned === n);
              highlight(pinned);
            },
          }, `${spelled(credit.name)} ${signed(credit.value)}`);
          return button;
        }));
      };
      const row = (name, value, kind, term) => h("div", { class: `term ${kind} ${term ? `c-${colourOf(term)}` : ""}` }, h("span", {}, term ? h("i") : null, name), h("span", { class: "num" }, fixed(value)));
      host.append(h("div", { class: "terms" }, h("h4", {}, "Reward"),
        row("accuracy", reward.accuracy, "", "accuracy"), chips("accuracy"),
        row("format", reward.format, "", null),
        row("base", reward.base, "sub", "base"), chips("base"), row("anchor", reward.anchor, "sub", "anchor"), chips("anchor"),
        row("think first", reward.think_first, "sub", "think_first"), chips("think_first"), row("balanced", reward.balanced, "sub", "balanced"), chips("balanced"),
        row("tool", reward.tool, "", "tool"), chips("tool"),
        episode.own.map((term) => [row(spelled(term.name), term.weight * term.value, "", term.name), chips(term.name)]),
        row("total", reward.total, "total", null),
        episode.credits.length ? h("p", { class: "hint" }, "Point at a credit to see the characters that earned it; press to keep them lit.") : null));
    }
    const { advantage } = episode;
    if (advantage) {
      const row = (name, value) => h("div", { class: "term" }, h("span", {}, name), h("span", { class: "num" }, typeof value === "number" ? signed(+value.toFixed(3)) : "–"));
      host.append(h("div", { class: "terms" }, h("h4", {}, "Advantage"), row("every token", advantage.sequence), row("on the tags, anchor", advantage.anchor),
        Object.entries(advantage.properties ?? {}).map(([name, value]) => row(`where ${spelled(name)} is decided`, value)),
        advantage.keep ? null : h("p", { class: "hint" }, "Not trained on.")));
    }
    return host;
  };

  const drawFoot = () => {
    document.getElementById("foot").append(h("p", {},
      "f_τ: format reward by one fixed rule for every run. κ: tool calls per episode. K: frames of the overview. "
      + "Texts of the model are shown as it wrote them; signs that have no shape, or turn the text around them, are spelled out."));
  };

  drawHead();
  drawHeadlines();
  drawFigures();
  drawEpisodes();
  drawFoot();
})();
