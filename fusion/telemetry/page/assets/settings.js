// The config of the runs: what differs between them, and every key.

function settingsSection(runs, differences) {
  const names = runs.map((run) => run.name);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  if (!keys.length) return null;
  const cell = (value) => element("code", {}, value ?? "–");
  const tableOf = (rows) => table(["key", ...names], rows);
  const all = tableOf(keys.map((key) => [key, ...runs.map((run) => cell(run.config[key]))]));
  const parts = [];
  if (runs.length > 1) {
    const rows = differences.map(({ key, values }) => [key, ...values.map(cell)]);
    const differing = rows.length ? tableOf(rows) : element("p", {}, "Nothing: the configs are equal.");
    parts.push(element("h3", {}, "What differs"), differing);
  }
  parts.push(remembered("config", {}, element("summary", {}, `All ${keys.length} keys`), all));
  return section("config", "Config", ...parts);
}
