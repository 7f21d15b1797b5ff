/* ---- building blocks ----
   Model output arrives as JSON and becomes text nodes: nothing here builds markup from strings. Objects have no
   prototype, because a metric, a term or a split may be called "constructor" or "__proto__". */
const withoutPrototype = (_, value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.setPrototypeOf(value, null) : value);
const parsed = (text) => JSON.parse(text, withoutPrototype);
const data = parsed(document.getElementById("data").textContent);
const { runs, rows } = data;
const comparing = runs.length > 1;
const RUN_NAMES = runs.map((_, run) => (run < 26 ? String.fromCharCode(65 + run) : String(run + 1)));
const byColor = runs.length > 2; // a color per run and dashes per line; two runs keep the metrics' colors
const RUN_COLORS = ["blue", "red", "green", "orange", "pink", "sky", "ink", "neutral"];
const runColor = (run) => RUN_COLORS[run % RUN_COLORS.length];
const SVG = "http://www.w3.org/2000/svg";
const OUTCOME_COLORS = { __proto__: null, ok: "green", imitated: "blue", invalid: "red", unknown_tool: "red", error: "red", timeout: "orange" };

const known = (value) => value !== null && value !== undefined;
const fill = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") && known(value)) element.setAttribute(name, String(value)); // because false has a meaning
    else if (known(value) && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => known(child) && child !== false));
  return element;
};
const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const styled = (element, styles) => (Object.assign(element.style, styles), element);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const spelled = (name) => name.replaceAll("_", " ");
const distinct = (values) => [...new Set(values)];

const number = (value) => {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return value.toExponential(1).replace("+", "").replaceAll("-", "−");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(digits));
  return text.replace("-", "−");
};
const fixed = (value) => (known(value) ? value.toFixed(2).replace("-", "−") : "–");
const short = (value) => (known(value) && Math.abs(value) >= 0.1 && Math.abs(value) < 1000 ? fixed(value) : number(value));
const signed = (value) => (value > 0 ? "+" : "") + number(value);
const percent = (share) => (100 * share).toFixed(1);
const seconds = (value) => (value < 0.1 ? `${number(1000 * value)} ms` : `${number(+value.toFixed(2))} s`);
const clock = (time, whole) => { // with tenths if they are not 0
  const tenths = whole ? 10 * Math.round(time) : Math.round(10 * time);
  const rest = tenths % 600, shown = rest % 10 ? (rest / 10).toFixed(1) : String(rest / 10);
  return `${Math.floor(tenths / 600)}:${rest < 100 ? "0" : ""}${shown}`;
};

const image = (content, alt) => h("img", { src: `data:image/webp;base64,${content}`, alt, decoding: "async" });
const picture = (place, time) => image(data.pictures.data[place], time === undefined ? "" : `at ${clock(time)}`);
const runMark = (run) => (comparing ? h("b", { class: byColor ? `run c-${runColor(run)} of-color` : `run run-${run}` }, RUN_NAMES[run]) : null);

const tip = document.getElementById("tip");
const showTip = (text, event, shown = null) => {
  tip.replaceChildren(...[shown, text].filter(known));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const below = event.clientY + 18 + box.height < innerHeight;
  tip.style.left = `${clamp(event.clientX - box.width / 2, 8, innerWidth - box.width - 8)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - box.height - 14}px`;
};
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });
