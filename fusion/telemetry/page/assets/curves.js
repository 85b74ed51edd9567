// Curves of metrics over steps or wall time, all runs in one chart, drawn by uPlot.

const KEY_METRICS = [
  "critic/rewards/mean",
  "response_length/mean",
  "actor/entropy",
  "actor/kl_loss",
  "actor/ppo_kl",
  "actor/grad_norm",
  "actor/loss",
  "training/rollout_logprobs_diff_mean",
  "staleness/mean",
  "perf/tokens_per_s",
  "perf/utilisation",
  "timing_s/step",
  "timing_s/gen",
  "timing_s/train",
  "timing_s/switch",
];
const CHART_HEIGHT = 190;
const charts = new Set();

/** Exponential moving average without the bias towards its start; gaps stay gaps. */
function smoothed(values, weight) {
  if (!weight) return values;
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** The values of a metric of all runs on one axis: undefined where a run has no such point, null for a gap. */
function aligned(runs, name, axis) {
  const positions = [...new Set(runs.flatMap((run) => run.curves[axis]))].sort((a, b) => a - b);
  const index = new Map(positions.map((position, at) => [position, at]));
  const columns = runs.map((run) => {
    const column = new Array(positions.length);
    const values = run.curves.metrics[name] ?? [];
    values.forEach((value, at) => (column[index.get(run.curves[axis][at])] = value));
    return column;
  });
  return [positions, ...columns];
}

class Chart {
  constructor(runs, name) {
    [this.runs, this.name, this.plot] = [runs, name, null];
    this.readout = element("output", { class: "readout" });
    this.box = box("plot");
    const title = element("figcaption", {}, element("b", {}, name), this.readout);
    this.figure = element("figure", { class: "chart", "data-metric": name }, title, this.box);
    nearby.observe(this.figure);
    charts.add(this);
    onScreen.set(this.figure, () => this.draw());
    this.read(null);
  }

  get axis() {
    return view.values.axis ?? "step";
  }

  /** [positions, raw values by run, smoothed values by run]; without smoothing the raw values are drawn as lines. */
  data() {
    const weight = view.values.smoothing ?? 0;
    const [positions, ...raw] = (this.raw = aligned(this.runs, this.name, this.axis));
    if (!weight) return [positions, ...raw];
    return [positions, ...raw, ...raw.map((values) => smoothed(values, weight))];
  }

  draw() {
    if (!this.box.clientWidth) return;
    this.plot?.destroy();
    const weight = view.values.smoothing ?? 0;
    const line = (index, faint) => ({
      spanGaps: this.name.startsWith("val"), // an evaluation is not of every step
      stroke: runColour(index) + (faint ? "40" : ""),
      width: faint ? 1 : 1.75,
      points: faint ? { show: false } : {},
    });
    const series = this.runs.map((_, index) => line(index, weight > 0));
    if (weight) series.push(...this.runs.map((_, index) => line(index, false)));
    const axis = {
      stroke: themed("--quiet"),
      grid: { stroke: themed("--grid"), width: 1 },
      ticks: { stroke: themed("--grid"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    this.plot = new uPlot(
      {
        width: this.box.clientWidth,
        height: CHART_HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: "curves" }, drag: { x: true, y: false } },
        scales: { x: { time: false } },
        series: [{}, ...series],
        axes: [
          { ...axis, size: 28, values: (_, ticks) => ticks.map(tick) },
          { ...axis, size: 58, values: (_, ticks) => ticks.map(tick) },
        ],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)] },
      },
      this.data(),
      this.box,
    );
    this.read(null);
  }

  /** Writes the values of all runs at a point of the axis; null: their last ones. */
  read(at) {
    const [positions, ...columns] = this.raw ?? aligned(this.runs, this.name, this.axis);
    const last = (column) => column.findLast((value) => value !== null && value !== undefined);
    const values = columns.map((column) => (at === null || at === undefined ? last(column) : column[at]));
    const where = at === null || at === undefined ? "last" : this.position(positions[at]);
    const mark = (index) => (this.runs.length > 1 ? swatch(runColour(index)) : null);
    const parts = values.map((value, index) => span(mark(index), String(value ?? "–")));
    this.readout.replaceChildren(element("span", { class: "where" }, where), ...parts);
  }

  position(value) {
    return this.axis === "step" ? `step ${value}` : duration(value);
  }
}

