// Bars: HBM by owner and phase, staleness of trained groups, lengths of responses.

const OWNER_COLOURS = {
  weights: "#2f6fde",
  gradients: "#e07b1f",
  optimizer: "#8458c9",
  kv: "#2a9d5c",
  activations: "#c23b5a",
  buckets: "#d0c14a",
};

function ownerColour(owner) {
  return Object.hasOwn(OWNER_COLOURS, owner) ? OWNER_COLOURS[owner] : "#767f8f";
}

/** Owners reach their maximum at different times, so their sum may exceed the peak, which has its own mark. */
function memoryOf(run) {
  const { phases, owners, by_owner: byOwner, peak, capacity } = run.memory;
  const sums = phases.map((phase) => byOwner[phase].reduce((sum, held) => sum + held, 0));
  const scale = Math.max(capacity ?? 0, ...Object.values(peak), ...sums) || 1;
  const width = (count) => `${(100 * count) / scale}%`;
  const bars = phases.map((phase) => {
    const parts = owners.map((owner, index) => {
      const held = byOwner[phase][index];
      const style = { width: width(held), background: ownerColour(owner) };
      return held ? element("span", { style, title: `${phase}: ${owner} ${bytes(held)}` }) : null;
    });
    const mark = element("span", { class: "peak", style: { left: width(peak[phase]) }, title: "peak" });
    const full = capacity ? ` (${percent(peak[phase] / capacity, 1)})` : "";
    return box("bar-row", span(phase), box("bar", ...parts, mark), span(`${bytes(peak[phase])}${full}`));
  });
  const rows = owners.map((owner, index) => [
    span(swatch(ownerColour(owner)), owner),
    ...phases.map((phase) => bytes(byOwner[phase][index])),
  ]);
  rows.push(["peak", ...phases.map((phase) => bytes(peak[phase]))]);
  const of = capacity ? `of ${bytes(capacity)} on the smallest card` : "the capacity of a card was not recorded";
  return [
    quiet(`Maximum of each owner on the fullest card, with the peak of the phase; ${of}.`),
    ...bars,
    table(["", ...phases], rows),
  ];
}

/** Vertical bars. `columns`: a label for each place, and in it one [value, colour, title] for each bar. */
function columnChart(columns) {
  const most = Math.max(...columns.flatMap(({ bars }) => bars.map(([value]) => value))) || 1;
  const bar = ([value, colour, title]) =>
    element("i", { title, style: { height: `${(100 * value) / most}%`, background: colour } });
  const drawn = columns.map(({ bars }) => box("column", ...bars.map(bar)));
  const step = Math.ceil(columns.length / 8);
  const labels = columns.map(({ label }, index) => span(index % step ? "" : label));
  return box("histogram", box("columns", ...drawn), box("labels", ...labels));
}

function stalenessOf(run) {
  const { lag, groups } = run.staleness;
  const total = groups.reduce((sum, count) => sum + count, 0);
  const share = (count) => percent(count / total, 1);
  const columns = groups.map((count, index) => ({
    label: String(lag[index]),
    bars: [[count, "#2f6fde", `lag ${lag[index]}: ${count} groups, ${share(count)}`]],
  }));
  const rows = groups.map((count, index) => [String(lag[index]), count.toLocaleString("en"), share(count)]);
  const ended = Object.entries(run.ended).map(([how, count]) => `${count.toLocaleString("en")} ${how}`);
  const bound = run.max_staleness === null ? "" : ` The bound is ${run.max_staleness}.`;
  return [
    quiet(`Trained groups by policy versions from admission to training.${bound}`),
    columnChart(columns),
    table(["lag", "groups", "share"], rows),
    element("p", {}, `Groups ended as: ${ended.join(", ")}.`),
  ];
}

const LENGTH_SETS = [
  ["first", "first tenth of the steps", "#e07b1f"],
  ["last", "last tenth of the steps", "#2f6fde"],
];

function lengthsOf(run) {
  const lengths = run.lengths;
  const sum = (counts) => counts.reduce((total, count) => total + count, 0) || 1;
  const totals = Object.fromEntries(LENGTH_SETS.map(([name]) => [name, sum(lengths[name])]));
  const columns = lengths.from.map((from, index) => {
    const range = lengths.width === 1 ? `${from}` : `${from}–${from + lengths.width - 1}`;
    const bars = LENGTH_SETS.map(([name, label, colour]) => {
      const share = lengths[name][index] / totals[name];
      return [share, colour, `${range} tokens: ${percent(share, 1)} of responses, ${label}`];
    });
    return { label: String(from), bars };
  });
  const legend = LENGTH_SETS.map(([, label, colour]) => span(swatch(colour), label));
  const measures = ["responses", "mean", "p50", "p90", "p99", "max"];
  const sets = Object.keys(lengths.summary);
  const shown = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(1));
  const rows = measures.map((measure) => [measure, ...sets.map((name) => shown(lengths.summary[name][measure]))]);
  rows.push(["tokens of the longest tenth", ...sets.map((name) => percent(lengths.summary[name].tail_share, 1))]);
  const names = { all: "all steps", first: "first tenth", last: "last tenth" };
  const limit = run.max_length === null ? "" : ` The limit is ${run.max_length.toLocaleString("en")}.`;
  return [
    quiet(`Tokens of the responses of trained groups, as a share of responses.${limit}`),
    element("p", { class: "legend" }, ...legend),
    columnChart(columns),
    table(["", ...sets.map((name) => names[name])], rows),
    tailNote(run),
  ];
}

/** How much of generation passes while few samples are still under way. */
function tailNote(run) {
  const sum = (name) => (run.curves.metrics[name] ?? []).reduce((total, value) => total + (value ?? 0), 0);
  const [tail, all] = [sum("timing_s/gen_tail"), sum("timing_s/gen")];
  if (!all) return null;
  return element("p", {}, `The tail is ${percent(tail / all, 1)} of the time of generation (timing_s/gen_tail).`);
}
