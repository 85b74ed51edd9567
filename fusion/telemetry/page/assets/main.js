// Puts the page together from the data in the element #data (fusion/telemetry/page/run_data.py).

function headline(run, index, several) {
  const total = run.total_steps && run.total_steps !== run.steps ? ` of ${run.total_steps}` : "";
  const steps = run.total_steps === null ? "" : `: ${run.steps}${total} steps in ${duration(run.wall_s)}`;
  const facts = [run.outcome + steps];
  if (run.reward_start !== undefined) {
    const of = run.reward_window > 1 ? ` (means of ${run.reward_window} steps)` : "";
    facts.push(`reward ${run.reward_start.toFixed(3)} → ${run.reward_end.toFixed(3)}${of}`);
  }
  const [before, after] = ["before", "after"].map((when) => heldOut(run, when));
  if (before !== undefined) facts.push(`held-out ${before.toFixed(3)}${after === undefined ? "" : ` → ${after.toFixed(3)}`}`);
  if (run.typical) facts.push(`typical step ${seconds(run.typical.us / 1e6)} s, bubbles ${percent(run.typical.bubble)}`);
  const name = element("h1", {}, several ? swatch(runColour(index)) : null, run.name);
  const cautions = run.cautions.map((caution) => element("li", {}, caution));
  const traces = run.profiles.length ? element("p", {}, `profiler traces: ${run.profiles.join(", ")}`) : null;
  const listed = cautions.length ? element("ul", { class: "cautions" }, ...cautions) : null;
  return element("header", { class: "run" }, name, element("p", {}, facts.join(" · ")), traces, listed);
}

function heldOut(run, when) {
  const values = run.curves.metrics[`val/rewards/${when}`] ?? [];
  return values.findLast((value) => value !== null) ?? undefined;
}

/** A section with a part for each run that has the data, side by side where there is room. */
function perRun(id, title, runs, has, contents) {
  const having = runs.filter(has);
  if (!having.length) return null;
  const parts = having.map((run) => {
    const index = runs.indexOf(run);
    const name = runs.length > 1 ? element("h3", {}, swatch(runColour(index)), run.name) : null;
    return box("part", name, ...contents(run));
  });
  return section(id, title, box(runs.length > 1 ? "parts" : "", ...parts));
}

/** A table of which every cell says where it is from: measured, simulated, an input, … */
function comparisonSection(comparison) {
  if (!comparison) return null;
  const cell = ({ text, from }) => span(text, from ? element("small", { class: "quiet" }, ` ${from}`) : null);
  const notes = comparison.notes.map(quiet);
  return section("comparison", comparison.title, table(comparison.header, comparison.rows.map((row) => row.map(cell))), ...notes);
}

/** Draws what is not near the screen, too: it is on paper. */
function drawAll() {
  for (const chart of charts) if (!chart.plot) chart.draw();
  drawStrips();
}

function build({ runs, differences, typical, comparison, refresh_s: refreshSeconds }) {
  view.restore();
  const page = document.getElementById("page");
  const sections = [
    comparisonSection(comparison),
    typicalSection(typical),
    curvesSection(runs),
    perRun("cards", "Where every card's time went", runs, (run) => run.cards, cardsOf),
    perRun("memory", "HBM by owner and phase", runs, (run) => run.memory, memoryOf),
    perRun("staleness", "Staleness", runs, (run) => run.staleness, stalenessOf),
    perRun("lengths", "Response lengths", runs, (run) => run.lengths, lengthsOf),
    perRun("samples", "Samples", runs, (run) => run.samples.now.length, samplesOf),
    settingsSection(runs, differences),
  ].filter(Boolean);
  const links = sections.map((part) => element("a", { href: `#${part.id}` }, part.querySelector("h2").textContent));
  const heads = runs.map((run, index) => headline(run, index, runs.length > 1));
  page.append(box("heads", ...heads), element("nav", {}, ...links), ...sections);
  new ResizeObserver(() => {
    resizeCharts();
    drawStrips();
  }).observe(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    redrawCharts();
    drawStrips();
  });
  window.addEventListener("beforeprint", drawAll);
  if (refreshSeconds !== null) setInterval(() => document.hidden || location.reload(), 1000 * refreshSeconds);
}

build(JSON.parse(document.getElementById("data").textContent));
