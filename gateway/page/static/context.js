// A conversation that grows longer than the model takes: the oldest turns make room, as they do in `pagewire chat`.

import { request } from "./api.js";

// What is kept free for an answer, unless fewer tokens are asked for: one part in so many of what the model takes.
const SHARE_OF_ANSWER = 4;

/**
 * How many of the oldest of `said` ({role, content}) the model is not told, so that the others and an answer of
 * `maxTokens` fit, and how many tokens it takes: {leftOut, limit}. A conversation begins with what its user says. A
 * question that does not fit by itself is left to the server to refuse. Throws as request() does.
 */
export async function makeRoom(model, system, said, maxTokens, signal) {
  const starts = said.map(({ role }, index) => (role === "user" ? index : -1)).filter((index) => index > 0);
  let leftOut = 0, limit = 0;
  const fits = async (from) => {
    const body = { model, messages: [...system, ...said.slice(from)] };
    const told = await (await request("tokenize", { body, signal })).json();
    limit = told.max_model_len;
    const share = Math.floor(limit / SHARE_OF_ANSWER);
    return !limit || told.count <= limit - Math.min(maxTokens ?? share, share) || (from === said.length - 1 && told.count < limit);
  };
  if (!starts.length || (await fits(0))) return { leftOut, limit };
  let [low, high] = [0, starts.length]; // the first start that fits lies here; `high` is none
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle])) high = middle;
    else low = middle + 1;
  }
  if (low < starts.length) leftOut = starts[low];
  return { leftOut, limit };
}
