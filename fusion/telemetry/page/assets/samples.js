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
    ...(branch ? [quiet("another branch: the prompt is written again")] : []),
    quiet(role),
    element("pre", role === "assistant" ? {} : { class: "masked" }, content),
  ]);
}

// A turn that was cut is no message: it is in the response only.
function cutTurnOf({ messages, response }) {
  if (messages.at(-1)?.role === "assistant") return [];
  return [quiet("the whole response, in which a last turn may have been cut"), element("pre", {}, response)];
}

function promptOf({ prompt }) {
  return element("pre", { class: "prompt" }, prompt);
}

function sampleCard(sample) {
  const reward = sample.reward === null ? "no reward" : `reward ${Number(sample.reward.toPrecision(4))}`;
  const head = element("p", { class: "quiet" }, `step ${sample.step ?? "–"}, `, element("b", {}, reward));
  const texts = sample.messages ? [...conversationOf(sample.messages), ...cutTurnOf(sample)] : [promptOf(sample), element("pre", {}, sample.response)];
  const answer = sample.answer ? [quiet("reference answer"), element("pre", {}, sample.answer)] : [];
  return element("article", {}, head, ...texts, ...answer);
}

function changedCard(answer) {
  const response = (title, text) => [quiet(title), element("pre", {}, text)];
  return element(
    "article",
    {},
    promptOf(answer),
    ...response("reference answer", answer.answer),
    ...response(`before: reward ${answer.reward_before ?? "–"}`, answer.before),
    ...response(`after: reward ${answer.reward_after ?? "–"}`, answer.after),
  );
}

function changesOf(run) {
  if (!run.changes) return [];
  return [element("h4", {}, run.changes.text), box("samples", ...run.changes.answers.map(changedCard))];
}

function samplesOf(run) {
  const columns = KINDS_OF_SAMPLES.map(([kind, title]) =>
    element("div", {}, element("h4", {}, title), ...run.samples[kind].map(sampleCard)),
  );
  return [...changesOf(run), box("samples", ...columns)];
}
