// Samples: the first step's, the last step's, and those with the highest and the lowest rewards.

const KINDS_OF_SAMPLES = [
  ["before", "Before: first step"],
  ["now", "Now: last step"],
  ["best", "Best rewards"],
  ["worst", "Worst rewards"],
];

// A conversation: what the model did not say, and is not trained on, is grey.
function conversationOf(messages) {
  return messages.flatMap(({ role, content, branch }) => [
    ...(branch ? [element("p", { class: "quiet" }, "another branch: the prompt is written again")] : []),
    element("p", { class: "quiet" }, role),
    element("pre", role === "assistant" ? {} : { class: "masked" }, content),
  ]);
}

function sampleCard(sample) {
  const reward = sample.reward === null ? "no reward" : `reward ${Number(sample.reward.toPrecision(4))}`;
  return element(
    "article",
    {},
    element("p", { class: "quiet" }, `step ${sample.step ?? "–"}, `, element("b", {}, reward)),
    ...(sample.messages
      ? conversationOf(sample.messages)
      : [element("pre", { class: "prompt" }, sample.prompt), element("pre", {}, sample.response)]),
    ...(sample.answer ? [element("p", { class: "quiet" }, "reference answer"), element("pre", {}, sample.answer)] : []),
  );
}

function changedCard(answer) {
  const response = (title, text) => [element("p", { class: "quiet" }, title), element("pre", {}, text)];
  return element(
    "article",
    {},
    element("pre", { class: "prompt" }, answer.prompt),
    ...response("reference answer", answer.answer),
    ...response(`before: reward ${answer.reward_before ?? "–"}`, answer.before),
    ...response(`after: reward ${answer.reward_after ?? "–"}`, answer.after),
  );
}

function changesOf(run) {
  if (!run.changes) return [];
  return [element("h4", {}, run.changes.text), element("div", { class: "samples" }, ...run.changes.answers.map(changedCard))];
}

function samplesOf(run) {
  const columns = KINDS_OF_SAMPLES.map(([kind, title]) =>
    element("div", {}, element("h4", {}, title), ...run.samples[kind].map(sampleCard)),
  );
  return [...changesOf(run), element("div", { class: "samples" }, ...columns)];
}
