/* ---- an episode on the timelines of its videos and of the clock ---- */
const THUMB_PX = 66; // with the gap to the next one
const allCalls = (episode) => episode.turns.flatMap((turn) => turn.calls);
const looked = (call, to) => {
  if (!call.window_s) return call.name || "unreadable";
  const [start, end] = call.window_s;
  return start === end ? `${call.name} ${clock(start)}` : `${clock(start)}${to}${clock(end)}`;
};
const colorOfCall = (call) => OUTCOME_COLORS[call.outcome] ?? "neutral";
const shotsOf = (holder) => (holder.pictures ? holder.pictures.map((place, n) => [place, holder.frames_s[n]]) : []);
const shot = ([place, time]) => h("span", {
  class: "shot", onmousemove: (event) => showTip(clock(time), event, picture(place)), onmouseleave: hideTip,
}, picture(place, time));

const overviewStrip = (video, total) => { // each at its time, if it does not overlap the one before
  const host = h("div", { class: "shots" });
  new ResizeObserver(([{ contentRect: { width } }]) => {
    let free = 0;
    host.replaceChildren(...shotsOf(video).flatMap((one) => {
      const left = clamp((width * one[1]) / total - THUMB_PX / 2, 0, width - THUMB_PX);
      if (left < free) return [];
      free = left + THUMB_PX;
      return [styled(shot(one), { left: `${left}px` })];
    }));
  }).observe(host);
  return host;
};

const film = (root, episode, numbers) => {
  const windows = allCalls(episode).filter((call) => call.window_s);
  const spans = [episode.truth_s, episode.prediction_s].filter(Boolean);
  const end = Math.max(0, ...windows.map((call) => call.window_s[1]), ...spans.map((span) => span[1]));
  const guessed = !episode.videos.length;
  if (guessed && !end) return null;
  const videos = guessed ? [{ name: "", duration_s: end * 1.02, frames_s: [] }] : episode.videos;
  return h("div", { class: "timeline" }, h("h4", {}, videos.length > 1 ? "The videos" : "The video"),
    videos.map((video, n) => filmOf(root, episode, video, windows.filter((call) => call.video === n), numbers, guessed)));
};
const filmOf = (root, episode, video, calls, numbers, guessed) => {
  const total = video.duration_s || 1, alone = episode.videos.length < 2;
  const at = (time) => `${clamp((100 * time) / total, 0, 100)}%`;
  const host = h("div", { class: "film", onmousemove: (event) => scrub(event, video, total), onmouseleave: hideTip });
  const area = (name, span) => host.append(styled(h("div", { class: `span ${name}` }), { left: at(span[0]), width: `calc(${at(span[1])} - ${at(span[0])})` }));
  if (alone && episode.truth_s) area("truth", episode.truth_s);
  if (alone && episode.prediction_s && episode.prediction_s[0] < episode.prediction_s[1]) area("said", episode.prediction_s);
  if (video.pictures) host.append(overviewStrip(video, total));
  host.append(h("div", { class: "frames" }, video.frames_s.map((time) => styled(h("i", { class: "frame" }), { left: at(time) }))));
  host.append(...calls.map((call) => lane(root, call, numbers.get(call), at)));
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => styled(h("span", {}, guessed && part === 1 ? "" : clock(part * total, total >= 20)), { left: `${100 * part}%` }));
  return [host, h("div", { class: "ticks", "aria-hidden": "true" }, marks), filmKey(episode, video, calls, guessed, alone)];
};
const scrub = (event, video, total) => {
  const shots = shotsOf(video);
  if (!shots.length || event.target.closest(".lane, .shot")) return;
  const box = event.currentTarget.getBoundingClientRect(), time = ((event.clientX - box.left) / box.width) * total;
  const [place, at] = shots.reduce((best, other) => (Math.abs(other[1] - time) < Math.abs(best[1] - time) ? other : best));
  showTip(clock(at), event, picture(place));
};
const filmKey = (episode, video, calls, guessed, alone) => {
  const key = [];
  if (video.frames_s.length) key.push(h("span", {}, h("i", { class: "frames" }), `${plural(video.frames_s.length, "overview frame")}`));
  if (alone && episode.truth_s) key.push(h("span", {}, h("i", { class: "truth" }), `true interval ${clock(episode.truth_s[0])}–${clock(episode.truth_s[1])}`));
  if (alone && episode.prediction_s) key.push(h("span", {}, h("i", { class: "said" }), `predicted interval ${clock(episode.prediction_s[0])}–${clock(episode.prediction_s[1])}`));
  key.push(h("span", { title: video.path }, guessed ? "length not recorded: drawn up to the last known time" : `${[video.name, video.file].filter((name, n, names) => name && names.indexOf(name) === n).join(", ")}, ${clock(video.duration_s)}`));
  const bare = [video, ...calls].filter((holder) => holder.frames_s.length && !holder.pictures).length;
  if (data.pictures && bare) key.push(h("span", { class: "missing" }, `pictures of ${plural(bare, "strip")} left out`));
  return h("p", { class: "about" }, key);
};
const light = (root, name, on) => { for (const element of root.querySelectorAll(name)) element.classList.toggle("hot", on); };
const lane = (root, call, n, at) => {
  const [start, end] = call.window_s, name = `.call-${n}`, says = `call ${n}: ${looked(call, " to ")}, ${spelled(call.outcome)}`;
  const button = h("button", {
    type: "button", class: `c-${colorOfCall(call)} call-${n}`, "aria-label": says,
    onmouseenter: (event) => { light(root, name, true); showTip(says, event); }, onmouseleave: () => { light(root, name, false); hideTip(); },
    onfocus: () => light(root, name, true), onblur: () => light(root, name, false),
    onclick: () => root.querySelector(`.callcard${name}`).scrollIntoView({ block: "nearest" }),
  }, String(n));
  return h("div", { class: "lane" }, styled(button, { left: `min(${at(start)}, calc(100% - ${13 + 7 * String(n).length}px))`, width: `calc(${at(end)} - ${at(start)})` }));
};