/** Charts are drawn when they come near the screen: a page has more than a hundred. */
const onScreen = new WeakMap();
const nearby = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      nearby.unobserve(entry.target);
      onScreen.get(entry.target)?.();
    }
  },
  { rootMargin: "300px" },
);

function redrawCharts() {
  for (const chart of charts) {
    chart.raw = undefined;
    if (chart.plot) chart.draw();
    else chart.read(null);
  }
}

function resizeCharts() {
  for (const chart of charts) {
    const width = chart.box.clientWidth;
    if (chart.plot && width && width !== chart.plot.width) chart.plot.setSize({ width, height: CHART_HEIGHT });
  }
}

function curvesSection(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.metrics)))].sort();
  if (!names.length) return null;
  const has = (name) => names.includes(name);
  const evaluations = names.filter((name) => /^val(-core)?\/(?!rewards\/(before|after)$)/.test(name));
  const key = [...evaluations.filter((name) => !/\/(low|high)$/.test(name)), ...KEY_METRICS];
  const shown = key.some(has) ? key.filter(has) : names.slice(0, 6);
  const every = Math.max(...runs.map((run) => run.curves.every));
  const note = every > 1 ? quiet(`A point is the mean of up to ${every} steps.`) : null;
  return section("curves", "Curves", curveControls(), note, chartsOf(runs, shown), allMetrics(runs, names));
}

function chartsOf(runs, names) {
  return box("charts", ...names.map((name) => new Chart(runs, name).figure));
}

function curveControls() {
  const weight = view.values.smoothing ?? 0;
  const shown = element("output", {}, weight.toFixed(2));
  const slider = element("input", {
    type: "range",
    id: "smoothing",
    min: "0",
    max: "0.99",
    step: "0.01",
    value: String(weight),
    input: (event) => {
      view.set("smoothing", Number(event.target.value));
      shown.textContent = view.values.smoothing.toFixed(2);
      redrawCharts();
    },
  });
  const change = (event) => {
    view.set("axis", event.target.value);
    redrawCharts();
  };
  const option = (value, text) => element("option", { value }, text);
  const axis = element("select", { id: "axis", change }, option("step", "step"), option("wall_s", "wall time (s)"));
  axis.value = view.values.axis ?? "step";
  return box(
    "controls",
    element("label", {}, "smoothing ", slider, shown),
    element("label", {}, "over ", axis),
    element("span", { class: "quiet" }, "drag to zoom, double-click to reset"),
  );
}

/** All metrics, by their first word; the charts of a group are made when it is opened. */
function allMetrics(runs, names) {
  const groups = new Map();
  for (const name of names) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const list = element("div", {});
  const show = (filter) => {
    for (const chart of [...charts].filter((drawn) => list.contains(drawn.figure))) {
      chart.plot?.destroy();
      charts.delete(chart);
    }
    if (filter) {
      list.replaceChildren(chartsOf(runs, names.filter((name) => name.includes(filter)).slice(0, 60)));
      return;
    }
    list.replaceChildren(
      ...[...groups].map(([group, members]) => {
        const figures = chartsOf(runs, []);
        const fill = (event) => {
          if (event.target.open && !figures.childElementCount) figures.append(...chartsOf(runs, members).children);
        };
        const summary = element("summary", {}, `${group} (${members.length})`);
        return remembered(`metrics/${group}`, { toggle: fill }, summary, figures);
      }),
    );
  };
  const filter = element("input", {
    type: "search",
    id: "filter",
    placeholder: "find a metric",
    "aria-label": "find a metric",
    value: view.values.filter ?? "",
    input: (event) => {
      view.set("filter", event.target.value.trim());
      show(view.values.filter);
    },
  });
  show(view.values.filter ?? "");
  return element("div", {}, element("h3", {}, `All ${names.length} metrics`), filter, list);
}
