/* ---- the page, from top to bottom ---- */
const EPISODES = "f_τ: format reward by one fixed rule for every run, with partial credit; parseable: episodes that the grammar accepts. κ: executed tool calls per episode. K: frames in the overview. ";
const FOOT = {
  training: EPISODES,
  imitation: "The first trace of every step. Framed text is imitated; the rest is the prompt or tool output. ",
  evaluation: EPISODES,
  question: "",
};
document.body.classList.toggle("comparing", comparing);
drawHead();
drawHeadlines();
drawCells();
drawFigures();
drawEpisodes();
document.getElementById("foot").append(h("p", {}, FOOT[runs[0].about.kind],
  "Model output and data are shown unchanged, except that invisible characters and characters that change the text direction are spelled out."));
