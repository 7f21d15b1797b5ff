/* ---- the page, from top to bottom ---- */
const FOOT = {
  training: "f_τ: format reward by one fixed rule for every run. κ: tool calls per episode. K: frames of the overview. ",
  imitation: "Of every step the first trace that was learnt from. What is framed was imitated, the rest was shown or told. ",
  evaluation: "f_τ: format reward by one fixed rule for every run. κ: tool calls per episode. K: frames of the overview. ",
  question: "",
};
document.body.classList.toggle("comparing", comparing);
drawHead();
drawHeadlines();
drawCells();
drawFigures();
drawEpisodes();
document.getElementById("foot").append(h("p", {}, FOOT[runs[0].about.kind],
  "Texts of the model are shown as it wrote them; signs that have no shape, or turn the text around them, are spelled out."));