/* When each part happened; parallel calls of a turn are below each other. */
const waterfall = (episode, numbers) => {
  const parts = episode.turns.flatMap((turn, n) => [
    { name: `turn ${n + 1}`, of: turn, color: "ink" },
    ...turn.calls.map((call) => ({ name: `call ${numbers.get(call)}`, of: call, color: colorOfCall(call), turn: n })),
  ]).filter(({ of }) => known(of.started_s) && known(of.latency_s));
  if (!parts.some(({ of }) => of.latency_s > 0)) return null;
  const from = -(episode.overview_s ?? 0), to = Math.max(...parts.map(({ of }) => of.started_s + of.latency_s));
  const at = (time) => (100 * (time - from)) / (to - from);
  const row = ({ name, of, color, turn }) => h("div", { class: `when ${known(turn) ? "of-call" : ""}` }, h("span", {}, name),
    h("div", {}, styled(h("i", { class: `c-${color}` }), { left: `${at(of.started_s)}%`, width: `${at(of.started_s + of.latency_s) - at(of.started_s)}%` })),
    h("small", {}, seconds(of.latency_s)));
  const overview = episode.overview_s ? [row({ name: "overview", of: { started_s: from, latency_s: episode.overview_s }, color: "neutral" })] : [];
  return h("div", { class: "waterfall" }, h("h4", {}, "Time"), overview, parts.map(row), h("p", { class: "about" }, sideBySide(episode), h("span", {}, `${seconds(to - from)} in total`)));
};
const sideBySide = (episode) => episode.turns.filter((turn) => turn.calls.filter((call) => known(call.started_s)).length > 1).map((turn) => {
  const calls = turn.calls.filter((call) => known(call.started_s));
  const took = Math.max(...calls.map((call) => call.started_s + call.latency_s)) - Math.min(...calls.map((call) => call.started_s));
  return h("span", {}, `${plural(calls.length, "call")} in parallel: ${seconds(took)}; sequentially ${seconds(calls.reduce((sum, call) => sum + call.latency_s, 0))}`);
});
